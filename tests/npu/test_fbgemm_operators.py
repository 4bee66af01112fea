"""fbgemm's operators on npu, forward and backward, against fbgemm on CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.kernels.fbgemm_cases import (
    CASES,
    KERNELS,
    OPERATORS,
    Case,
    assert_same,
    backward,
    each,
    moved,
    tensors,
    with_gradients,
)
from turbogr_plugin.kernels.npu_operators import register

# fbgemm leaves some gradients on CPU to a fallback of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")

# Their arguments or results are numbers on the host, copied to the device without waiting.
COPY_TO_DEVICE = {"kt_regroup_arguments", "regroup_keyed_tensor", "block_bucketize_sparse_features"}


@pytest.fixture(scope="module", autouse=True)
def _kernels(npu: ModuleType) -> None:
    assert [outcome for outcome in register(KERNELS) if outcome.status == "refused"] == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_and_gradients_equal_those_on_cpu_and_the_host_waits_only_for_sizes(
    operator: str, npu: ModuleType
) -> None:
    for case in CASES:
        if case.operator == operator:
            with each(case):
                _compare(case, npu)


def _compare(case: Case, npu: ModuleType) -> None:
    function = getattr(torch.ops.fbgemm, case.operator)
    arguments = with_gradients(case)
    theirs = function(*arguments)
    their_gradients = backward(case, arguments, theirs) if case.gradients else []
    there = with_gradients(Case(case.operator, case.name, moved(case.arguments, "npu"), case.gradients))
    npu.reset()
    ours = function(*there)
    counted = npu.counters()
    gradients = backward(case, there, ours) if case.gradients else []
    waits, host_copies = npu.counters().host_syncs, npu.counters().d2h
    assert npu.races() == []
    assert {tensor.device.type for tensor in tensors([ours, gradients])} <= {"npu"}
    assert_same(ours, theirs, exact=case.exact)
    assert_same(gradients, their_gradients, exact=case.exact)
    assert counted.h2d == 0 or case.operator in COPY_TO_DEVICE
    if case.waits:
        assert waits > 0
    else:
        assert (waits, host_copies) == (0, 0)


# fbgemm has no kernel for these on CPU in inference mode.
ONLY_TRAINING_ON_CPU = {"batch_index_select_dim0", "batch_index_select_dim0_tensor", "jagged_slice"}


@torch.inference_mode()
@pytest.mark.parametrize(
    "operator", [operator for operator in OPERATORS if any(c.gradients for c in CASES if c.operator == operator)]
)
def test_results_in_inference_mode_equal_those_on_cpu(operator: str) -> None:
    # There fbgemm's kernels above autograd are not reached.
    for case in CASES:
        if case.operator == operator:
            with each(case):
                with torch.inference_mode(operator not in ONLY_TRAINING_ON_CPU):
                    theirs = getattr(torch.ops.fbgemm, operator)(*case.arguments)
                ours = getattr(torch.ops.fbgemm, operator)(*moved(case.arguments, "npu"))
                assert_same(ours, theirs, exact=case.exact)
