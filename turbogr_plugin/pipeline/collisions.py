"""How often lookups of consecutive steps meet in the same row of a table: what stale rows cost depends on it.

With staleness tau the lookup of step t reads rows to which the updates of the last tau steps are still to come. The
paper (arXiv 2605.13433, section 4.2.2 and appendix C) bounds the gradient norm of such training by

    mean ||grad||^2 <= O( sqrt(L) sigma / sqrt(T) + L / T + alpha L tau / T )

where alpha is the probability that samples of different steps meet in a row: 1 / rows where lookups are uniform, 1
where a row belongs to every sample. Here it is measured per table. With n_t[v] lookups of row v in step t, over all
ranks, and N_t = sum over v of n_t[v],

    alpha = sum over t, v of n_t[v] n_{t+1}[v]  /  sum over t of N_t N_{t+1}

the probability that a lookup of one step and a lookup of the next, drawn at random, touch the same row. A sample of
the bound is one lookup, which is what makes it 1 / rows for uniform ids: sequences of many ids that are drawn from few
rows meet in some row almost always, though each of their lookups does so rarely.

Rows of a table of up to `BUCKETS` rows are counted one by one, which is exact. Larger tables are counted by a hash of
the row number into `BUCKETS` buckets, from which alpha follows without bias: with x the same sum over buckets,
E[x] = alpha + (1 - alpha) / BUCKETS. Its relative error is about sqrt(2 / BUCKETS), 1.1 %.

Ids are counted as the batch has them, before they are made unique or sent to the ranks that hold their rows: the sum
over ranks is then right for every sharding and for replica groups. A step costs one scatter of ones per feature, and
one copy to the host and one all-reduce of 64 KiB per table there, in the thread that counts. Left out: staleness above
1 is not measured by itself (collisions with the step before the last are taken to be as likely), and drift after the
steps that are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

BUCKETS = 1 << 14


@dataclass(frozen=True)
class CountedTable:
    """One table of one module of tables."""

    module: str
    """Name of the module that looks it up, in the model."""
    table: str
    rows: int
    features: tuple[str, ...]
    """Whose ids are rows of the table."""


def tables_of(module: nn.Module, name: str) -> list[CountedTable]:
    """The tables of an EmbeddingCollection or EmbeddingBagCollection, sharded or not, also inside a module around it.

    Args:
        module: a module that looks tables up.
        name: its name in the model.

    Returns:
        in the module's order; empty where no collection is found.
    """
    found = {}
    for part in module.modules():
        # Sharded collections keep the configurations of their tables under the names of the unsharded ones.
        for attribute in ("_embedding_configs", "_embedding_bag_configs"):
            for config in getattr(part, attribute, ()):
                table = CountedTable(name, config.name, config.num_embeddings, tuple(config.feature_names))
                found[table.table] = table
    return list(found.values())


def _mixed(ids: Tensor) -> Tensor:
    """Bucket of each id [N] int64: neighbours and equal low bits are spread (the finalizer of SplitMix64)."""
    mixed = ids ^ (ids >> 30)
    mixed = mixed * -0x40A7B892E31B1A47
    mixed = mixed ^ (mixed >> 27)
    mixed = mixed * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) & (BUCKETS - 1)


class TableCollisions:
    """Counts lookups step by step; `alphas` is the figure of the module's docstring.

    `observe` and `end_step` belong to the thread and the stream of the other sparse collectives; `alphas` computes.
    """

    def __init__(
        self,
        tables: Sequence[CountedTable],
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Args:
        tables: what is counted.
        device: where ids are.
        sum_over_ranks: sums a CPU tensor, in place, over all ranks that look the tables up, replica groups together;
            None counts this process alone.
        """
        self.tables = tuple(tables)
        self.steps = 0
        self._sum_over_ranks = sum_over_ranks
        # float32: exact up to 2^24 lookups of a row in a step, and not every accelerator has float64.
        self._counts = torch.zeros((len(self.tables), BUCKETS), device=device)
        self._previous = torch.zeros((len(self.tables), BUCKETS), dtype=torch.float64)
        self._met = torch.zeros(len(self.tables), dtype=torch.float64)
        self._pairs = torch.zeros(len(self.tables), dtype=torch.float64)
        self._places: dict[str, list[int]] = {}
        for place, table in enumerate(self.tables):
            self._places.setdefault(table.module, []).append(place)

    def observe(self, module: str, features: KeyedJaggedTensor) -> None:
        """Counts the ids that `module` is going to look up for this rank's samples of the step.

        Args:
            module: name, as in the tables.
            features: ids by feature; keys that no table reads are passed over.

        Raises:
            ValueError: a table of the module has a feature that is not there.
        """
        keys = set(features.keys())
        for place in self._places.get(module, ()):
            table = self.tables[place]
            for feature in table.features:
                if feature not in keys:
                    raise ValueError(
                        f"features must have the key {feature!r}, which table {table.table!r} of {module!r} reads; "
                        f"got {sorted(keys)}"
                    )
                ids = features[feature].values().long()
                # An id beyond its table (one that managed collision is going to map) must not leave the buckets.
                buckets = ids & (BUCKETS - 1) if table.rows <= BUCKETS else _mixed(ids)
                self._counts[place].index_add_(0, buckets, self._counts.new_ones(()).expand(buckets.numel()))

    def end_step(self) -> None:
        """Ends a step on all ranks: sums the counts over them, a collective; waits for this stream of the device."""
        counts = self._counts.to("cpu", copy=True)
        self._counts.zero_()
        if self._sum_over_ranks is not None:
            self._sum_over_ranks(counts)
        now = counts.double()
        self._met += (now * self._previous).sum(dim=1)
        self._pairs += now.sum(dim=1) * self._previous.sum(dim=1)
        self._previous = now
        self.steps += 1

    def alphas(self) -> dict[CountedTable, float]:
        """alpha of each table, the same on all ranks; 0 for a table without a lookup in two steps that follow.

        Raises:
            ValueError: fewer than two steps were counted, which leaves nothing to compare.
        """
        if self.steps < 2:
            raise ValueError(f"collisions between steps need at least 2 steps, {self.steps} were counted")
        found = {}
        rows = zip(self.tables, self._met.tolist(), self._pairs.tolist(), strict=True)
        for table, met, pairs in rows:
            share = met / pairs if pairs else 0.0
            hashed = table.rows > BUCKETS and pairs > 0
            found[table] = max(0.0, (share * BUCKETS - 1) / (BUCKETS - 1)) if hashed else share
        return found


def measure_collisions(
    collections: dict[str, Any],
    steps: Iterable[KeyedJaggedTensor],
    sum_over_ranks: Callable[[Tensor], None] | None = None,
) -> dict[CountedTable, float]:
    """alpha of the tables of collections that are not sharded yet, from some steps of a loader.

    For deciding how to split a collection (`table_split`) before it is sharded. All ranks give the same number of
    steps.

    Args:
        collections: EmbeddingCollections and EmbeddingBagCollections by name; all read the same features.
        steps: this rank's ids of consecutive steps, on one device.
        sum_over_ranks: see TableCollisions.
    """
    tables = [table for name, collection in collections.items() for table in tables_of(collection, name)]
    counted: TableCollisions | None = None
    for features in steps:
        counted = counted or TableCollisions(tables, features.device(), sum_over_ranks)
        for name in collections:
            counted.observe(name, features)
        counted.end_step()
    if counted is None:
        raise ValueError("steps is empty: collisions between steps need at least 2 steps")
    return counted.alphas()
