"""What torch is told of the lookup's operators, and what they refuse: shapes, graphs, bad arguments and bad ids."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.fused_optimizers import Settings
from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.kernels.jagged_lookup import TableUpdate, jagged_lookup
from turbogr_plugin.kernels.jagged_unique import jagged_unique
from turbogr_plugin.kernels.lookup_call import StochasticRounding
from turbogr_plugin.kernels.lookup_layout import LookupArguments

IDS = torch.tensor([1, 4, 1, -1, 2, 2, 0, 9])
TABLE_OFFSETS = torch.tensor([0, 3, 5, 8])
BAG_OFFSETS = torch.tensor([0, 1, 3, 3, 5, 6, 8])
UNIFORM: dict[str, Any] = {"rows": [5, 3], "dim": 4, "feature_tables": [0, 0, 1]}
MIXED: dict[str, Any] = {"rows": [5, 3], "dim": [4, 6], "feature_tables": [0, 1, 1]}
POOLED: dict[str, Any] = {"pooling": "mean", "bag_offsets": BAG_OFFSETS}
SGD = Settings(learning_rate=1.0)


def weights_of(tables: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    dims = [tables["dim"]] * 2 if isinstance(tables["dim"], int) else tables["dim"]
    count = sum(rows * dim for rows, dim in zip(tables["rows"], dims, strict=True))
    return torch.linspace(-1, 1, count, dtype=dtype)


def arguments(tables: dict[str, Any], pooling: str, dtypes: list[str], weighted: bool) -> LookupArguments:
    dims = [tables["dim"]] * 2 if isinstance(tables["dim"], int) else tables["dim"]
    return LookupArguments(
        weights=weights_of(tables).requires_grad_(),
        ids=IDS,
        offsets=TABLE_OFFSETS if pooling == "none" else BAG_OFFSETS,
        id_weights=torch.linspace(0.5, 1, 8).requires_grad_() if weighted else None,
        rows=tables["rows"],
        dims=dims,
        feature_tables=tables["feature_tables"],
        pooling=pooling,
        output_dtypes=dtypes,
        feature_lengths=[3, 2, 3] if len(dtypes) > 1 else None,
    )


CALLS = {
    "sequence": arguments(UNIFORM, "none", ["float32"], False),
    "sequence of two dtypes": arguments(UNIFORM, "none", ["float32", "float16", "float16"], False),
    "weighted sum": arguments(MIXED, "sum", ["float16"], True),
}


def test_schemas_have_the_fields_of_the_record_in_their_order() -> None:
    fields = list(LookupArguments._fields)
    forward, backward = torch.ops.turbogr.jagged_lookup.default, torch.ops.turbogr.jagged_lookup_backward.default
    assert [argument.name for argument in forward._schema.arguments] == [*fields, "implementation"]
    names = [argument.name for argument in backward._schema.arguments]
    assert names == ["grads", "id_weights_gradient", *fields, "implementation"]


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "reference") for name in CALLS), ("weighted sum", "cpu")]
)
def test_the_lookup_and_its_backward_pass_opcheck(name: str, implementation: str) -> None:
    call = CALLS[name]
    keywords = {"implementation": implementation}
    operator, backward = torch.ops.turbogr.jagged_lookup.default, torch.ops.turbogr.jagged_lookup_backward.default
    torch.library.opcheck(operator, tuple(call), keywords)
    detached = tuple(value.detach() if isinstance(value, Tensor) else value for value in call)
    grads = [torch.ones_like(output) for output in operator(*detached)]
    torch.library.opcheck(backward, (grads, call.id_weights is not None, *detached), keywords)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_its_parts_pass_opcheck(implementation: str) -> None:
    keywords = {"implementation": implementation}
    grads = torch.linspace(-1, 1, 32).view(8, 4)
    for offsets in (None, TABLE_OFFSETS):
        torch.library.opcheck(torch.ops.turbogr.jagged_unique.default, (IDS, offsets), keywords)
    torch.library.opcheck(torch.ops.turbogr.coalesce_rows.default, (IDS, grads), keywords)
    numbers = [0.5, 0.9, 0.99, 0.0, 0.0, 0.0, 0.0]
    for optimizer, states in (
        ("sgd", []),
        ("rowwise_adagrad", [torch.zeros(9)]),
        ("adam", [torch.zeros(9, 4), torch.zeros(9, 4)]),
    ):
        given = (torch.zeros(9, 4), states, torch.arange(8), grads, optimizer, 0.5, 1, numbers, 0, False)
        torch.library.opcheck(torch.ops.turbogr.fused_update.default, given, keywords)


@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
def test_the_reference_passes_gradcheck(pooling: str) -> None:
    tables = UNIFORM if pooling == "none" else MIXED
    weights = weights_of(tables, torch.float64).requires_grad_()
    if pooling == "none":

        def sequence(weights: Tensor) -> Any:
            return jagged_lookup(weights, IDS, TABLE_OFFSETS, implementation="reference", **tables)

        assert torch.autograd.gradcheck(sequence, (weights,))
        return
    factors = torch.linspace(0.5, 1, 8, dtype=torch.float64).requires_grad_()

    def pooled(weights: Tensor, factors: Tensor) -> Any:
        given: dict[str, Any] = {"pooling": pooling, "bag_offsets": BAG_OFFSETS, "id_weights": factors}
        return jagged_lookup(weights, IDS, None, implementation="reference", **given, **tables)

    assert torch.autograd.gradcheck(pooled, (weights, factors))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_full_graph_of_the_functional_forms_gives_the_same_bits(backend: str) -> None:
    def step(weights: Tensor, ids: Tensor, factors: Tensor, table: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        positives, negatives = jagged_lookup(
            *(weights, ids, TABLE_OFFSETS),
            output_dtype=[torch.float32, torch.float16, torch.float16],
            feature_lengths=[3, 2, 3],
            **UNIFORM,
        )
        pooled = jagged_lookup(weights, ids, None, id_weights=factors, bounds_check="ignore", **POOLED, **UNIFORM)
        assert isinstance(pooled, Tensor)
        unique, _, inverse = jagged_unique(ids, TABLE_OFFSETS)
        rows, sums = coalesce_rows(ids, weights.detach()[:32].view(8, 4))
        fused_update(table, state, rows, sums, "rowwise_adagrad", learning_rate=0.5)
        return positives.sum() + negatives.float().sum() + pooled.square().sum(), unique + 1, inverse, table * 2

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        weights, factors = weights_of(UNIFORM).requires_grad_(), torch.linspace(0.5, 1, 8).requires_grad_()
        table, state = torch.ones(6, 4), torch.zeros(6)
        loss, *others = function(weights, IDS, factors, table, state)
        loss.backward()
        found.append([*others, weights.grad, factors.grad, table, state])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0.0, atol=0.0)


def test_one_compiled_graph_serves_batches_of_any_size() -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(weights: Tensor, ids: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
        sequence = jagged_lookup(weights, ids, offsets, **UNIFORM)
        pooled = jagged_lookup(weights, ids, None, pooling="sum", bag_offsets=bags, **UNIFORM)
        assert isinstance(sequence, Tensor)
        assert isinstance(pooled, Tensor)
        return sequence.sum() + pooled.square().sum()

    compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=True)
    for size in (2, 3, 7):
        ids = torch.arange(3 * size) % 3
        offsets, bags = torch.arange(4) * size, torch.arange(3 * size + 1)
        weights = weights_of(UNIFORM)
        assert torch.equal(compiled(weights, ids, offsets, bags), step(weights, ids, offsets, bags))
    assert len(graphs) == 1


def test_a_lookup_with_an_update_breaks_a_compiled_graph_and_still_updates() -> None:
    def step(table: Tensor) -> Tensor:
        update = TableUpdate(optimizer="sgd", settings=SGD)
        output = jagged_lookup(table, IDS, TABLE_OFFSETS, update=update, **UNIFORM)
        assert isinstance(output, Tensor)
        return output * 2

    tables = [weights_of(UNIFORM) for _ in range(2)]
    step(tables[0]).sum().backward()
    torch.compile(step, backend="eager")(tables[1]).sum().backward()
    assert torch.equal(*tables)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("pooling", ["none", "sum"])
def test_each_bounds_check_deals_with_ids_that_no_table_has_in_its_way(
    pooling: str, implementation: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([1, 5, -1, 2, -7, 2**40])
    offsets = torch.tensor([0, 3, 3, 6])
    repaired = torch.tensor([1, 0, -1, 2, 0, 0])

    def run(ids: Tensor, mode: str) -> tuple[Tensor, Tensor]:
        table = weights_of(UNIFORM)
        update = TableUpdate(optimizer="sgd", settings=SGD)
        given: dict[str, Any] = {"pooling": pooling, "update": update, "implementation": implementation}
        if pooling == "sum":
            given["bag_offsets"] = torch.tensor([0, 1, 3, 3, 3, 4, 6])
        before = ids.clone()
        output = jagged_lookup(table, ids, offsets, bounds_check=mode, **given, **UNIFORM)  # type: ignore[arg-type]
        assert isinstance(output, Tensor)
        output.sum().backward()
        assert torch.equal(ids, before)
        return output.detach(), table

    absent = run(torch.tensor([1, -1, -1, 2, -1, -1]), "none")
    for found, wanted in zip(run(ids, "none"), absent, strict=True):
        assert torch.equal(found, wanted)
    for mode in ("ignore", "warning"):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            for found, wanted in zip(run(ids, mode), run(repaired, "none"), strict=True):
                assert torch.equal(found, wanted)
            assert ("3 ids or offsets were out of range" in caplog.text) == (mode == "warning")
    with pytest.raises(ValueError, match="id 5 at position 1 belongs to feature 0, whose table has 5 rows"):
        run(ids, "fatal")
    for found, wanted in zip(run(repaired, "fatal"), run(repaired, "none"), strict=True):
        assert torch.equal(found, wanted)


def test_offsets_are_repaired_by_the_modes_that_repair_and_refused_by_the_others() -> None:
    table, ids = weights_of(UNIFORM), torch.tensor([1, 2, 0])
    for offsets in ([0, 2, 1, 3], [0, 1, 2, 4], [0, 1, 1, 2], [1, 1, 2, 3], [-1, 1, 2, 3]):
        wrong = torch.tensor(offsets)
        with pytest.raises(ValueError, match="table_offsets must"):
            jagged_lookup(table, ids, wrong, **UNIFORM)
        with pytest.raises(ValueError, match="offset"):
            jagged_lookup(table, ids, wrong, bounds_check="fatal", **UNIFORM)
        if offsets[0] == 0:
            repaired = torch.tensor([0, *offsets[1:3], 3]).cummax(0).values
            found = jagged_lookup(table, ids, wrong, bounds_check="ignore", **UNIFORM)
            assert torch.equal(found, jagged_lookup(table, ids, repaired, **UNIFORM))  # type: ignore[arg-type]


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "weights must have 32 elements for rows .* got 28": {"weights": torch.zeros(28)},
    r"weights must be contiguous, \[E\], in one of .*; got torch.int64": {"weights": torch.zeros(32).long()},
    r"weights of two dimensions must be .* got \(4, 8\)": {"weights": torch.zeros(8, 4).t()},
    "ids must be int32 or int64, got torch.float32": {"ids": torch.zeros(8)},
    "ids must have 1 dimension": {"ids": IDS.view(2, 4)},
    r"table_offsets must have 3 \+ 1 elements, got 2": {"table_offsets": torch.tensor([0, 8])},
    'pooling "none" needs table_offsets, got None': {"table_offsets": None},
    "pooling must be one of none, sum, mean, got 'max'": {"pooling": "max", "bag_offsets": BAG_OFFSETS},
    "pooling 'sum' needs bag_offsets, got None": {"pooling": "sum"},
    'bag_offsets need pooling "sum" or "mean"': {"bag_offsets": BAG_OFFSETS},
    r"bag_offsets must be \[F \* B \+ 1\] with F = 3, got 6": {"pooling": "sum", "bag_offsets": BAG_OFFSETS[:6]},
    r"table_offsets must be \[F \+ 1\] with F = 3": {"table_offsets": BAG_OFFSETS, **POOLED},
    "id_weights need pooling": {"id_weights": torch.ones(8)},
    "id_weights must be torch.float32 of shape": {"id_weights": torch.ones(7), **POOLED},
    "id_weights must be torch.float32 .* got torch.float16": {"id_weights": torch.ones(8).half(), **POOLED},
    "rows and dims must have one number for each table": {"rows": [5, 3], "dim": [4]},
    "rows must be at least 0": {"rows": [9, -1]},
    "dims at least 1": {"dim": 0, "weights": torch.zeros(0)},
    "feature_tables must name a table in 0 to 1 for each feature, got": {"feature_tables": [0, 1, 2]},
    "all features must have one width": {"dim": [4, 12], "rows": [5, 1]},
    "output_dtype must be one or 3 of float32": {"output_dtype": torch.int8},
    "there if and only if there is an output_dtype for each feature": {"output_dtype": [torch.float16]},
    "output_dtype must be one or 3 of": {"output_dtype": [torch.float16] * 2},
    "an output_dtype for each feature needs pooling": {"output_dtype": [torch.float16] * 3, **POOLED},
    "feature_lengths must be 3 numbers whose sum is": {
        "output_dtype": [torch.float16] * 3,
        "feature_lengths": [3, 2, 2],
    },
    "feature_lengths must be those of table_offsets": {
        "output_dtype": [torch.float16] * 3,
        "feature_lengths": [2, 3, 3],
    },
    "bounds_check must be one of none, ignore, warning, fatal, got 'log'": {"bounds_check": "log"},
    "implementation must be one of triton, cpu, reference": {"implementation": "cuda"},
    "ids must be on the device of weights": {"ids": torch.zeros(8, dtype=torch.int64, device="meta")},
    "optimizer must be one of adagrad, adam": {"update": TableUpdate(optimizer="ftrl", settings=SGD)},
    r"adagrad has 1 state\(s\), got 0": {"update": TableUpdate(optimizer="adagrad", settings=SGD)},
    "state 0 of rowwise_adagrad must be contiguous, floating point, of 8 elements": {
        "update": TableUpdate(optimizer="rowwise_adagrad", states=[torch.zeros(32)], settings=SGD)
    },
    "iteration must be at least 1 with adam, got 0": {
        "update": TableUpdate(optimizer="adam", states=[torch.zeros(32)] * 2, settings=SGD)
    },
    "rowwise_bias_correction is for adam only": {
        "update": TableUpdate(optimizer="sgd", settings=Settings(learning_rate=1.0, rowwise_bias_correction=True))
    },
    "max_gradient must be positive, got 0": {"update": TableUpdate(optimizer="sgd", settings=SGD, max_gradient=0.0)},
    "nan_guard must have a name for each of 2 tables": {
        "update": TableUpdate(optimizer="sgd", settings=SGD, nan_guard=["users"])
    },
    r"the seed of stochastic_rounding must be in \[0, 2\^32\), got -1": {
        "update": TableUpdate(optimizer="sgd", settings=SGD, stochastic_rounding=StochasticRounding(-1, 0))
    },
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_an_argument_that_does_not_fit_is_refused_by_name(message: str) -> None:
    given = {"weights": weights_of(UNIFORM), "ids": IDS, "table_offsets": TABLE_OFFSETS, **UNIFORM}
    with pytest.raises(ValueError, match=message):
        jagged_lookup(**(given | BAD_ARGUMENTS[message]))


def test_a_matrix_of_rows_is_as_good_as_a_flat_buffer() -> None:
    flat = weights_of(UNIFORM)
    found = jagged_lookup(flat.view(8, 4), IDS, TABLE_OFFSETS, **UNIFORM)
    assert torch.equal(found, jagged_lookup(flat, IDS, TABLE_OFFSETS, **UNIFORM))  # type: ignore[arg-type]
