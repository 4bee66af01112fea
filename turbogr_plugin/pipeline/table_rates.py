"""Learning rates of tables that are updated in backward, given to the lookups of the batches that they belong to.

The tables' update takes the rate that held at its lookup, in fbgemm's kernels as in ours. Fused optimizers write it to
the table modules in `zero_grad` and `step`, in the thread of the dense part; the sparse lane looks up at another time.
So here the rate is noted when the optimizer sets it, handed to each lookup when that is handed out, and written to the
tables right before it, in the lane. At staleness 0 every update has the rate that training without a pipeline would
give it; at staleness s that of s steps before, since the lookup comes before the schedule knows better.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from turbogr_plugin.sharding.jagged_lookup import table_modules


class TableRates:
    """The rates of all table modules within some modules; from `__init__` to `give_back` optimizers set them here."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables: list[Any] = [
            tables
            for module in modules
            for tables in table_modules(module)
            if isinstance(tables, SplitTableBatchedEmbeddingBagsCodegen)
        ]
        self._noted: list[float] = [float(tables.learning_rate_tensor) for tables in self._tables]
        self._written = list(self._noted)
        for place, tables in enumerate(self._tables):
            tables.set_learning_rate = _noted_by(weakref.ref(self), place, tables)

    def _note(self, place: int, rate: float) -> None:
        self._noted[place] = rate

    def now(self) -> tuple[float, ...]:
        """As the optimizer has set them; for the thread that runs it."""
        return tuple(self._noted)

    def write(self, rates: Sequence[float]) -> None:
        """Sets those of the lookup that comes now; for the sparse lane, on its stream."""
        for place, (tables, rate) in enumerate(zip(self._tables, rates, strict=True)):
            if rate != self._written[place]:
                type(tables).set_learning_rate(tables, rate)
                self._written[place] = rate

    def give_back(self) -> None:
        """Optimizers set the rates in the tables again, which get the last ones; the lane rests."""
        self.write(self._noted)
        for tables in self._tables:
            tables.__dict__.pop("set_learning_rate", None)
        self._tables, self._noted, self._written = [], [], []


def _noted_by(rates: weakref.ref[TableRates], place: int, tables: Any) -> Callable[[float], None]:
    """set_learning_rate of a table module, which is its own again once the pipeline has been freed."""

    def set_learning_rate(rate: float) -> None:
        own = rates()
        if own is not None:
            own._note(place, rate)
            return
        tables.__dict__.pop("set_learning_rate", None)
        type(tables).set_learning_rate(tables, rate)

    return set_learning_rate
