"""FuXi's three channels in plain PyTorch against nested loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_cases import Case, assert_exact, inputs, truth, with_gradients
from tests.kernels.test_jagged_attention import any_case
from turbogr_plugin.kernels.fuxi_attention import fuxi_attention
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.reference import attention_chunks

CASES = [
    Case((5, 1, 12), family="fuxi"),
    Case((5, 1, 12), family="fuxi", decay=True),
    Case((6, 3), family="fuxi", next_times=True, per_head=True),
    Case((6, 3), family="fuxi", decay=True, per_head=True, sorted_times=False),
    Case((7, 4), family="fuxi", dim=25, value_dim=50, borders=True),
    Case((7, 4), family="fuxi", dim=50, value_dim=8, heads=1, decay=True),
    Case((0, 4, 0), family="fuxi", index_dtype=torch.int32),
    Case((0, 0), family="fuxi", decay=True),
    Case((), family="fuxi"),
    Case((9, 8, 5), family="fuxi", contextual=(2, 3, 4), targets=(3, 0, 1), window=2, per_head=True),
    Case((14, 6), family="fuxi", window=2, full_tail=3, contextual=2, targets=(2, 1), decay=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_equal_nested_loops(case: Case) -> None:
    assert_exact(inputs(case), implementation="reference")


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.booleans().flatmap(lambda decay: any_case(family="fuxi", causal=True, decay=decay, time=7, position=3)))
def test_any_call_equals_nested_loops(case: Case) -> None:
    assert_exact(inputs(case), implementation="reference")


@pytest.mark.parametrize("elements", [1, 30])
@pytest.mark.parametrize("decay", [False, True])
def test_chunks_of_any_size_equal_nested_loops(decay: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_chunks, "CHUNK_ELEMENTS", elements)
    case = Case((13, 0, 6), family="fuxi", decay=decay, per_head=True, contextual=2, targets=(1, 0, 2))
    assert_exact(inputs(case), implementation="reference")


@pytest.mark.parametrize("decay", [False, True])
def test_gradients_pass_gradcheck_in_float64(decay: bool) -> None:
    x = inputs(Case((3, 2), family="fuxi", dim=2, value_dim=2, time=4, position=3, decay=decay, per_head=decay))

    def call(*leaves: Tensor) -> Tensor:
        for name, leaf in zip(x.leaves(), leaves, strict=True):
            setattr(x, name, leaf)
        return x.call(implementation="reference")

    assert torch.autograd.gradcheck(call, tuple(x.leaves().values()))


def test_the_semantic_channel_is_hstu_attention_without_biases() -> None:
    x = inputs(Case((7, 4), family="fuxi", targets=(2, 1)))
    bare = {"time_bias": None, "position_bias": None, "timestamps": None, "bias_scale": None, "time_decay": None}
    keywords = {name: value for name, value in x.keywords().items() if name not in bare}
    assert torch.equal(x.call()[..., :8], hstu_attention(x.q, x.k, x.v, x.offsets, **keywords))


@pytest.mark.parametrize("decay", [False, True])
def test_low_precision_of_the_reference_stays_near_float64(decay: bool) -> None:
    case = Case((40, 7), family="fuxi", decay=decay)
    x, exact = inputs(case, torch.bfloat16), inputs(case)
    for name, leaf in exact.leaves().items():
        leaf.data.copy_(x.leaves()[name])
    found = with_gradients(x, x.call(implementation="reference"))
    expected = with_gradients(exact, exact.call(implementation="reference"))
    dense = with_gradients(x, truth(x))
    for name, want in expected.items():
        assert found[name].dtype == torch.bfloat16
        allowed = 5 * float((dense[name] - want).norm())
        assert 0 < float((found[name] - want).norm()) <= allowed < 0.5 * float(want.norm()), name


def test_events_at_the_same_time_weigh_the_amplitude_whatever_the_power() -> None:
    x = inputs(Case((3,), family="fuxi"))
    x.times = torch.tensor([5, 5, 5])
    for power in (0.0, -1.0, 2.0):
        x.time_bias, x.time_decay = None, torch.tensor([0.7, 0.3, power], dtype=torch.float64, requires_grad=True)
        x.query_times = x.times
        out = x.call(causal=True)
        torch.testing.assert_close(out[0, :, 8:16], x.v[0] * 0.7 * x.bias_scale)
        (gradient,) = torch.autograd.grad(out[..., 8:16].sum(), x.time_decay)
        assert gradient[0] != 0
        assert gradient[1:].tolist() == [0, 0]


def _call(**changes: Any) -> Tensor:
    base: dict[str, Any] = {
        "q": torch.ones(4, 2, 3),
        "k": torch.ones(4, 2, 3),
        "v": torch.ones(4, 2, 5),
        "offsets": torch.tensor([0, 1, 4]),
        "alpha": 1.0,
        "scale": 1.0,
        "timestamps": torch.arange(4),
        "time_bias": torch.ones(6),
        "position_bias": torch.ones(2, 6),
    }
    return fuxi_attention(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_bias": None}, "temporal channel needs either time_bias or time_decay, got neither"),
        ({"time_decay": torch.ones(3)}, "either time_bias or time_decay, got both"),
        ({"position_bias": None}, "positional channel needs position_bias, got None"),
        ({"causal": False}, "position_bias is defined for causal attention only"),
        ({"time_bias": None, "time_decay": torch.ones(2)}, r"time_decay must be \[3\].*\[2, 3\].*\(2,\)"),
        ({"time_bias": None, "time_decay": torch.ones(3, 3)}, r"time_decay must be.*\(3, 3\)"),
        (
            {"time_bias": None, "time_decay": torch.ones(3, dtype=torch.int64)},
            "time_decay.*floating point; got torch.int",
        ),
        ({"time_bias": None, "time_decay": torch.ones(3), "timestamps": None}, "time_decay needs integer timestamps"),
        ({"time_bias": None, "time_decay": torch.ones(3), "time_buckets": torch.ones(2)}, "time_bias, which is None"),
        ({"offsets": torch.tensor([0, 5, 4])}, "must not decrease"),
        ({"num_targets": torch.tensor([2, 0])}, r"num_targets\[0\] must be between 0 and the row's length 1, got 2"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    assert _call().shape == (4, 2, 15)
    with pytest.raises(ValueError, match=message):
        _call(**changes)
