"""Lookup, coalescing and update of tables, lowered for Ascend and run on x86, against the plain PyTorch reference.

Where all numbers are dyadic, the results must be equal; elsewhere the reference runs in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ascend import execution
from tests.ascend.calls import LARGEST_ERROR
from tests.ascend.lookup_calls import (
    BATCH,
    FEATURES,
    LENGTHS,
    SETTINGS,
    copied,
    dyadic,
    gradients,
    lookup_call,
    new_update,
)
from turbogr_plugin.kernels.fused_optimizers import DECOUPLED, L2, OPTIMIZERS
from turbogr_plugin.kernels.lookup_call import (
    MEAN,
    SEQUENCE,
    SUM,
    CoalesceCall,
    FusedUpdate,
    Lookup,
    StochasticRounding,
    UpdateCall,
)
from turbogr_plugin.kernels.reference import coalesce_rows as coalesce_reference
from turbogr_plugin.kernels.reference import fused_update as update_reference
from turbogr_plugin.kernels.reference import jagged_lookup as reference
from turbogr_plugin.kernels.table_bags import VariableBatch
from turbogr_plugin.kernels.table_rows import FlatTables, Tables
from turbogr_plugin.kernels.triton import coalesce_rows, fused_update, jagged_lookup, row_tiles, targets
from turbogr_plugin.kernels.triton.fused_update import OPTIMIZERS as SERVED

execution.install()

HALF, BRAIN = torch.float16, torch.bfloat16
MIXED: dict[str, Any] = {"widths": (20, 4, 36, 8)}
CASES: dict[str, dict[str, Any]] = {
    "sequence": {"pooling": SEQUENCE},
    "sequence, int32 ids, odd width": {
        "pooling": SEQUENCE,
        "widths": (5, 5, 5, 5),
        "unit": 1,
        "index_dtype": torch.int32,
    },
    "sequence, positives in fp32 and negatives in fp16": {
        "pooling": SEQUENCE,
        "output_dtypes": (torch.float32, torch.float32, torch.float32, HALF, HALF),
    },
    "sequence, three dtypes from one group": {
        "pooling": SEQUENCE,
        "output_dtypes": (torch.float32, HALF, HALF, HALF, BRAIN),
    },
    "sum, several widths": {"pooling": SUM, **MIXED},
    "weighted mean, several widths": {"pooling": MEAN, "weighted": True, **MIXED},
    "sum of bf16 tables in fp16": {"pooling": SUM, "dtype": BRAIN, "output_dtype": HALF},
}
COUNT = sum(sum(lengths) for lengths in LENGTHS)
LAST = sum(sum(lengths) for lengths in LENGTHS[:-1])
# Ids that a batch may have at worst; none takes a kernel of its own.
IDS: dict[str, Tensor] = {
    "all equal": torch.full((COUNT,), 2),
    "all absent": torch.full((COUNT,), -1),
    "only in the last table": torch.cat([torch.full((LAST,), -1), torch.arange(COUNT - LAST) % 11]),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Beside the compilers, a second thread of torch's small operators is waited for far longer than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))


def _assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


def _step(call: Lookup, update: FusedUpdate, grads: tuple[Tensor, ...], kernels: Any) -> None:
    kernels.fused_backward(call, (), grads, update, False)


@pytest.mark.parametrize("name", CASES)
def test_lookup_equals_the_reference(name: str) -> None:
    call = lookup_call(**CASES[name])
    out, kept = jagged_lookup.forward(call)
    assert kept == ()
    _assert_equal(out, reference.forward(call)[0])


@pytest.mark.parametrize("name", CASES)
def test_dense_gradients_agree_with_the_reference(name: str) -> None:
    call = lookup_call(**CASES[name])
    weighted = call.indice_weights is not None
    grads = gradients(call, torch.Generator().manual_seed(1))
    dense, factors = jagged_lookup.dense_backward(call, (), grads, weighted)
    expected, expected_factors = reference.dense_backward(call, (), grads, weighted)
    _assert_equal((dense,), (expected,))
    assert (factors is None) == (expected_factors is None) == (not weighted)
    if factors is not None and expected_factors is not None:
        assert _error(factors, expected_factors) <= LARGEST_ERROR[torch.float32]
        assert torch.equal(factors == 0, expected_factors == 0)


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", ["sequence", "sum, several widths"])
def test_ids_at_their_worst_are_looked_up_and_updated_as_by_the_reference(name: str, ids: str) -> None:
    call = lookup_call(**CASES[name], ids=IDS[ids])
    _assert_equal(jagged_lookup.forward(call)[0], reference.forward(call)[0])
    grads = gradients(call, torch.Generator().manual_seed(2))
    update = new_update(call, "sgd")
    ours, theirs = copied(call, update), copied(call, update)
    _step(*ours, grads, jagged_lookup)
    _step(*theirs, grads, reference)
    assert torch.equal(ours[0].weights.values, theirs[0].weights.values)


@pytest.mark.parametrize("name", ["sequence", "sum, several widths"])
def test_a_batch_without_ids_or_rows_gives_zeros_and_changes_nothing(name: str) -> None:
    call = lookup_call(**CASES[name])
    empty = call._replace(indices=call.indices[:0], offsets=torch.zeros_like(call.offsets))
    nothing = call._replace(offsets=call.offsets[:1], indices=call.indices[:0])
    for case in (empty, nothing):
        _assert_equal(jagged_lookup.forward(case)[0], reference.forward(case)[0])
        update = new_update(case, "sgd")
        before = case.weights.values.clone()
        _step(case, update, gradients(case, torch.Generator().manual_seed(3)), jagged_lookup)
        assert torch.equal(case.weights.values, before)


def test_ids_that_no_bag_claims_are_absent() -> None:
    call = lookup_call(SEQUENCE)
    offsets = call.offsets.clamp(3, int(call.offsets[-1]) - 2)
    call = call._replace(offsets=offsets)
    out, _ = jagged_lookup.forward(call)
    _assert_equal(out, reference.forward(call)[0])
    assert not out[0][:3].any() and not out[0][-2:].any()


# The lookup that each optimizer is run behind.
UPDATES = {
    "sgd": "sequence, positives in fp32 and negatives in fp16",
    "adagrad": "sequence",
    "rowwise_adagrad": "weighted mean, several widths",
    "adam": "sum, several widths",
}


@pytest.mark.parametrize(("optimizer", "mode"), [*((name, L2) for name in SERVED), ("rowwise_adagrad", DECOUPLED)])
def test_fused_updates_agree_with_the_reference_in_float64(optimizer: str, mode: int) -> None:
    call = lookup_call(**CASES[UPDATES[optimizer]])
    update = new_update(call, optimizer, replace(SETTINGS, weight_decay_mode=mode))
    ours, exact = copied(call, update), copied(call, update, torch.float64)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        grads = gradients(call, generator, exact=False)
        _step(*ours, grads, jagged_lookup)
        _step(*exact, tuple(grad.double() for grad in grads), reference)
    for got, expected in zip((ours[0].weights, *ours[1].states), (exact[0].weights, *exact[1].states), strict=True):
        assert _error(got.values, expected.values) <= LARGEST_ERROR[torch.float32]


def test_each_state_is_where_its_own_offsets_say() -> None:
    call = lookup_call(**CASES["sequence"])
    update = new_update(call, "adam")
    first, second = update.states
    apart = FlatTables(torch.cat([torch.zeros(8), second.values]), second.begin + 8)
    grads = gradients(call, torch.Generator().manual_seed(3))
    together, moved = copied(call, update), copied(call, replace(update, states=(first, apart)))
    _step(*together, grads, jagged_lookup)
    _step(*moved, grads, jagged_lookup)
    assert torch.equal(moved[0].weights.values, together[0].weights.values)
    assert torch.equal(moved[1].states[1].values[8:], together[1].states[1].values)
    assert not moved[1].states[1].values[:8].any()


def test_rows_beyond_two_to_the_32_have_draws_of_their_own() -> None:
    call = lookup_call(SUM, dtype=BRAIN, **MIXED)
    far = call._replace(tables=replace(call.tables, first_row=call.tables.first_row + 2**33))
    grads = gradients(call, torch.Generator().manual_seed(7))
    rounded = []
    for each in (call, far):
        update = new_update(each, "sgd", replace(SETTINGS, learning_rate=0.01), StochasticRounding(seed=5, step=1))
        ours, theirs = copied(each, update), copied(each, update)
        _step(*ours, grads, jagged_lookup)
        _step(*theirs, grads, reference)
        assert torch.equal(ours[0].weights.values, theirs[0].weights.values)
        rounded.append(ours[0].weights.values)
    assert not torch.equal(*rounded)


def test_the_gradient_of_the_weights_of_ids_is_that_before_the_update() -> None:
    call = lookup_call(**CASES["weighted mean, several widths"])
    update = new_update(call, "rowwise_adagrad", max_gradient=0.5)
    ours, theirs = copied(call, update), copied(call, update)
    grads = gradients(call, torch.Generator().manual_seed(5))
    got = jagged_lookup.fused_backward(ours[0], (), grads, ours[1], True)
    expected = reference.fused_backward(theirs[0], (), grads, theirs[1], True)
    assert got is not None and expected is not None
    assert _error(got, expected) <= LARGEST_ERROR[torch.float32]
    assert _error(ours[0].weights.values, theirs[0].weights.values) <= LARGEST_ERROR[torch.float32]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("sequence", "sgd"),
        ("sum, several widths", "sgd"),
        ("sequence", "rowwise_adagrad"),
        ("weighted mean, several widths", "rowwise_adagrad"),
        ("sequence", "adagrad"),
        ("sum, several widths", "adam"),
    ],
)
def test_a_hundred_steps_equal_the_reference_in_float64(name: str, optimizer: str) -> None:
    call = lookup_call(**CASES[name])
    # SGD at this rate keeps to multiples of 1/64: equal to the bit.
    update = new_update(call, optimizer, replace(SETTINGS, learning_rate=0.125, weight_decay=0.0))
    ours, exact = copied(call, update), copied(call, update, torch.float64)
    generator = torch.Generator().manual_seed(6)
    for step in range(100):
        ids = lookup_call(**CASES[name], seed=step).indices
        grads = gradients(call, generator, exact=optimizer == "sgd")
        _step(ours[0]._replace(indices=ids), ours[1], grads, jagged_lookup)
        double = tuple(grad.double() for grad in grads)
        _step(exact[0]._replace(indices=ids), exact[1], double, reference)
    for got, expected in zip((ours[0].weights, *ours[1].states), (exact[0].weights, *exact[1].states), strict=True):
        if optimizer == "sgd":
            assert torch.equal(got.values.double(), expected.values)
        # A hundred roundings of half a unit in the last place each.
        assert _error(got.values, expected.values) <= 100 * 2.0**-24


@pytest.mark.parametrize(("dtype", "optimizer"), [(BRAIN, "sgd"), (HALF, "rowwise_adagrad")])
def test_stochastic_rounding_draws_as_the_reference(dtype: torch.dtype, optimizer: str) -> None:
    call = lookup_call(SUM, dtype=dtype, **MIXED)
    rounding = StochasticRounding(seed=0xDEADBEEF, step=1)
    update = new_update(call, optimizer, replace(SETTINGS, learning_rate=0.01), rounding)
    nearest = new_update(call, optimizer, replace(SETTINGS, learning_rate=0.01))
    grads = gradients(call, torch.Generator().manual_seed(7), exact=optimizer == "sgd")
    ours, theirs, other = copied(call, update), copied(call, update), copied(call, nearest)
    _step(*ours, grads, jagged_lookup)
    _step(*theirs, grads, reference)
    _step(*other, grads, reference)
    differing = int((ours[0].weights.values != theirs[0].weights.values).sum())
    # Where the float32 results differ in their last bit, a draw may fall between them.
    assert differing == 0 if optimizer == "sgd" else differing <= 1
    assert not torch.equal(ours[0].weights.values, other[0].weights.values)


def test_gradients_of_any_strides_are_read_right() -> None:
    call = lookup_call(SEQUENCE)
    update = new_update(call, "sgd")
    (grad,) = gradients(call, torch.Generator().manual_seed(8))
    expected = copied(call, update)
    _step(*expected, (grad,), jagged_lookup)
    count, width = grad.shape
    for strided in (
        grad.t().contiguous().t(),
        torch.cat([grad, grad], 1)[:, :width],
        torch.stack([grad, grad], 1).view(2 * count, width)[::2],
    ):
        ours = copied(call, update)
        _step(*ours, (strided,), jagged_lookup)
        assert torch.equal(ours[0].weights.values, expected[0].weights.values)


def test_several_rows_under_way_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    call = lookup_call(**CASES["weighted mean, several widths"])
    update = new_update(call, "sgd")
    grads = gradients(call, torch.Generator().manual_seed(9), exact=False)
    one = copied(call, update)
    out, _ = jagged_lookup.forward(call)
    _step(*one, grads, jagged_lookup)
    monkeypatch.setattr(row_tiles, "_SUM_ROWS_ASCEND", row_tiles._SUM_ROWS_CUDA)
    four = copied(call, update)
    _assert_equal(jagged_lookup.forward(call)[0], out)
    ids = torch.tensor([5, 3, 5, 5, 9, 3, 1, 5, 5, 5])
    rows = dyadic((10, 20), torch.Generator().manual_seed(10))
    expected = coalesce_reference.coalesce(CoalesceCall(ids, rows))
    _assert_equal(coalesce_rows.coalesce(CoalesceCall(ids, rows)), expected)
    _step(*four, grads, jagged_lookup)
    assert torch.equal(one[0].weights.values, four[0].weights.values)


@pytest.mark.parametrize("name", ["sequence", "weighted mean, several widths"])
def test_numbers_that_are_not_finite_stay_where_they_are(name: str) -> None:
    call = lookup_call(**CASES[name])
    call.weights.values[:3] = torch.inf  # of the row that an absent id stands at
    if call.indice_weights is not None:
        call.indice_weights[call.indices < 0] = torch.inf
    outs, expected = jagged_lookup.forward(call)[0], reference.forward(call)[0]
    torch.testing.assert_close(outs, expected, rtol=0, atol=0, equal_nan=True)
    (grad,) = gradients(call, torch.Generator().manual_seed(14))
    grad[2, 1] = torch.nan
    update = new_update(call, "sgd")
    ours, theirs = copied(call, update), copied(call, update)
    _step(*ours, (grad,), jagged_lookup)
    _step(*theirs, (grad,), reference)
    got, right = ours[0].weights.values, theirs[0].weights.values
    torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)
    assert got.isnan().any() and not got.isnan().all()


def _one_table(values: Tensor, ids: list[int]) -> Lookup:
    width = 4
    rows = values.numel() // width
    return Lookup(
        weights=FlatTables(values, torch.zeros(1, dtype=torch.int64)),
        tables=Tables(torch.tensor([0, width], dtype=torch.int32), torch.tensor([0, rows]), width, width, width),
        indices=torch.tensor(ids),
        offsets=torch.arange(len(ids) + 1),
        pooling=SEQUENCE,
        indice_weights=None,
        feature_requires_grad=None,
        output_dtype=torch.float32,
        variable=None,
    )


@pytest.mark.parametrize("rows", [2**24 + 8, 2**29 + 8], ids=["ids above 2^24", "more than 2^31 elements"])
def test_large_tables_are_addressed_right(rows: int, tmp_path: Path) -> None:
    ids = [rows - 1, 3, rows - 2, rows - 1, rows, rows - 8, 3]
    # A sparse file: pages that nothing touches take no room.
    values = torch.from_file(str(tmp_path / "table"), shared=True, size=4 * rows, dtype=HALF)
    table = values.view(rows, 4)
    named = sorted(set(ids) - {rows})
    by_id = {row: (torch.arange(4) + place) / 8 for place, row in enumerate(named)}
    for row, value in by_id.items():
        table[row] = value
    call = _one_table(values, ids)
    (out,), _ = jagged_lookup.forward(call)
    assert torch.equal(out, torch.stack([by_id.get(index, torch.zeros(4)) for index in ids]))
    grad = dyadic((len(ids), 4), torch.Generator().manual_seed(10))
    _step(call, new_update(call, "sgd"), (grad,), jagged_lookup)
    for row, old in by_id.items():
        summed = sum((grad[place] for place, index in enumerate(ids) if index == row), torch.zeros(4))
        assert torch.equal(table[row].float(), old - SETTINGS.learning_rate * summed)
    assert not table[rows - 7 : rows - 2].any() and not table[4:11].any()


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN], ids=["fp32", "fp16", "bf16"])
def test_rows_are_coalesced_in_the_order_of_positions(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(-3, 9, (60,), generator=generator)
    ids[ids > 5] += 1 << 40
    grads = torch.randn(36, 60, generator=generator).to(dtype).t()
    found, rows = coalesce_rows.coalesce(CoalesceCall(ids, grads))
    expected_ids, expected = coalesce_reference.coalesce(CoalesceCall(ids, grads))
    _assert_equal((found, rows), (expected_ids, expected))


def test_coalescing_equal_ids_and_none_at_all() -> None:
    grads = dyadic((60, 36), torch.Generator().manual_seed(12))
    ids = torch.full((60,), 7, dtype=torch.int32)
    _assert_equal(coalesce_rows.coalesce(CoalesceCall(ids, grads)), (ids[:1], grads.sum(0, keepdim=True)))
    found, rows = coalesce_rows.coalesce(CoalesceCall(ids[:0], grads[:0]))
    assert found.dtype == torch.int32 and found.shape == (0,) and rows.shape == (0, 36)


# Optimizer, dtype of the table, rounding, and what else differs.
ROW_UPDATES: dict[str, tuple[str, torch.dtype, StochasticRounding | None, dict[str, Any]]] = {
    "sgd at a rate on the device": ("sgd", torch.float32, None, {"learning_rate": torch.tensor(0.25)}),
    "adagrad": ("adagrad", torch.float32, None, {}),
    "row-wise adagrad without decay": ("rowwise_adagrad", torch.float32, None, {}),
    "row-wise adagrad with decoupled decay": ("rowwise_adagrad", BRAIN, None, {"weight_decay_mode": DECOUPLED}),
    "adam, rounded stochastically": ("adam", HALF, StochasticRounding(1, 0xFFFFFFFF), {}),
}


@pytest.mark.parametrize("name", ROW_UPDATES)
def test_rows_are_updated_once_and_the_others_not_at_all(name: str) -> None:
    optimizer, dtype, rounding, settings = ROW_UPDATES[name]
    generator = torch.Generator().manual_seed(13)
    weights = torch.randn(12, 50, generator=generator).to(dtype)
    ids = torch.tensor([3, -1, 11, 12, 0, 5])
    rows = torch.randn(6, 50, generator=generator)
    shapes = {"weight": (12, 50), "row": (12,)}
    states = [torch.rand(shapes[kind], generator=generator) for kind in OPTIMIZERS[optimizer].states]
    expected = [tensor.clone() for tensor in (weights, *states)]
    given = (ids, rows, optimizer, replace(SETTINGS, **settings), rounding)
    before = weights.clone()
    fused_update.update(UpdateCall(weights, tuple(states), *given))
    update_reference.update(UpdateCall(expected[0], tuple(expected[1:]), *given))
    for got, right in zip((weights, *states), expected, strict=True):
        assert _error(got, right) <= LARGEST_ERROR[got.dtype]
    if rounding is not None:
        assert int((weights != expected[0]).sum()) <= 1
    changed = (weights != before).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 3, 5, 11]


def test_calls_that_no_kernel_serves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "refuses_device", lambda device_type: None)
    call = lookup_call(SEQUENCE)
    assert jagged_lookup.refuses(call) is None
    assert "output in torch.float64" in str(jagged_lookup.refuses(call._replace(output_dtype=torch.float64)))
    tables = FlatTables(call.weights.values.double(), call.weights.begin)
    assert "dtype torch.float64" in str(jagged_lookup.refuses(call._replace(weights=tables)))
    empty = torch.zeros(0)
    variable = call._replace(variable=VariableBatch(empty, empty, empty, 0))
    assert "variable batch sizes" in str(jagged_lookup.refuses(variable))
    rounded = new_update(lookup_call(SUM, widths=(20, 516, 20, 20)), "sgd", rounding=StochasticRounding(0, 0))
    assert "516 columns" in str(jagged_lookup.refuses_update(lookup_call(SUM, widths=(20, 516, 20, 20)), rounded))
    assert "lars_sgd" in str(jagged_lookup.refuses_update(call, new_update(call, "lars_sgd")))
    assert all(jagged_lookup.refuses_update(call, new_update(call, optimizer)) is None for optimizer in SERVED)


def test_the_table_of_shapes_has_three_at_least() -> None:
    assert len(set(row_tiles.ascend_widths())) >= 3
    assert max(row_tiles.ascend_widths()) == row_tiles.WIDEST


def test_the_calls_are_what_they_are_meant_to_be() -> None:
    call = lookup_call(SEQUENCE)
    assert call.bags == len(FEATURES) * BATCH and int(call.offsets[-1]) == call.indices.numel() == COUNT
    absent = reference.forward(call)[1][3]
    assert absent.any() and not absent.all()
