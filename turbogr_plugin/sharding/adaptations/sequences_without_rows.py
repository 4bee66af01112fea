"""A rank whose batch has no rows takes part in the lookup of a sharded EmbeddingCollection, on every device.

TorchRec reshapes the lengths to [features, rows] with the number of features left open, which is ambiguous without
rows: this rank raises, and the others wait for it in backward. Here such a rank takes its embeddings apart as those of
one row without values, and gets no lengths. Where no rank has rows, each looks up one row without values per rank.

Left out: pooled embeddings sharded by rows, whose reduce-scatter wants the same number of rows of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.modules.utils import SequenceVBEContext
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.modules.utils:construct_jagged_tensors"
_LOOKUP = "torchrec.distributed.embedding:ShardedEmbeddingCollection.compute_and_output_dist"
_LOOKUP_ALONE = "torchrec.distributed.embedding:ShardedEmbeddingCollection.compute"


def _with_empty_batches(original: Callable[..., dict[str, JaggedTensor]]) -> Callable[..., dict[str, JaggedTensor]]:
    @functools.wraps(original)
    def construct_jagged_tensors(
        embeddings: Tensor,
        features: KeyedJaggedTensor,
        embedding_names: list[str],
        need_indices: bool = False,
        features_to_permute_indices: dict[str, list[int]] | None = None,
        original_features: KeyedJaggedTensor | None = None,
        reverse_indices: Tensor | None = None,
        seq_vbe_ctx: SequenceVBEContext | None = None,
        use_gather_select: bool = False,
    ) -> dict[str, JaggedTensor]:
        options: dict[str, Any] = {
            "need_indices": need_indices,
            "features_to_permute_indices": features_to_permute_indices,
            "original_features": original_features,
            "reverse_indices": reverse_indices,
            "seq_vbe_ctx": seq_vbe_ctx,
            "use_gather_select": use_gather_select,
        }
        given = features if original_features is None else original_features
        if seq_vbe_ctx is not None or given.stride() != 0:
            return original(embeddings, features, embedding_names, **options)
        options["original_features"] = None
        found = original(embeddings, _with_empty_rows(given, 1), embedding_names, **options)
        lengths = given.lengths()
        return {
            name: JaggedTensor(jagged.values(), jagged.weights_or_none(), lengths, lengths.new_zeros(1))
            for name, jagged in found.items()
        }

    return construct_jagged_tensors


def _with_empty_rows(features: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    keys = features.keys()
    return KeyedJaggedTensor(
        keys=keys,
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths().new_zeros(len(keys) * rows),
        stride=rows,
        length_per_key=[0] * len(keys),
    )


def _of_all_ranks(module: Any, features_by_sharding: KJTList) -> KJTList:
    """What this rank looks up for all ranks: one empty row for each where none of them has rows."""
    ranks = module._env.world_size
    return KJTList(
        [
            features if features.variable_stride_per_key() or features.stride() else _with_empty_rows(features, ranks)
            for features in features_by_sharding
        ]
    )


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_and_output_dist(self: Any, ctx: Any, input: KJTList) -> Any:
        return original(self, ctx, _of_all_ranks(self, input))

    return compute_and_output_dist


def _lookup_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute(self: Any, ctx: Any, dist_input: KJTList) -> Any:
        return original(self, ctx, _of_all_ranks(self, dist_input))

    return compute


def _adaptation_of_lookup(target: str, replace: Callable[..., Any], line: int, fingerprint: str) -> Adaptation:
    return Adaptation(
        target=target,
        replace=replace,
        why="batches that are empty on every rank raise 'cannot reshape tensor of 0 elements'",
        upstream=f"torchrec 1.8.0, distributed/embedding.py:{line}",
        delete_when="TorchRec names both sizes in that reshape",
        written_for={target: fingerprint},
    )


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_with_empty_batches,
        why="an empty batch on one rank raises 'cannot reshape tensor of 0 elements' there and hangs the other ranks",
        upstream="torchrec 1.8.0, modules/utils.py:314; https://github.com/meta-pytorch/torchrec/issues/2773",
        delete_when="TorchRec names both sizes in that reshape",
        written_for={_TARGET: "d7a95be626b28df2"},
        also=(
            "torchrec.distributed.embedding:construct_jagged_tensors",
            "torchrec.distributed.mc_modules:construct_jagged_tensors",
            "torchrec.distributed.pec_embedding:construct_jagged_tensors",
        ),
    ),
    _adaptation_of_lookup(_LOOKUP, _lookup, 1685, "85875928dafafa67"),
    _adaptation_of_lookup(_LOOKUP_ALONE, _lookup_alone, 1637, "d3db677f6462d9d1"),
)
