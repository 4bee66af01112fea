"""Ids of a batch without rows on any rank pass the managed collision of sharded tables, on every device.

TorchRec reshapes the lengths to [features, rows] with the number of features left open, which is ambiguous without
rows. A batch whose features have sizes of their own it does not reshape: such a one, of no rows for each feature and
rank, stands in for the batch here.

Left out: pooled embeddings where some ranks have rows and others do not, as of any table sharded by rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.distributed.mc_modules:ShardedManagedCollisionCollection.compute"


def _has_no_rows(features: KeyedJaggedTensor) -> bool:
    return not features.variable_stride_per_key() and features.stride() == 0


def _of_no_rows_each(features: KeyedJaggedTensor, ranks: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride_per_key_per_rank=torch.zeros(len(features.keys()), ranks, dtype=torch.int32),
        length_per_key=[0] * len(features.keys()),
    )


def _with_empty_batches(original: Callable[..., KJTList]) -> Callable[..., KJTList]:
    @functools.wraps(original)
    def compute(self: Any, ctx: Any, dist_input: KJTList) -> KJTList:
        empty = [_has_no_rows(features) for features in dist_input]
        if not any(empty):
            return original(self, ctx, dist_input)
        ranks = self._env.world_size
        given = [
            _of_no_rows_each(features, ranks) if without else features
            for features, without in zip(dist_input, empty, strict=True)
        ]
        remapped = original(self, ctx, KJTList(given))
        results = []
        for found, features, sharding_ctx, without in zip(
            remapped, dist_input, ctx.sharding_contexts, empty, strict=True
        ):
            if without:
                keys = features.keys()
                sharding_ctx.lengths_after_input_dist = features.lengths().view(len(keys), 0)
                results.append(
                    KeyedJaggedTensor(
                        keys,
                        found.values(),
                        found.weights_or_none(),
                        found.lengths(),
                        stride=0,
                        length_per_key=[0] * len(keys),
                    )
                )
            else:
                results.append(found)
        return KJTList(results)

    return compute


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_with_empty_batches,
        why="batches that are empty on every rank raise 'cannot reshape tensor of 0 elements' in managed collision",
        upstream="torchrec 1.8.0, distributed/mc_modules.py:973",
        delete_when="TorchRec names both sizes in that reshape",
        written_for={_TARGET: "063f33715e02bb14"},
    ),
)
