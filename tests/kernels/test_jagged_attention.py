"""HSTU attention against a padded implementation in float64 that shares no code with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.offsets import lengths_to_offsets
from turbogr_plugin.kernels.reference import jagged_attention as reference
from turbogr_plugin.kernels.relative_bias import query_times


@dataclass(frozen=True)
class Case:
    """One call; `time` and `position` are the widths of the tables (0: none), `per_head` gives each head its own."""

    lengths: tuple[int, ...]
    heads: int = 2
    dim: int = 8
    value_dim: int = 8
    causal: bool = True
    time: int = 9
    position: int = 4
    per_head: bool = False
    convention: Any = "own"
    sorted_times: bool = True
    index_dtype: torch.dtype = torch.int64
    seed: int = 0

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if k != "lengths" and v != getattr(Case, k)]
        return ",".join(["x".join(map(str, self.lengths)) or "none", *changed])


@dataclass
class Inputs:
    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    times: Tensor
    time_bias: Tensor | None
    position_bias: Tensor | None
    alpha: float = 0.7
    scale: float = 1 / 11

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.time_bias, self.position_bias) if x is not None]

    def call(self) -> Tensor:
        with_times = self.time_bias is not None
        own = self.case.convention == "own"
        queries = query_times(self.times, self.offsets, "next") if with_times and not own else None
        return hstu_attention(
            self.q,
            self.k,
            self.v,
            self.offsets,
            alpha=self.alpha,
            scale=self.scale,
            causal=self.case.causal,
            timestamps=self.times if with_times else None,
            time_bias=self.time_bias,
            query_timestamps=queries,
            position_bias=self.position_bias,
        )


def _inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    total = sum(case.lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    def table(width: int) -> Tensor | None:
        return (random(case.heads, width) if case.per_head else random(width)) if width else None

    times = torch.cat(
        [torch.randint(0, 60 * 4**5, (n,), generator=generator) for n in case.lengths]
        or [torch.empty(0, dtype=torch.int64)]
    )
    if case.sorted_times:
        times = torch.cat([row.sort().values for row in times.split(list(case.lengths))]) if case.lengths else times
    return Inputs(
        case,
        random(total, case.heads, case.dim),
        random(total, case.heads, case.dim),
        random(total, case.heads, case.value_dim),
        lengths_to_offsets(torch.tensor(case.lengths, dtype=case.index_dtype)),
        times.to(case.index_dtype),
        table(case.time),
        table(case.position if case.causal else 0),
    )


def _padded(x: Inputs) -> Tensor:
    """The same by einsum on [B, N, H, D] with dense masks, and bias entries looked up pair by pair."""
    lengths = x.case.lengths
    rows, width = len(lengths), max(lengths, default=0)
    token = torch.zeros(rows, width, dtype=torch.int64)  # padding takes token 0: finite values that a mask must hide
    valid = torch.zeros(rows, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        token[row, :length] = sum(lengths[:row]) + torch.arange(length)
        valid[row, :length] = True
    if not valid.any():
        return x.v * 0
    bucket = torch.zeros(rows, width, width, dtype=torch.int64)
    gap = torch.zeros(rows, width, width, dtype=torch.int64)
    times = x.times.tolist()
    for row, length in enumerate(lengths):
        for i in range(length):
            stands_at = i if x.case.convention == "own" else min(i + 1, length - 1)
            for j in range(length):
                between = abs(times[int(token[row, stands_at])] - times[int(token[row, j])])
                bucket[row, i, j] = min(math.floor(math.log(max(between, 1)) / 0.301), max(x.case.time - 1, 0))
                gap[row, i, j] = min(max(i - j, 0), max(x.case.position - 1, 0))
    scores = torch.einsum("bihd,bjhd->bhij", x.q[token], x.k[token]) * x.alpha
    for table, entries in ((x.time_bias, bucket), (x.position_bias, gap)):
        if table is not None:
            per_head = table if table.dim() == 2 else table.expand(x.case.heads, -1)
            scores = scores + per_head[:, entries].transpose(0, 1)
    seen = valid[:, None, :, None] & valid[:, None, None, :]
    if x.case.causal:
        seen = seen & torch.ones(width, width, dtype=torch.bool).tril()
    weights = torch.where(seen, scores * torch.sigmoid(scores) * x.scale, 0.0)
    return torch.einsum("bhij,bjhe->bihe", weights, x.v[token])[valid]


def _assert_equals_padded(x: Inputs) -> None:
    expected, found = _padded(x), x.call()
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found_gradients = torch.autograd.grad(found, x.leaves, weight)
    expected_gradients = torch.autograd.grad(expected, x.leaves, weight, allow_unused=True, materialize_grads=True)
    for got, want in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


CASES = [
    Case((5, 1, 12)),
    Case((5, 1, 12), causal=False),
    Case((5, 1, 12), convention="next"),
    Case((6, 3), causal=False, convention="next", per_head=True),
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
    Case((6, 0, 5), index_dtype=torch.int32, convention="next", per_head=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_equal_the_padded_implementation(case: Case) -> None:
    _assert_equals_padded(_inputs(case))


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    st.builds(
        Case,
        lengths=st.lists(st.integers(0, 9), max_size=4).map(tuple),
        heads=st.integers(1, 3),
        dim=st.sampled_from([1, 4, 8]),
        value_dim=st.sampled_from([1, 5, 8]),
        causal=st.booleans(),
        time=st.integers(0, 12),
        position=st.integers(0, 12),
        per_head=st.booleans(),
        convention=st.sampled_from(["own", "next"]),
        sorted_times=st.booleans(),
        index_dtype=st.sampled_from([torch.int32, torch.int64]),
        seed=st.integers(0, 99),
    )
)
def test_any_shape_equals_the_padded_implementation(case: Case) -> None:
    _assert_equals_padded(_inputs(case))


@pytest.mark.parametrize("elements", [1, 30, 100])
@pytest.mark.parametrize("case", [Case((13, 0, 6)), Case((13, 6), causal=False, per_head=True)], ids=str)
def test_chunks_of_any_size_equal_the_padded_implementation(
    case: Case, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", elements)
    _assert_equals_padded(_inputs(case))


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 0, 2), dim=2, value_dim=3, time=4, position=3, per_head=True),
        Case((3, 2), dim=2, value_dim=2, time=4, causal=False),
        Case((4,), dim=2, value_dim=2, time=0, position=0),
    ],
    ids=str,
)
def test_gradients_pass_gradcheck_in_float64(case: Case) -> None:
    x = _inputs(case)

    def call(*leaves: Tensor) -> Tensor:
        x.q, x.k, x.v, *tables = leaves
        x.time_bias = tables.pop(0) if case.time else None
        x.position_bias = tables.pop(0) if tables else None
        return x.call()

    assert torch.autograd.gradcheck(call, x.leaves)


@pytest.mark.parametrize("case", [Case((3, 0, 5), per_head=True), Case((0,), time=0, causal=False)], ids=str)
def test_the_operator_passes_opcheck(case: Case) -> None:
    x = _inputs(case, torch.float32)
    times = x.times if case.time else None
    torch.library.opcheck(
        torch.ops.turbogr.hstu_attention.default,
        (x.q, x.k, x.v, x.offsets, 0.5, 0.1, case.causal, times, times, x.time_bias, x.position_bias),
    )
    grad = torch.ones(x.v.shape)
    detached = [y if y is None else y.detach() for y in (x.q, x.k, x.v, x.time_bias, x.position_bias)]
    torch.library.opcheck(
        torch.ops.turbogr.hstu_attention_backward.default,
        (grad, *detached[:3], x.offsets, 0.5, 0.1, case.causal, times, times, *detached[3:]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_float64_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    x = _inputs(Case((40, 7)), dtype)
    exact = _inputs(Case((40, 7)))
    for leaf, given_leaf in zip(exact.leaves, x.leaves, strict=True):
        leaf.data.copy_(given_leaf)  # the same rounded inputs: what is left is the error of the operator
    found, expected = x.call(), exact.call()
    assert found.dtype == dtype
    epsilon = torch.finfo(dtype).eps
    # Sums of at most 40 products of which each is rounded a handful of times.
    assert float((found - expected).detach().abs().max()) < 8 * epsilon * float(expected.detach().abs().max())
    # Gradients: at most five times the error of the same computation written with padding, run in this precision.
    gradients = torch.autograd.grad(found.square().sum(), x.leaves)
    padded = torch.autograd.grad(_padded(x).square().sum(), x.leaves)
    wanted = torch.autograd.grad(expected.square().sum(), exact.leaves)
    for leaf, gradient, yardstick, exactly in zip(x.leaves, gradients, padded, wanted, strict=True):
        assert gradient.dtype == leaf.dtype
        allowed = 5 * float((yardstick - exactly).norm())
        assert 0 < float((gradient - exactly).norm()) <= allowed < 0.5 * float(exactly.norm())


def _reordered(x: Inputs, order: list[int]) -> Inputs:
    bounds = x.offsets.tolist()
    token = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in order])
    lengths = tuple(x.case.lengths[row] for row in order)
    return Inputs(
        Case(lengths),
        *(y.detach()[token].requires_grad_() for y in (x.q, x.k, x.v)),
        lengths_to_offsets(torch.tensor(lengths)),
        x.times[token],
        x.time_bias,
        x.position_bias,
    )


def test_a_row_gets_the_same_bits_in_any_batch() -> None:
    x = _inputs(Case((5, 9, 0, 3)), torch.float32)
    whole = x.call().split([5, 9, 0, 3])
    grads = torch.autograd.grad(sum(part.square().sum() for part in whole), [x.q, x.k, x.v])
    for order in ([3, 1, 0, 2], [1], [0, 3]):
        part = _reordered(x, order)
        found = part.call()
        lengths = [(5, 9, 0, 3)[row] for row in order]
        for row, got in zip(order, found.split(lengths), strict=True):
            assert torch.equal(got, whole[row])
        got_grads = torch.autograd.grad(found.square().sum(), [part.q, part.k, part.v])
        for got_grad, grad in zip(got_grads, grads, strict=True):
            expected = torch.cat([grad.split([5, 9, 0, 3])[row] for row in order])
            assert torch.equal(got_grad, expected)


def test_a_token_sees_nothing_of_later_ones() -> None:
    x = _inputs(Case((8,)))
    before = x.call().detach()
    with torch.no_grad():
        for y in (x.q, x.k, x.v):
            y[5:] += 3
    x.times[5:] += 1000
    after = x.call()
    assert torch.equal(after[:5], before[:5])
    assert not torch.isclose(after[5:], before[5:]).any()


def test_the_layout_on_the_host_changes_no_bit() -> None:
    found, grads = [], []
    for host_offsets in (None, [0, 1, 4]):
        q = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
        found.append(_call(q=q, host_offsets=host_offsets))
        grads.append(torch.autograd.grad(found[-1].square().sum(), q)[0])
    assert torch.equal(*found)
    assert torch.equal(*grads)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_offsets": [0, 4]}, "host_offsets must be the 3 numbers of offsets, up to 4; got 2, up to 4"),
        ({"host_offsets": [0, 1, 3]}, "got 3, up to 3"),
        ({"q": torch.ones(4, 2, 4)}, r"q and k must be \[T, H, D\].*\(4, 2, 4\), \(4, 2, 3\), \(4, 2, 5\)"),
        ({"q": torch.ones(4, 6), "k": torch.ones(4, 6)}, r"\[T, H, D\]"),
        ({"v": torch.ones(4, 1, 5)}, r"\[T, H, E\]"),
        ({"v": torch.ones(3, 2, 5)}, r"\[T, H, E\]"),
        ({"v": torch.ones(4, 10)}, r"\[T, H, E\]"),
        ({"k": torch.ones(4, 2, 3).double()}, "one floating-point type.*torch.float64"),
        ({"v": torch.ones(4, 2, 5).bfloat16()}, "one floating-point type.*torch.bfloat16"),
        ({name: torch.ones(4, 2, 3, dtype=torch.int64) for name in "qkv"}, "floating-point type"),
        ({"offsets": torch.tensor([0, 1, 3])}, "number of values 4, got 0 to 3"),
        ({"offsets": torch.tensor([0, 5, 4])}, "must not decrease"),
        ({"offsets": torch.tensor([0.0, 4.0])}, "int32 or int64"),
        ({"time_bias": torch.ones(3, 6)}, r"time_bias must be \[N\].*\[2, N\].*\(3, 6\)"),
        ({"time_bias": torch.ones(0)}, "time_bias.*N >= 1"),
        ({"position_bias": torch.ones(1, 2, 6)}, "position_bias must be"),
        ({"position_bias": torch.ones(2, 0)}, "position_bias.*N >= 1"),
        ({"causal": False}, "causal attention only: pass causal=True or position_bias=None"),
        ({"timestamps": None}, r"integer timestamps \[T\] with T = 4, got None"),
        ({"timestamps": torch.arange(3)}, r"timestamps.*\(3,\)"),
        ({"timestamps": torch.ones(4)}, "integer timestamps.*torch.float32"),
        ({"query_timestamps": torch.arange(5)}, r"query_timestamps.*\(5,\)"),
        ({"query_timestamps": torch.ones(4)}, "integer query_timestamps.*torch.float32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    assert _call().shape == (4, 2, 5)
    with pytest.raises(ValueError, match=message):
        _call(**changes)
