"""A rank that holds no table of a sharded collection receives rows in fp16 and bf16 as what they are, on every device.

TorchRec lays them out as fp32 there: gloo ends the process, other backends give wrong numbers (../row_dtypes.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.sharding.row_dtypes import agree_on_rows

_SEQUENCES = "torchrec.distributed.embedding:ShardedEmbeddingCollection._create_lookups"
_BAGS = "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection._create_lookups"


def _agreeing(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def _create_lookups(self: Any) -> None:
        original(self)
        agree_on_rows(self)

    return _create_lookups


def _adaptation(target: str, line: int, fingerprint: str) -> Adaptation:
    return Adaptation(
        target=target,
        replace=_agreeing,
        why="with output_dtype fp16, ranks without tables read rows as fp32: a crash on gloo, wrong numbers elsewhere",
        upstream=f"torchrec 1.8.0, distributed/embedding_lookup.py:{line}",
        delete_when="TorchRec makes _dummy_embs_tensor in the output_dtype of the tables",
        written_for={target: fingerprint},
    )


ADAPTATIONS: tuple[Adaptation, ...] = (
    _adaptation(_SEQUENCES, 237, "66e94cdf0fbf74a9"),
    _adaptation(_BAGS, 663, "899712e42830f6a0"),
)
