"""Our kernels for fbgemm's operators against fbgemm's CPU kernels, on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.fbgemm_cases import (
    CASES,
    FUNCTIONS,
    KERNELS,
    OPERATORS,
    assert_same,
    backward,
    each,
    with_gradients,
)

# What only fbgemm has, composite operators, is compared on npu, where it calls ours.
OURS = [operator for operator in OPERATORS if operator in FUNCTIONS]
ABOVE_AUTOGRAD = {kernel.operator.removeprefix("fbgemm::") for kernel in KERNELS if kernel.key == "AutogradPrivateUse1"}
# fbgemm has no CPU kernel for the first, no gradient on CPU for the second, and a wrong one for the third.
ONLY_OURS = {"keyed_jagged_index_select_dim1", "merge_pooled_embeddings", "stacked_jagged_1d_to_dense"}
# fbgemm leaves some gradients on CPU to a fallback of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")


@pytest.mark.parametrize("operator", OURS)
def test_results_equal_those_of_fbgemm(operator: str) -> None:
    for case in CASES:
        if case.operator == operator:
            with each(case):
                theirs = getattr(torch.ops.fbgemm, operator)(*case.arguments)
                assert_same(FUNCTIONS[operator](*case.arguments), theirs, exact=case.exact)


@pytest.mark.parametrize("operator", sorted(ABOVE_AUTOGRAD - ONLY_OURS))
def test_gradients_of_kernels_above_autograd_equal_those_of_fbgemm(operator: str) -> None:
    cases = [case for case in CASES if case.operator == operator and case.gradients]
    assert cases
    for case in cases:
        with each(case):
            ours, theirs = with_gradients(case), with_gradients(case)
            mine = backward(case, ours, FUNCTIONS[operator](*ours))
            assert_same(mine, backward(case, theirs, getattr(torch.ops.fbgemm, operator)(*theirs)), exact=case.exact)


def test_every_kernel_is_written_for_the_schema_that_fbgemm_defines() -> None:
    for kernel in KERNELS:
        qualified, _, overload = kernel.operator.partition(".")
        assert str(torch._C._get_schema(qualified, overload)) == kernel.schema


def test_every_operator_with_a_cpu_kernel_has_a_case() -> None:
    here = {name for name in FUNCTIONS if torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{name}", "CPU")}
    assert here - set(OPERATORS) == set()
