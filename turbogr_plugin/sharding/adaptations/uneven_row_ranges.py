"""Row-wise tables are looked up where their plan puts the rows, also where shards have different numbers of rows.

TorchRec sends an id to the rank of an even cut, id // ceil(rows / ranks), whatever the plan says: with any other cut it
reads other rows, or none, without a word. fbgemm's operator takes boundaries per table, which TorchRec uses for buckets
of virtual tables only; here a plan's own boundaries go there. Even cuts stay as they are.

Left out: managed-collision collections, whose remapped ids have an input distribution of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.backend.adaptation import Adaptation

_SHARDING = "torchrec.distributed.sharding"
_POOLED = f"{_SHARDING}.rw_sharding:RwPooledEmbeddingSharding.create_input_dist"
_SEQUENCES = f"{_SHARDING}.rw_sequence_sharding:RwSequenceEmbeddingSharding.create_input_dist"
_DIST = f"{_SHARDING}.rw_sharding:RwSparseFeaturesDist.forward"
_BUCKETIZE = "torchrec.distributed.embedding_sharding:bucketize_kjt_before_all2all"


def row_boundaries(sharding: Any) -> list[list[int]] | None:
    """For each feature of a row-wise sharding the first rows of all ranks and the end; None where all cuts are even."""
    boundaries: list[list[int]] = []
    uneven = False
    for group in sharding._grouped_embedding_configs:
        for table in group.embedding_tables:
            shards = table.global_metadata.shards_metadata
            first = [shard.shard_offsets[0] for shard in shards]
            rows = first[-1] + shards[-1].shard_sizes[0]
            block = -(-rows // len(shards))
            uneven = uneven or any(start != min(place * block, rows) for place, start in enumerate(first))
            boundaries += [[*first, rows]] * len(table.feature_names)
    return boundaries if uneven else None


def _by_plan(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_input_dist(self: Any, device: torch.device | None = None) -> Any:
        made = original(self, device)
        boundaries = row_boundaries(self)
        if boundaries is not None and made.zch_bucketize_row_pos is None:
            where = self._device if device is None else device
            rows: list[Tensor] = [torch.tensor(each, dtype=torch.int64, device=where) for each in boundaries]
            made.zch_bucketize_row_pos = rows
        return made

    return create_input_dist


def _adaptation(target: str, fingerprint: str) -> Adaptation:
    return Adaptation(
        target=target,
        replace=_by_plan,
        why="row-wise shards with unequal numbers of rows are looked up at the rows of an even cut: wrong embeddings",
        upstream="torchrec 1.8.0, distributed/sharding/rw_sharding.py:410",
        delete_when="TorchRec takes the boundaries of a plan, or refuses plans with others than its own",
        written_for={target: fingerprint, _DIST: "a54aef18e8df8e00", _BUCKETIZE: "5be3bffe6b44916f"},
    )


ADAPTATIONS = (_adaptation(_POOLED, "7487597e1f1abc6e"), _adaptation(_SEQUENCES, "32f26f2583cb6684"))
