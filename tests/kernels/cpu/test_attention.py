"""C++ attention, HSTU's and FuXi's: exact to the rule at every shape, the same bits for any threads and neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_cases import (
    Case,
    Inputs,
    assert_as_exact_as_reference,
    inputs,
    reordered,
    with_gradients,
)
from tests.kernels.cpu.attention_shapes import BORDERS, CASES, FUXI_CASES, SHORT_ROWS
from turbogr_plugin.kernels.cpu import build, fuxi_attention, jagged_attention

for family in ("jagged_attention", "fuxi_attention"):
    if reason := build.missing(family):
        pytest.skip(f"lane cpu: {reason}", allow_module_level=True)

WIDE = Case(
    (300, 17, 0, 600, 5, 9, 64), heads=9, dim=16, value_dim=24, time=128, position=256, targets=(9, 0, 0, 40, 1, 9, 2)
)
FAMILIES = ("hstu", "fuxi")


def _run(x: Inputs) -> dict[str, Tensor]:
    return with_gradients(x, x.call(implementation="cpu"))


def _assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, want in expected.items():
        assert torch.equal(found[name], want), f"{name} differs by {(found[name] - want).abs().max()}"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [*CASES, *FUXI_CASES], ids=str)
def test_float32_is_as_exact_as_the_reference(case: Case) -> None:
    assert_as_exact_as_reference(case, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES[2:12:2], CASES[3], *FUXI_CASES[2::4]], ids=str)
def test_lower_precision_is_as_exact_as_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_as_exact_as_reference(case, dtype, "cpu")


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    lengths = tuple(draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 300)), max_size=6)))
    contextual = draw(st.sampled_from([0, 1, 3, 40]))
    targets = draw(st.none() | st.tuples(*(st.integers(0, length) for length in lengths)))
    return Case(
        lengths,
        family=draw(st.sampled_from(FAMILIES)),
        heads=draw(st.sampled_from([1, 2, 9])),
        dim=draw(st.sampled_from([8, 25, 50, 64])),
        value_dim=draw(st.sampled_from([1, 8, 50, 128])),
        targets=targets,
        contextual=contextual,
        window=draw(st.sampled_from([None, 1, 30, 100])),
        full_tail=draw(st.sampled_from([0, 50])),
        time=draw(st.sampled_from([1, 32, 128])),
        position=draw(st.sampled_from([1, 50, 400])),
        decay=draw(st.booleans()),
        per_head=draw(st.booleans()),
        next_times=draw(st.booleans()),
        sorted_times=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(_cases())
def test_any_shape_and_mask_is_as_exact_as_the_reference(case: Case) -> None:
    if case.family == "hstu":
        case = replace(case, decay=False)
    assert_as_exact_as_reference(case, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_repeats_and_any_number_of_threads_give_the_same_bits(family: Any, dtype: torch.dtype, threads: None) -> None:
    case = replace(WIDE, family=family)
    expected = _run(inputs(case, dtype))
    for number in (1, 2, 3, 5, 5, 2):
        torch.set_num_threads(number)
        _assert_same_bits(_run(inputs(case, dtype)), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [SHORT_ROWS, (*BORDERS, 300, 9)], ids=str)
def test_no_bit_of_a_row_depends_on_the_rows_around_it(family: Any, lengths: tuple[int, ...]) -> None:
    x = inputs(Case(lengths, family=family, heads=2, time=32, position=80), torch.float32)
    whole = _run(x)
    for order in ([*range(len(lengths))][::-1], [2], [0, 4]):
        part, tokens = reordered(x, order)
        weight = torch.randn(whole["output"].shape, generator=torch.Generator().manual_seed(5))
        again = torch.autograd.grad(x.call(implementation="cpu"), [x.q, x.k, x.v], weight)
        output = part.call(implementation="cpu")
        assert torch.equal(output, whole["output"][tokens])
        gradients = torch.autograd.grad(output, [part.q, part.k, part.v], weight[tokens])
        for found, want in zip(gradients, again, strict=True):
            assert torch.equal(found, want[tokens])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", ["q", "k", "v"])
def test_numbers_that_are_not_finite_stay_in_their_row(family: Any, bad: str) -> None:
    case = Case((7, 5, 9, 70), family=family)
    clean, spoiled = inputs(case, torch.float32), inputs(case, torch.float32)
    with torch.no_grad():
        getattr(spoiled, bad)[8, 1, 3] = float("inf")  # a token of the second row
    others = torch.ones(91, dtype=torch.bool)
    others[7:12] = False
    expected, found = _run(clean), _run(spoiled)
    assert not found["output"].isfinite().all()
    for name in ("output", "q", "k", "v"):
        assert torch.equal(found[name][others], expected[name][others]), name


@pytest.mark.parametrize(("family", "channel"), [("hstu", 0), ("fuxi", 0), ("fuxi", 1), ("fuxi", 2)])
def test_gradients_that_are_not_finite_stay_in_their_row(family: Any, channel: int) -> None:
    case = Case((7, 5, 9, 70), family=family)
    x, others = inputs(case, torch.float32), torch.ones(91, dtype=torch.bool)
    others[7:12] = False
    output = x.call(implementation="cpu")
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    expected = torch.autograd.grad(output, [x.q, x.k, x.v], weight, retain_graph=True)
    weight[8, 1, channel * case.value_dim + 3] = float("inf")  # a token of the second row
    for found, want in zip(torch.autograd.grad(output, [x.q, x.k, x.v], weight), expected, strict=True):
        assert torch.equal(found[others], want[others])


@pytest.mark.parametrize("table", ["time_bias", "position_bias"])
@pytest.mark.parametrize("value", [-1e25, -1e30, torch.finfo(torch.float32).min])
def test_pairs_masked_by_a_huge_negative_bias_count_for_nothing(table: str, value: float) -> None:
    x = inputs(Case((40, 7, 90), time=3, position=60), torch.float32)
    with torch.no_grad():
        entries = getattr(x, table)
        entries[entries.numel() // 2] = value
    found, expected = (with_gradients(x, x.call(implementation=name)) for name in ("cpu", "reference"))
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=2e-6, atol=2e-6 * float(want.abs().max()), msg=name)


@pytest.mark.parametrize("window", [2**31, 2**62, 2**63 - 1])
def test_a_window_longer_than_any_row_is_none(window: int) -> None:
    case = Case((40, 7), targets=(3, 0), contextual=2)
    expected = _run(inputs(case, torch.float32))
    _assert_same_bits(_run(inputs(replace(case, window=window), torch.float32)), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_views_give_the_bits_of_copies(family: Any, dtype: torch.dtype) -> None:
    case = Case((70, 20, 5), family=family, heads=3, dim=25, value_dim=8)
    x = inputs(case, dtype)
    expected = _run(x)
    together = torch.cat([x.q, x.k, x.v], dim=2).detach()
    views = together.split([25, 25, 8], dim=2)
    backwards = x.v.detach().transpose(0, 2).contiguous().transpose(0, 2)
    for v in (views[2], backwards):
        strided = replace(x, q=views[0].requires_grad_(), k=views[1].requires_grad_(), v=v.requires_grad_())
        _assert_same_bits(_run(strided), expected)


def test_a_gradient_that_is_not_asked_for_is_not_made() -> None:
    for family, module in (("hstu", jagged_attention), ("fuxi", fuxi_attention)):
        x = inputs(Case((40, 3), family=family), torch.float32)  # type: ignore[arg-type]
        expected = _run(x)
        x.time_bias.requires_grad_(False)
        output = x.call(implementation="cpu")
        found = torch.autograd.grad(output.sum(), [x.q, x.position_bias], allow_unused=True)
        assert all(gradient is not None for gradient in found)
        assert module.workspace_bytes() > 0
        assert expected["time_bias"] is not None


def test_workspace_stays_within_four_mebibytes_a_thread_at_a_row_of_8192(threads: None) -> None:
    torch.set_num_threads(2)
    case = Case((8192,), heads=8, dim=64, value_dim=64, time=128, position=8192, window=64)
    x = inputs(case, torch.float32)
    jagged_attention.workspace_bytes()
    _run(x)
    assert jagged_attention.workspace_bytes() / 2 <= 4 * 2**20


def test_a_call_that_cannot_be_served_says_why() -> None:
    x = inputs(Case((3,)), torch.float64)
    with pytest.raises(ValueError, match=r"serves float32, bfloat16 and float16, q is torch\.float64"):
        x.call(implementation="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": torch.tensor([0, 9, 7])}, r"offsets must not decrease"),
        ({"offsets": torch.tensor([0, 3, 8])}, "from 0 to the number of tokens 7"),
        ({"offsets": torch.tensor([-1, 3, 7])}, "from 0 to the number of tokens 7"),
        ({"num_targets": torch.tensor([4, 0])}, r"num_targets\[0\]"),
        ({"num_targets": torch.tensor([1])}, "num_targets must be one"),
        ({"num_contextual": torch.tensor([-1, 0])}, "num_contextual"),
        ({"time_borders": torch.tensor([2.0, 1.0, *[3.0] * 6])}, "must ascend"),
        ({"time_borders": torch.ones(9)}, "8 borders"),
        ({"timestamps": torch.zeros(5, dtype=torch.int64)}, r"timestamps must be int32 or int64 of shape \[7\]"),
        ({"position_bias": torch.zeros(3, 4)}, r"position_bias must be \[N\] or \[2, N\]"),
        ({"v": torch.zeros(6, 2, 8)}, r"v \[T, H, E\]"),
        ({"window": 0}, "window must be at least 1"),
    ],
    ids=str,
)
def test_the_library_itself_refuses_what_it_would_read_past_the_end_for(changes: dict[str, Any], message: str) -> None:
    x = inputs(Case((3, 4), borders=False, time=9), torch.float32)
    call = jagged_attention.HSTUAttentionCall(
        x.q, x.k, x.v, x.offsets, 1.0, 1.0, timestamps=x.times, query_timestamps=x.query_times, time_bias=x.time_bias,
        time_borders=torch.arange(1.0, 9.0), position_bias=x.position_bias,
    )  # fmt: skip
    bad = call._replace(**changes)
    with torch.no_grad():
        jagged_attention.forward(call)
        with pytest.raises(ValueError, match=message):
            jagged_attention.forward(bad)
        with pytest.raises(ValueError, match=message):
            jagged_attention.backward(torch.zeros(7, 2, 8), bad)


@pytest.mark.parametrize(
    "borders",
    [
        (0.0, 0.5, 1.0),
        (1000.0, 1000.0, 1000.25, 1001.0),
        (1000.0, 1000.0 + 2**-14, 1000.0 + 2**-13, 1001.0),  # neighbours in float32: no table of places parts them
        (5.0, 2.0**62),
        (-3.0, 0.0, 2.0**63),
    ],
)
def test_buckets_are_exact_for_any_borders(borders: tuple[float, ...]) -> None:
    gaps = torch.tensor([0, 1, 2, 4, 5, 6, 999, 1000, 1001, 2**24 + 1, 2**40, 2**62, 2**63 - 1])
    tokens = len(gaps)
    table = torch.arange(1.0, len(borders) + 2)
    # Of each row of two, the second token stands at the gap from the first; the values tell the two keys apart.
    times = torch.stack([torch.zeros_like(gaps), gaps], dim=1).flatten()
    q = torch.zeros(2 * tokens, 1, 1)
    v = torch.tensor([1.0, 0.0]).repeat(tokens).view(-1, 1, 1)
    call = jagged_attention.HSTUAttentionCall(
        q, q, v, torch.arange(0, 2 * tokens + 1, 2), 1.0, 1.0, timestamps=times, query_timestamps=times,
        time_bias=table, time_borders=torch.tensor(borders),
    )  # fmt: skip
    bucket = torch.bucketize(gaps.to(torch.float32), torch.tensor(borders), right=True)
    expected = torch.nn.functional.silu(table[bucket])
    torch.testing.assert_close(jagged_attention.forward(call)[1::2, 0, 0], expected)
