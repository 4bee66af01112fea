"""Sharding types that TorchRec's own sharders offer: on an NPU all those of CUDA, for a lone EmbeddingBag what it has.

EmbeddingCollection and feature-processed collections offer the same on every device and need nothing here. On CPU it
stays as it is: row-wise tables of an EmbeddingBagCollection still need a sharder of one's own there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.distributed.types import ShardingType

from turbogr_plugin.backend.adaptation import Adaptation

_BASE = "torchrec.distributed.embedding_types:BaseEmbeddingSharder.sharding_types"
_FUSED = "torchrec.distributed.fused_embeddingbag:FusedEmbeddingBagCollectionSharder.sharding_types"


def _as_cuda(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def sharding_types(self: Any, compute_device_type: str) -> list[str]:
        offered = original(self, "cuda" if compute_device_type == "npu" else compute_device_type)
        if isinstance(self, EmbeddingBagSharder):
            # Its ShardedEmbeddingBag refuses them, so that such a plan fails on any device:
            # https://github.com/meta-pytorch/torchrec/issues/602
            return [kind for kind in offered if kind != ShardingType.TABLE_WISE.value]
        return offered

    return sharding_types


_WHY = "row-wise, table-row-wise and grid sharding are not offered for bags of embeddings on npu"
_UNTIL = "TorchRec offers them on every device"

ADAPTATIONS = (
    Adaptation(
        target=_BASE,
        replace=_as_cuda,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/embedding_types.py:559",
        delete_when=_UNTIL,
        written_for={_BASE: "3a3cfcb120cff6f4"},
    ),
    Adaptation(
        target=_FUSED,
        replace=_as_cuda,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/fused_embeddingbag.py:132",
        delete_when=_UNTIL,
        written_for={_FUSED: "efef11f64af259ce"},
    ),
)
