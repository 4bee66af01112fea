"""HSTU attention in plain PyTorch against nested loops, and what holds of its output whoever computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_cases import Case, assert_exact, inputs, reordered, truth, with_gradients
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.reference import attention_chunks

CASES = [
    Case((5, 1, 12)),
    Case((5, 1, 12), causal=False),
    Case((5, 1, 12), next_times=True),
    Case((6, 3), causal=False, next_times=True, per_head=True),
    Case((4, 7), per_head=True),
    Case((9, 2), sorted_times=False),
    Case((9, 2), sorted_times=False, causal=False, per_head=True),
    Case((3, 8), time=0),
    Case((3, 8), position=0, per_head=True),
    Case((3, 8), time=0, position=0, causal=False),
    Case((7, 4), dim=25, value_dim=50),
    Case((7, 4), dim=50, value_dim=8, per_head=True),
    Case((7, 4), dim=1, value_dim=25, heads=1),
    Case((0, 4, 0, 0, 3, 0)),
    Case((1, 1, 1)),
    Case((0, 0)),
    Case(()),
    Case((17,), time=1, position=1),
    Case((6, 0, 5), index_dtype=torch.int32),
    Case((6, 0, 5), index_dtype=torch.int32, next_times=True, per_head=True, borders=True),
    Case((7, 5, 3, 0), targets=(2, 0, 3, 0)),
    Case((7, 5, 3, 0), targets=(2, 0, 3, 0), causal=False),
    Case((9, 4), contextual=2),
    Case((9, 4, 2), contextual=(0, 1, 2), causal=False, borders=True),
    Case((9, 8, 5), contextual=(2, 3, 4), targets=(3, 0, 1), window=2, per_head=True),
    Case((14, 3), window=3),
    Case((14, 3), window=1, full_tail=4, causal=False),
    Case((14, 6), window=2, full_tail=3, contextual=2, targets=(2, 1), index_dtype=torch.int32),
    Case((3, 2, 4), contextual=3, targets=(2, 0, 0)),
    Case((5, 3), dim=256, value_dim=64),
    Case((5, 3), dim=64, value_dim=128, heads=1),
    Case((0, 120, 1, 2), targets=(0, 100, 1, 0), sorted_times=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_equal_nested_loops(case: Case) -> None:
    assert_exact(inputs(case), implementation="reference")


@st.composite
def any_case(draw: st.DrawFn, **given_fields: Any) -> Case:
    """Any legal call of few tokens."""
    lengths = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    targets = tuple(draw(st.integers(0, length)) for length in lengths)
    contextual = st.one_of(st.integers(0, 4), st.tuples(*(st.integers(0, 4) for _ in lengths)))
    drawn: dict[str, Any] = {
        "lengths": lengths,
        "heads": draw(st.integers(1, 3)),
        "dim": draw(st.sampled_from([1, 4, 8])),
        "value_dim": draw(st.sampled_from([1, 5, 8])),
        "causal": draw(st.booleans()),
        "targets": draw(st.sampled_from([None, targets])),
        "contextual": draw(contextual),
        "window": draw(st.one_of(st.none(), st.integers(1, 9))),
        "full_tail": draw(st.integers(0, 4)),
        "time": draw(st.integers(0, 12)),
        "borders": draw(st.booleans()),
        "position": draw(st.integers(0, 12)),
        "per_head": draw(st.booleans()),
        "next_times": draw(st.booleans()),
        "sorted_times": draw(st.booleans()),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "seed": draw(st.integers(0, 99)),
    }
    return Case(**{**drawn, **given_fields})


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(any_case())
def test_any_call_equals_nested_loops(case: Case) -> None:
    assert_exact(inputs(case), implementation="reference")


@pytest.mark.parametrize("elements", [1, 30, 100])
@pytest.mark.parametrize(
    "case",
    [
        Case((13, 0, 6)),
        Case((13, 6), causal=False, per_head=True),
        Case((13, 6), contextual=2, targets=(3, 1), window=2),
    ],
    ids=str,
)
def test_chunks_of_any_size_equal_nested_loops(case: Case, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_chunks, "CHUNK_ELEMENTS", elements)
    assert_exact(inputs(case), implementation="reference")


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 0, 2), dim=2, value_dim=3, time=4, position=3, per_head=True),
        Case((3, 2), dim=2, value_dim=2, time=4, causal=False),
        Case((4,), dim=2, value_dim=2, time=0, position=0),
        Case((5,), dim=2, value_dim=1, time=4, targets=(2,), contextual=1, window=1),
    ],
    ids=str,
)
def test_gradients_pass_gradcheck_in_float64(case: Case) -> None:
    x = inputs(case)

    def call(*leaves: Tensor) -> Tensor:
        for name, leaf in zip(x.leaves(), leaves, strict=True):
            setattr(x, name, leaf)
        return x.call(implementation="reference")

    assert torch.autograd.gradcheck(call, tuple(x.leaves().values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_of_the_reference_stays_near_float64_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    x, exact = inputs(Case((40, 7)), dtype), inputs(Case((40, 7)))
    for name, leaf in exact.leaves().items():
        leaf.data.copy_(x.leaves()[name])  # the same rounded inputs: what is left is the error of the operator
    found = with_gradients(x, x.call(implementation="reference"))
    expected = with_gradients(exact, exact.call(implementation="reference"))
    # The yardstick: the same computation on dense tensors of a row, run in this precision.
    dense = with_gradients(x, truth(x))
    assert found["output"].dtype == dtype
    # Sums of at most 40 products of which each is rounded a handful of times.
    bound = 8 * torch.finfo(dtype).eps * float(expected["output"].abs().max())
    assert float((found["output"] - expected["output"]).abs().max()) < bound
    for name, leaf in x.leaves().items():
        assert found[name].dtype == leaf.dtype
        allowed = 5 * float((dense[name] - expected[name]).norm())
        assert 0 < float((found[name] - expected[name]).norm()) <= allowed < 0.5 * float(expected[name].norm())


def test_a_token_sees_nothing_of_later_ones() -> None:
    x = inputs(Case((8,)))
    before = x.call().detach()
    with torch.no_grad():
        for y in (x.q, x.k, x.v):
            y[5:] += 3
    x.times[5:] += 1000
    after = x.call()
    assert torch.equal(after[:5], before[:5])
    assert not torch.isclose(after[5:], before[5:]).any()


def test_a_target_moves_the_output_of_no_other_token() -> None:
    x = inputs(Case((8,), targets=(3,), contextual=2))
    before = x.call().detach()
    with torch.no_grad():
        for y in (x.q, x.k, x.v):
            y[6] += 3
    after = x.call()
    others = [0, 1, 2, 3, 4, 5, 7]
    assert torch.equal(after[others], before[others])
    assert not torch.isclose(after[6], before[6]).any()


def test_a_score_too_large_for_the_dtype_is_hidden_from_those_who_may_not_see_it() -> None:
    x = inputs(Case((6,), time=0, position=0), torch.float32)
    with torch.no_grad():
        x.k[3] = 1e38
    assert torch.isfinite(x.call()[:3]).all()


def test_a_row_gets_the_same_bits_in_any_batch() -> None:
    case = Case((5, 9, 0, 3), targets=(1, 2, 0, 3), contextual=(2, 1, 3, 0))
    x = inputs(case, torch.float32)
    weight = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(1))
    whole = dict(zip("oqkv", [x.call(), *torch.autograd.grad(x.call(), [x.q, x.k, x.v], weight)], strict=True))
    for order in ([3, 1, 0, 2], [1], [0, 3]):
        part, token = reordered(x, order)
        out = part.call()
        found = dict(
            zip("oqkv", [out, *torch.autograd.grad(out, [part.q, part.k, part.v], weight[token])], strict=True)
        )
        for name, got in found.items():
            assert torch.equal(got, whole[name][token]), (order, name)


@pytest.mark.parametrize("host_offsets", [None, [0, 1, 4]], ids=str)
def test_the_layout_on_the_host_changes_no_bit(host_offsets: list[int] | None) -> None:
    x = inputs(Case((1, 3)), torch.float32)
    found, expected = with_gradients(x, x.call(host_offsets=host_offsets)), with_gradients(x, x.call())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, asked = inputs(Case((4, 3))), []

    def add_by_entry(table: Tensor, *_: Any) -> None:
        asked.append(table.shape)

    monkeypatch.setattr("turbogr_plugin.kernels.reference.jagged_attention.add_by_entry", add_by_entry)
    assert x.time_bias is not None and x.position_bias is not None
    for frozen, wanted in (((), {(9,), (4,)}), (("time_bias",), {(4,)}), (("time_bias", "position_bias"), set())):
        asked.clear()
        for name in ("time_bias", "position_bias"):
            getattr(x, name).requires_grad_(name not in frozen)
        torch.autograd.grad(x.call(implementation="reference").sum(), x.q)
        assert set(asked) == {torch.Size(shape) for shape in wanted}


def test_inputs_with_any_strides_give_the_same() -> None:
    x = inputs(Case((5, 4), dim=8, value_dim=8), torch.float32)
    expected = x.call()
    packed = torch.stack([x.q, x.k, x.v], dim=1).detach()  # as one projection gives them: rows 3 * H * D apart
    for name, leaf in zip("qkv", packed.unbind(1), strict=True):
        setattr(x, name, leaf)
    assert torch.equal(x.call(), expected)
    x.q, x.k, x.v = (y.transpose(0, 1).contiguous().transpose(0, 1) for y in (x.q, x.k, x.v))
    found = x.call()
    assert torch.equal(found, expected)
    assert found.is_contiguous()


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
    return hstu_attention(**{**base, **changes})


INT = torch.int64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_offsets": [0, 4]}, "host_offsets must be the 3 numbers of offsets, got 2 numbers"),
        ({"host_offsets": [0, 1, 3]}, "number of values 4, got 0 to 3"),
        ({"host_offsets": [0, 5, 4]}, r"offsets\[1\] = 5 > 4"),
        ({"host_offsets": [0, 2, 4]}, r"host_offsets must be the numbers of offsets, got \[0, 2, 4\]"),
        ({"q": torch.ones(4, 2, 4)}, r"q and k must be \[T, H, D\].*\(4, 2, 4\), \(4, 2, 3\), \(4, 2, 5\)"),
        ({"q": torch.ones(4, 6), "k": torch.ones(4, 6)}, r"\[T, H, D\]"),
        ({"v": torch.ones(4, 1, 5)}, r"\[T, H, E\]"),
        ({"v": torch.ones(3, 2, 5)}, r"\[T, H, E\]"),
        ({"v": torch.ones(4, 10)}, r"\[T, H, E\]"),
        ({"k": torch.ones(4, 2, 3).double()}, "one floating-point type.*torch.float64"),
        ({"v": torch.ones(4, 2, 5).bfloat16()}, "one floating-point type.*torch.bfloat16"),
        ({name: torch.ones(4, 2, 3, dtype=INT) for name in "qkv"}, "floating-point type"),
        ({"offsets": torch.tensor([0, 1, 3])}, "number of values 4, got 0 to 3"),
        ({"offsets": torch.tensor([0, 5, 4])}, "must not decrease"),
        ({"offsets": torch.tensor([0.0, 4.0])}, "int32 or int64"),
        ({"offsets": torch.tensor([[0, 4]])}, r"\[B \+ 1\].*\(1, 2\)"),
        ({"offsets": torch.zeros(1, dtype=INT)}, "one number describe no row, got 4 values"),
        ({"q": torch.ones(4, 0, 3), "k": torch.ones(4, 0, 3), "v": torch.ones(4, 0, 5)}, "must be at least 1.*4, 0, 3"),
        ({"v": torch.ones(4, 2, 0)}, r"must be at least 1.*v \(4, 2, 0\)"),
        ({"offsets": torch.empty(0, dtype=INT)}, r"\[B \+ 1\].*\(0,\)"),
        ({"num_targets": torch.tensor([0, 4])}, r"num_targets\[1\] must be between 0 and the row's length 3, got 4"),
        ({"num_targets": torch.tensor([-1, 0])}, r"num_targets\[0\].*got -1"),
        ({"num_targets": torch.tensor([0])}, r"num_targets must be int32 or int64 of shape \[B\] with B = 2.*\(1,\)"),
        ({"num_targets": torch.tensor([0.0, 1.0])}, "num_targets must be int32 or int64.*float32"),
        ({"num_contextual": torch.tensor([0, -2])}, r"num_contextual\[1\] must be at least 0, got -2"),
        ({"num_contextual": -1}, r"num_contextual\[0\] must be at least 0, got -1"),
        ({"num_contextual": torch.tensor([[0, 1]])}, r"num_contextual must be.*\(1, 2\)"),
        ({"window": 0}, "window must be at least 1, or None for no window, got 0"),
        ({"full_tail": -1}, "full_tail must be at least 0, got -1"),
        ({"time_bias": torch.ones(3, 6)}, r"time_bias must be \[N\].*\[2, N\].*\(3, 6\)"),
        ({"time_bias": torch.ones(0)}, "time_bias.*N >= 1"),
        ({"time_bias": torch.ones(6, dtype=INT)}, "time_bias must be of a floating-point type, got torch.int64"),
        ({"position_bias": torch.ones(1, 2, 6)}, "position_bias must be"),
        ({"position_bias": torch.ones(2, 0)}, "position_bias.*N >= 1"),
        ({"causal": False}, "causal attention only: pass causal=True or position_bias=None"),
        ({"timestamps": None}, r"integer timestamps \[T\] with T = 4, got None"),
        ({"timestamps": torch.arange(3)}, r"timestamps.*\(3,\)"),
        ({"timestamps": torch.ones(4)}, "integer timestamps.*torch.float32"),
        ({"query_timestamps": torch.arange(5)}, r"query_timestamps.*\(5,\)"),
        ({"query_timestamps": torch.ones(4)}, "integer query_timestamps.*torch.float32"),
        ({"time_buckets": torch.ones(4)}, r"the 6 - 1 borders.*\(4,\)"),
        ({"time_buckets": torch.ones(5).double()}, "in float32, got torch.float64"),
        ({"time_buckets": torch.tensor([1.0, 2, 4, 3, 9])}, "time_buckets must be ascending borders"),
        ({"time_buckets": torch.tensor([1.0, 2, 4, 8, torch.nan])}, "time_buckets must be ascending borders"),
        ({"time_bias": None, "time_buckets": torch.ones(5)}, "time_buckets are the borders.*time_bias, which is None"),
        ({"implementation": "fast"}, "implementation must be one of triton, cpu, reference or None, got 'fast'"),
        (
            {"implementation": "triton"},
            "'triton' cannot serve this call.*tensors on cuda, npu, these are on cpu",
        ),
        ({"k": torch.ones(4, 2, 3, device="meta")}, r"k must be on the device of q \(cpu\), got meta"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_the_call_that_the_bad_ones_are_made_of_is_a_good_one() -> None:
    assert _call().shape == (4, 2, 5)
