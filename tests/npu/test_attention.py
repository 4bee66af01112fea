"""The attention operators and the jagged plumbing on npu, against the same on CPU, without a wait for the device."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import Case, Inputs, inputs, output_weight, with_gradients
from turbogr_plugin import kernels
from turbogr_plugin.kernels.fuxi_attention import fuxi_attention
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.jagged_select import (
    age_buckets,
    concat_2d_jagged,
    jagged_dense_broadcast_add,
    last_tokens,
    split_2d_jagged,
    target_tokens,
)
from turbogr_plugin.kernels.relative_bias import query_times

CASES = [
    Case((5, 0, 12), next_times=True),
    Case((9, 8, 0, 5), contextual=(2, 3, 0, 4), targets=(3, 0, 0, 1), window=2, full_tail=1, per_head=True),
    Case((9, 4), causal=False, contextual=2, time=0, index_dtype=torch.int32),
    Case((7, 4), family="fuxi", borders=True, targets=(2, 1)),
    Case((7, 4), family="fuxi", decay=True, per_head=True, contextual=2),
    Case((0, 0), family="fuxi"),
]
OPERATORS = {"hstu": hstu_attention, "fuxi": fuxi_attention}


def _on_npu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("npu").requires_grad_(value.requires_grad)


def _moved(x: Inputs) -> tuple[Inputs, dict[str, Any]]:
    """The inputs and the keyword arguments of their call, the same leaves in both, on npu."""
    there = replace(x, **{name: _on_npu(value) for name, value in vars(x).items()})
    leaves = there.leaves()
    return there, {name: leaves.get(name, _on_npu(value)) for name, value in x.keywords().items()}


@pytest.mark.parametrize("layout_on_host", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_on_cpu_and_the_host_waits_for_the_layout_alone(
    case: Case, layout_on_host: bool, npu: ModuleType
) -> None:
    x = inputs(case, torch.float32)
    expected = with_gradients(x, x.call(implementation="reference"))
    there, keywords = _moved(x)
    if layout_on_host:
        keywords["host_offsets"] = x.offsets.tolist()
    weight = output_weight(case, expected["output"]).to("npu")
    npu.reset()
    output = OPERATORS[case.family](there.q, there.k, there.v, there.offsets, **keywords)
    leaves = there.leaves()
    gradients = torch.autograd.grad(output, list(leaves.values()), weight)
    found = {"output": output, **dict(zip(leaves, gradients, strict=True))}
    waits = npu.counters().host_syncs
    assert npu.races() == []
    assert waits == (0 if layout_on_host else 2)  # forward and backward
    torch.testing.assert_close({name: y.detach().cpu() for name, y in found.items()}, expected)


def test_the_reference_serves_where_torch_npu_and_triton_ascend_are_missing() -> None:
    x, keywords = _moved(inputs(CASES[0], torch.float32))
    choice = kernels.explain(hstu_attention, x.q, x.k, x.v, x.offsets, **keywords)
    assert choice.implementation == "reference"
    assert list(choice.passed_over) == ["triton"]


def test_offsets_out_of_range_are_an_error_where_the_host_reads_them() -> None:
    x, keywords = _moved(inputs(CASES[0], torch.float32))
    with pytest.raises(ValueError, match="offsets must not decrease"):
        hstu_attention(x.q, x.k, x.v, torch.tensor([0, 20, 5, 17], device="npu"), **keywords)
    with pytest.raises(ValueError, match="offsets must run from 0 to the number of values 17, got 0 to 20"):
        hstu_attention(x.q, x.k, x.v, x.offsets, **keywords, host_offsets=[0, 5, 5, 20])


def test_the_jagged_plumbing_is_that_of_cpu_without_a_wait(npu: ModuleType) -> None:
    offsets, other, targets = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 1, 3, 3]), torch.tensor([2, 0, 1])
    values, more = torch.arange(14.0).view(7, 2), -torch.arange(6.0).view(3, 2)
    dense, times = torch.arange(6.0).view(3, 2), torch.arange(7) ** 4

    def all_of_them(offsets: Tensor, other: Tensor, targets: Tensor, *given: Tensor) -> list[Tensor]:
        values, more, dense, times = given
        joined, joined_offsets = concat_2d_jagged(values, more, offsets, other)
        return [
            joined,
            joined_offsets,
            *split_2d_jagged(joined, offsets, other, left_total=7),
            jagged_dense_broadcast_add(values, offsets, dense),
            last_tokens(values, offsets),
            *target_tokens(values, offsets, targets, total=3),
            age_buckets(times, offsets, 16),
            query_times(times, offsets, "next"),
        ]

    given = (offsets, other, targets, values, more, dense, times)
    expected = all_of_them(*given)
    there = [x.to("npu").requires_grad_(x.is_floating_point()) for x in given]
    npu.reset()
    found = all_of_them(*there)
    sum(x.sum() for x in found if x.is_floating_point()).backward()  # type: ignore[union-attr]
    assert npu.counters().host_syncs == 0
    assert npu.races() == []
    for got, want in zip(found, expected, strict=True):
        assert got.device.type == "npu"
        assert torch.equal(got.detach().cpu(), want)
