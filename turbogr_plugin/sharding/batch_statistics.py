"""What batches look like, for the planner: lookups of each feature and the popularity of each table's rows.

    statistics = BatchStatistics.from_batches(batches, tables={"item": (rows, ["history", "negatives"])})
    statistics = BatchStatistics(lengths={"history": 1847.0}, access={"item": AccessHistogram.from_counts(counts)})

TorchRec's planner takes the mean number of ids per sample as `ParameterConstraints(pooling_factors=...)` and knows no
popularity. What is given here goes before that; a feature that is not named keeps what the constraints say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn
from torchrec.distributed.planner.constants import NUM_POOLINGS, POOLING_FACTOR
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from turbogr_plugin.sharding.access_histogram import AccessHistogram


@dataclass(frozen=True, kw_only=True)
class BatchStatistics:
    """Statistics of the batches of one rank."""

    lengths: Mapping[str, float] = field(default_factory=dict)
    """Mean number of ids per sample, by feature."""
    access: Mapping[str, AccessHistogram] = field(default_factory=dict)
    """Popularity of the rows, by table; a table that is not named counts as uniform."""

    def __post_init__(self) -> None:
        for feature, length in self.lengths.items():
            if not (isinstance(length, int | float) and 0 <= length < math.inf):
                raise ValueError(f"lengths[{feature!r}] must be a number of ids >= 0, got {length!r}")

    @classmethod
    def from_batches(
        cls, batches: Iterable[KeyedJaggedTensor], tables: Mapping[str, tuple[int, Sequence[str]]]
    ) -> BatchStatistics:
        """Counts lookups in some batches, on the host.

        Args:
            batches: features of a few hundred batches of one or several ranks.
            tables: (rows, names of its features) of each table.

        Raises:
            ValueError: no batch, or an id outside its table.
        """
        table_of = {feature: table for table, (_, features) in tables.items() for feature in features}
        samples = dict.fromkeys(table_of, 0)
        ids = dict.fromkeys(table_of, 0)
        counts = {table: np.zeros(rows, dtype=np.int64) for table, (rows, _) in tables.items()}
        for batch in batches:
            names = batch.keys()
            for feature in table_of:
                if feature not in names:
                    continue
                jagged = batch[feature]
                values = jagged.values().cpu().numpy()
                rows = counts[table_of[feature]].size
                if values.size and not (values.min() >= 0 and values.max() < rows):
                    raise ValueError(
                        f"batches: feature {feature!r} has ids {values.min()} to {values.max()}, its table "
                        f"{table_of[feature]!r} has {rows} rows"
                    )
                np.add.at(counts[table_of[feature]], values, 1)
                samples[feature] += jagged.lengths().numel()
                ids[feature] += values.size
        if not any(samples.values()):
            raise ValueError("batches must have at least one sample of the features of tables")
        return cls(
            lengths={feature: ids[feature] / samples[feature] for feature in table_of if samples[feature]},
            access={table: AccessHistogram.from_counts(count) for table, count in counts.items() if count.any()},
        )


def constraints_with_lengths(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: BatchStatistics,
    batch_size: int,
) -> dict[str, ParameterConstraints]:
    """The constraints of a planner with the lengths of statistics as pooling factors, which all its parts read.

    Args:
        module: the model.
        sharders: TorchRec's.
        constraints: as given; they are not changed.
        statistics: features that it does not name keep the pooling factor of the constraints, or TorchRec's 1.
        batch_size: of features for which the constraints give none.
    """
    found = dict(constraints or {})
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for child in module.modules():
        sharder = by_type.get(type(child))
        for table in [] if sharder is None else sharder.shardable_parameters(child):
            features = features_of(child, table)
            if not any(feature in statistics.lengths for feature in features):
                continue
            given = found.get(table) or ParameterConstraints()
            factors = _padded(given.pooling_factors, len(features), POOLING_FACTOR)
            found[table] = replace(
                given,
                pooling_factors=[
                    float(statistics.lengths.get(feature, factor))
                    for feature, factor in zip(features, factors, strict=True)
                ],
                num_poolings=_padded(given.num_poolings, len(features), NUM_POOLINGS) if given.num_poolings else None,
                batch_sizes=_padded(given.batch_sizes, len(features), batch_size) if given.batch_sizes else None,
            )
    return found


def features_of(module: nn.Module, table: str) -> list[str]:
    """The features of a table of a TorchRec collection, also of one inside another module."""
    for child in module.modules():
        for attribute in ("embedding_bag_configs", "embedding_configs"):
            configs: Any = getattr(child, attribute, None)
            for config in configs() if callable(configs) else configs or ():
                if config.name == table:
                    return list(config.feature_names)
    return []


def _padded(values: Sequence[Any] | None, count: int, default: Any) -> list[Any]:
    """Exactly `count` values."""
    return [*(values or ()), *[default] * count][:count]
