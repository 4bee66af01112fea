"""Which tables are looked up stale: those whose steps seldom meet in a row.

A table may be stale where alpha tau < limit (0.05 by default), with alpha of `collisions`. One sharded module is one
lookup and one all-to-all for all of its tables, so that is the unit in which a pipeline can run ahead: a module is
stale only if all of its tables may be. The tables of one collection get different choices when the collection is split
before it is sharded (`table_split`); a second lookup of the same module is never made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from turbogr_plugin.pipeline.collisions import CountedTable, TableCollisions, tables_of


@dataclass(frozen=True)
class TableChoice:
    """What was decided for one table."""

    table: CountedTable
    alpha: float
    """Measured collision probability between consecutive steps."""
    staleness: int
    """0, or that of the run."""
    reason: str


@dataclass(frozen=True)
class StalenessChoice:
    """What was decided for all tables."""

    limit: float
    """alpha tau of a stale table is below it."""
    wanted: int
    """tau of the run."""
    steps: int
    """How many steps alpha comes from."""
    tables: tuple[TableChoice, ...]

    @property
    def modules(self) -> dict[str, int]:
        """Staleness of each module."""
        return {choice.table.module: choice.staleness for choice in self.tables}

    def lines(self) -> list[str]:
        """For people: alpha and the choice of every table."""
        head = f"staleness {self.wanted}, limit alpha tau < {self.limit:g}, alpha over {self.steps} steps:"
        names = [f"{choice.table.module}.{choice.table.table}" for choice in self.tables]
        width = max(map(len, names), default=0)
        return [head] + [
            f"  {name:<{width}}  alpha {choice.alpha:.2e}  {'stale' if choice.staleness else 'exact'}: {choice.reason}"
            for name, choice in zip(names, self.tables, strict=True)
        ]


def check_staleness_limit(limit: float) -> None:
    """Raises ValueError unless `limit` is a positive number."""
    if not 0 < limit < float("inf"):
        raise ValueError(f"staleness_limit must be a positive number (0.05 is usual), got {limit}")


def choose_staleness(
    alphas: Mapping[CountedTable, float], staleness: int, *, limit: float = 0.05, steps: int = 0
) -> StalenessChoice:
    """Chooses; the same on all ranks where `alphas` is.

    Args:
        alphas: of every table, by `TableCollisions.alphas`.
        staleness: tau of the run.
        limit: alpha tau must be below it.
        steps: how many steps alpha comes from, for the report.

    Raises:
        ValueError: a limit that is not positive.
    """
    check_staleness_limit(limit)
    too_many: dict[str, list[str]] = {}
    for table, alpha in alphas.items():
        if alpha * staleness >= limit:
            too_many.setdefault(table.module, []).append(table.table)
    choices = []
    for table, alpha in alphas.items():
        held_back = too_many.get(table.module, [])
        product = f"alpha tau = {alpha * staleness:.2e}"
        if table.table in held_back:
            reason = f"{product} is not below {limit:g}"
        elif held_back:
            reason = (
                f"{product} is below {limit:g}, but its module looks up {', '.join(held_back)}, too: "
                "split the collection to part them"
            )
        else:
            reason = f"{product} is below {limit:g}"
        choices.append(TableChoice(table, alpha, 0 if held_back else staleness, reason))
    return StalenessChoice(limit, staleness, steps, tuple(choices))


class StalenessByTable:
    """Counts the warm-up of a pipeline and then chooses its modules.

    The batches before `start_batch` are counted, each on all ranks before any lookup of the batch after it, and have
    staleness 0. When the dense part of batch `start_batch` comes, all of them have been, so that to choose is
    arithmetic: no rank waits for another, nor for a device.
    """

    def __init__(self, limit: float, staleness: int, start_batch: int) -> None:
        """Raises ValueError for numbers that leave nothing to choose, or nothing to choose by."""
        check_staleness_limit(limit)
        if staleness < 1:
            raise ValueError(f"staleness_limit chooses tables for a staleness of at least 1, got staleness={staleness}")
        if start_batch < 2:
            raise ValueError(
                "staleness_limit needs a start_batch of at least 2, batches in which collisions are measured, got "
                f"start_batch={start_batch}"
            )
        self.start_batch = start_batch
        self.choice: StalenessChoice | None = None
        self._limit, self._staleness = limit, staleness
        self._collisions: TableCollisions | None = None

    def counts(self, number: int) -> bool:
        """Whether batch `number` is counted."""
        return self.choice is None and number < self.start_batch

    def observe(self, modules: Mapping[str, Any], batch: Any, sum_over_ranks: Callable[[Tensor], None] | None) -> None:
        """Counts a batch; in the sparse lane, a collective.

        Args:
            modules: pipelined modules by name.
            batch: of this rank.
            sum_over_ranks: see TableCollisions.
        """
        features = {name: _features_of(module, batch) for name, module in modules.items()}
        if self._collisions is None:
            tables = [table for name, module in modules.items() for table in tables_of(module, name)]
            device = next((each.device() for each in features.values()), torch.device("cpu"))
            self._collisions = TableCollisions(tables, device, sum_over_ranks)
        for name, ids in features.items():
            self._collisions.observe(name, ids)
        self._collisions.end_step()

    def choose(self) -> StalenessChoice:
        """By what has been counted.

        Raises:
            ValueError: fewer than two batches were.
        """
        counted = self._collisions
        alphas, steps = ({}, 0) if counted is None else (counted.alphas(), counted.steps)
        self.choice = choose_staleness(alphas, self._staleness, limit=self._limit, steps=steps)
        return self.choice


def _features_of(module: Any, batch: Any) -> KeyedJaggedTensor:
    """The ids that a pipelined module is going to be called with."""
    args, kwargs = module.forward.args.build_args_kwargs(batch)
    features = next(iter((*args, *kwargs.values())), None)
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(
            f"staleness_limit counts the ids of a KeyedJaggedTensor; module {module.forward.name!r} is called with a "
            f"{type(features).__name__}"
        )
    return features
