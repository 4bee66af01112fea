"""Training steps of `jagged_lookup` beside a float64 oracle of dictionaries, for every device and implementation.

The oracle knows a row when it is first named, so that a table may be larger than memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.table_groups import Batch, Group, Oracle, WeightDecayMode, dyadic
from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, Settings
from turbogr_plugin.kernels.jagged_lookup import TableUpdate, jagged_lookup

MODES = ("none", "sum", "mean", "weighted sum", "weighted mean")
FAST_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
EPSILON = 2.0**-24


class _Rows(dict[int, Tensor]):
    """A table in float64 of the rows that were asked for."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table.cpu() if table.device.type != "cpu" else table

    def __missing__(self, row: int) -> Tensor:
        self[row] = self.table[row].double().clone()
        return self[row]


@dataclass
class Trained:
    """Tables and states in flat buffers, as `jagged_lookup` takes them."""

    group: Group
    optimizer: str
    weights: Tensor
    states: list[Tensor]

    @property
    def rows(self) -> list[int]:
        return [rows for rows, _ in self.group.tables]

    @property
    def dims(self) -> list[int]:
        return [dim for _, dim in self.group.tables]

    def table(self, number: int, buffer: Tensor | None = None) -> Tensor:
        """A table, or its part of a state with a value for each weight."""
        sizes = [rows * dim for rows, dim in self.group.tables]
        begin = sum(sizes[:number])
        buffer = self.weights if buffer is None else buffer
        return buffer[begin : begin + sizes[number]].view(self.group.tables[number])

    def row_state(self, number: int, buffer: Tensor) -> Tensor:
        """The part of a table in a state with a value for each row."""
        begin = sum(self.rows[:number])
        return buffer[begin : begin + self.rows[number]]


def make_tables(
    group: Group,
    optimizer: str,
    generator: torch.Generator,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    counted: bool = False,
) -> Trained:
    """Tables of small dyadic numbers, states of zeros."""
    elements = sum(rows * dim for rows, dim in group.tables)
    kinds = (*OPTIMIZERS[optimizer].states, *(("row",) if counted else ()))
    sizes = {"weight": elements, "row": sum(rows for rows, _ in group.tables)}
    weights = dyadic((elements,), generator).to(dtype)
    return Trained(group, optimizer, weights.to(device), [torch.zeros(sizes[kind], device=device) for kind in kinds])


@dataclass
class Truth(Oracle):
    """The oracle of table_groups.py for rows known by name, and with ids that no table has."""

    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [len(table) for table in self.weights]
        self.weights = [_Rows(table) for table in self.weights]  # type: ignore[misc]

    def bags_of(self, batch: Batch) -> list[tuple[int, list[tuple[int, int]], int]]:
        """(feature, (position, id) of those that are there, length) of each bag."""
        found = []
        offsets, indices = batch.offsets.tolist(), batch.indices.tolist()
        for bag, (feature, _) in enumerate(batch.bags(len(self.group.features))):
            ids = [(position, indices[position]) for position in range(offsets[bag], offsets[bag + 1])]
            rows = self.rows[self.group.features[feature]]
            found.append((feature, [(place, row) for place, row in ids if 0 <= row < rows], max(len(ids), 1)))
        return found

    def outputs(self, batch: Batch, mode: str) -> Tensor:
        """What the lookup is to return, float64."""
        widths = self.group.widths
        if mode == "none":
            output = torch.zeros(len(batch.indices), widths[0], dtype=torch.float64)
        else:
            size = (len(batch.offsets) - 1) // len(widths)
            output = torch.zeros(size, sum(widths), dtype=torch.float64)
        for (feature, ids, length), (_, sample) in zip(self.bags_of(batch), batch.bags(len(widths)), strict=True):
            table = self.weights[self.group.features[feature]]
            begin = sum(widths[:feature])
            for position, row in ids:
                if mode == "none":
                    output[position] = table[row]
                    continue
                value = table[row] * self._factor(batch, position) / (length if "mean" in mode else 1)
                output[sample, begin : begin + widths[feature]] += value
        return output

    def train(self, batch: Batch, mode: str, gradient: Tensor) -> Tensor:
        """Updates each row once; returns the gradient of the weights of the ids [N]."""
        self.steps += 1
        widths = self.group.widths
        sums: dict[tuple[int, int], Tensor] = {}
        factors = torch.zeros(len(batch.indices), dtype=torch.float64)
        gradient = gradient.double().clamp(-self.max_gradient, self.max_gradient)
        for (feature, ids, length), (_, sample) in zip(self.bags_of(batch), batch.bags(len(widths)), strict=True):
            begin, number = sum(widths[:feature]), self.group.features[feature]
            for position, row in ids:
                if mode == "none":
                    pulled = gradient[position]
                else:
                    pulled = gradient[sample, begin : begin + widths[feature]] / (length if "mean" in mode else 1)
                factors[position] = (pulled * self.weights[number][row]).sum()
                sums[number, row] = sums.get((number, row), 0.0) + pulled * self._factor(batch, position)
        for key, total in sums.items():
            self._update(key, total)
        return factors

    def state_of(self, number: int, row: int) -> list[Any]:
        """Its states in the order of OPTIMIZERS."""
        state = self.state.get((number, row), {"first": 0.0, "second": 0.0})
        return {
            "sgd": [],
            "adagrad": [state["second"]],
            "rowwise_adagrad": [state["second"]],
            "lars_sgd": [state["first"]],
        }.get(self.optimizer, [state["first"], state["second"]])


def make_batch(
    group: Group,
    generator: torch.Generator,
    *,
    size: int = 3,
    weighted: bool = False,
    index_dtype: torch.dtype = torch.int64,
    absent: bool = True,
    first: tuple[int, ...] | None = None,
) -> Batch:
    """Bags of 0, 1, 2 or 4 ids (means stay dyadic) of few rows of each table, most of which come often.

    Args:
        absent: now and then -1, or the first id that the table does not have.
        first: by table, the rows begin here; None: at 0.
    """
    features = len(group.features)
    lengths = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (features * size,), generator=generator)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    parts = []
    for feature, table in enumerate(group.features):
        count = int(offsets[(feature + 1) * size] - offsets[feature * size])
        rows, begin = group.tables[table][0], 0 if first is None else first[table]
        ids = begin + torch.randint(0, max(min(rows - begin, 6), 1), (count,), generator=generator)
        if absent:
            kind = torch.randint(0, 12, (count,), generator=generator)
            ids = torch.where(kind == 0, -1, torch.where(kind == 1, rows, ids))
        parts.append(ids)
    indices = torch.cat(parts).to(index_dtype)
    weights = torch.randint(1, 5, (len(indices),), generator=generator) / 2 if weighted else None
    return Batch(indices, offsets.to(index_dtype), weights)


def update_of(trained: Trained, step: int, **changes: Any) -> TableUpdate:
    """The settings of the oracle."""
    settings = {
        "learning_rate": 2.0**-4,
        "iteration": step,
        "eps": 0.5,
        "beta1": 0.9,
        "beta2": 0.999,
        "momentum": 0.9,
        "eta": 0.001,
    }
    known = Settings.__dataclass_fields__
    settings |= {name: value for name, value in changes.items() if name in known}
    others = {name: value for name, value in changes.items() if name not in known}
    return TableUpdate(optimizer=trained.optimizer, states=trained.states, settings=Settings(**settings), **others)


def lookup(trained: Trained, batch: Batch, mode: str, **keywords: Any) -> Any:
    """The call of `jagged_lookup` for a batch, on the device of the tables."""
    device = trained.weights.device
    features = len(trained.group.features)
    size = (len(batch.offsets) - 1) // features
    offsets = batch.offsets.to(device)
    pooling = mode.removeprefix("weighted ")
    return jagged_lookup(
        trained.weights,
        batch.indices.to(device),
        offsets[::size].contiguous() if pooling == "none" else None,
        rows=trained.rows,
        dim=trained.dims,
        feature_tables=trained.group.features,
        pooling=pooling,  # type: ignore[arg-type]
        bag_offsets=None if pooling == "none" else offsets,
        **keywords,
    )


def assert_near(found: Tensor, wanted: Tensor, roundings: float, scale: float | None = None) -> None:
    """Holds ||found - wanted|| below `roundings` float32 roundings of ||wanted|| (or `scale`)."""
    error = float((found.double() - wanted).norm())
    size = float(wanted.norm()) if scale is None else scale
    assert error <= roundings * EPSILON * size, (
        f"error {error:.3g}, {error / max(size * EPSILON, 1e-300):.1f} roundings"
    )


def train_beside_truth(
    group: Group,
    optimizer: str,
    mode: str,
    *,
    exact: bool,
    implementations: Sequence[str | None],
    device: str = "cpu",
    steps: int = 100,
    trained: Sequence[Trained] | None = None,
    first: tuple[int, ...] | None = None,
    seed: int = 0,
    **changes: Any,
) -> list[Trained]:
    """Trains with each implementation, and holds outputs, gradients, tables and states to one oracle.

    Args:
        exact: gradients are dyadic, and what takes no root and no quotient must be equal to the bit; else they are
            random, and norms of errors are bounded.
        trained: tables of each implementation; None: they are made.
        first: see `make_batch`.
        **changes: of the settings of the optimizer.
    """
    if trained is None:
        counted = changes.get("rowwise_bias_correction", False)
        trained = [
            make_tables(group, optimizer, torch.Generator().manual_seed(seed), device=device, counted=counted)
            for _ in implementations
        ]
    generator = torch.Generator().manual_seed(seed + 1)
    truth = Truth(
        group,
        optimizer,
        [trained[0].table(number) for number in range(len(group.tables))],
        learning_rate=2.0**-4,
        weight_decay=changes.get("weight_decay", 0.0),
        weight_decay_mode=WeightDecayMode(changes.get("weight_decay_mode", 0)),
        max_norm=changes.get("max_norm", 0.0),
        max_gradient=changes.get("max_gradient", math.inf),
    )
    before = trained[0].weights.cpu().clone() if first is None else None
    linear = exact and optimizer == "sgd"
    for step in range(1, steps + 1):
        batch = make_batch(
            group,
            generator,
            weighted="weighted" in mode,
            index_dtype=torch.int32 if step % 2 and first is None else torch.int64,
            first=first,
        )
        wanted = truth.outputs(batch, mode)
        gradient = torch.randint(-2, 3, wanted.shape, generator=generator) / 2
        if not exact:
            gradient = torch.randn(wanted.shape, generator=generator)
        wanted_factors = truth.train(batch, mode, gradient)
        for implementation, tables in zip(implementations, trained, strict=True):
            factors = None if batch.weights is None else batch.weights.clone().to(device).requires_grad_()
            update = update_of(tables, step, **changes)
            output = lookup(tables, batch, mode, id_weights=factors, update=update, implementation=implementation)
            _hold(output.detach().cpu(), wanted, linear, steps)
            output.backward(gradient.to(device))
            if factors is not None:
                assert factors.grad is not None
                _hold(factors.grad.cpu(), wanted_factors, linear, steps)
    for tables in trained:
        _hold_tables(tables, truth, before, exact, steps)
    return list(trained)


def _hold_tables(tables: Trained, truth: Truth, before: Tensor | None, exact: bool, steps: int) -> None:
    """Holds all rows that were named, and their states, to the oracle, and the others to what they were."""
    for number, (rows, _) in enumerate(tables.group.tables):
        known: dict[int, Tensor] = truth.weights[number]  # type: ignore[assignment]
        names = sorted(known)
        if not names:
            continue
        wanted = torch.stack([known[name] for name in names])
        _hold(tables.table(number)[names].cpu(), wanted, exact and tables.optimizer == "sgd", steps)
        if before is not None:
            others = [row for row in range(rows) if row not in known]
            assert torch.equal(tables.table(number).cpu()[others], tables.table(number, before)[others])
        states = [truth.state_of(number, name) for name in names]
        kinds = OPTIMIZERS[tables.optimizer].states
        for place, (kind, buffer) in enumerate(zip(kinds, tables.states, strict=False)):
            part = tables.table(number, buffer) if kind == "weight" else tables.row_state(number, buffer)
            values = [torch.as_tensor(state[place], dtype=torch.float64).expand(part.shape[1:]) for state in states]
            sums = exact and tables.optimizer in ("adagrad", "rowwise_adagrad")
            _hold(part[names].cpu(), torch.stack(values), sums, steps)


def _hold(found: Tensor, wanted: Tensor, exact: bool, steps: int) -> None:
    if exact:
        assert torch.equal(found.double(), wanted)
    else:
        assert_near(found, wanted, 16.0 * steps)
