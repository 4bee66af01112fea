"""FusedSparseDist looks tables up after the optimizer and the user have written to them, on npu.

The pipeline starts the lookup of the next batch on a stream of its own, beside the dense optimizer. That is right for
tables whose optimizer runs in backward, on the stream of their lookup. A data-parallel table is written by the dense
optimizer, and the tables of a DMPCollection by `sync`, both on the current stream: then the lookup has to wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingType

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import current_stream

_TARGET = "torchrec.distributed.train_pipeline.train_pipelines:TrainPipelineFusedSparseDist.start_embedding_lookup"


def _is_written_elsewhere(pipeline: Any) -> bool:
    """Whether tables that the pipeline looks up are written on another stream than that of their lookup."""
    return isinstance(pipeline._model, DMPCollection) or any(
        table.sharding_type == ShardingType.DATA_PARALLEL.value
        for module in pipeline._pipelined_modules
        for table in getattr(module, "module_sharding_plan", {}).values()
    )


def _after_writes(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start_embedding_lookup(self: Any, batch: Any, context: Any) -> None:
        if self._device.type == "npu" and batch is not None and _is_written_elsewhere(self):
            self._emb_lookup_stream.wait_stream(current_stream(self._device))
        original(self, batch, context)

    return start_embedding_lookup


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_after_writes,
        why="the lookup of a data-parallel or replicated table may read rows that its update is still writing",
        upstream="torchrec 1.8.0, distributed/train_pipeline/train_pipelines.py:1541",
        delete_when="the lookup waits for the current stream where such tables are among those looked up",
        written_for={_TARGET: "c83157af289f9df8"},
    ),
)
