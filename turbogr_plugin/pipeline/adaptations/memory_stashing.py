"""Pipelines that stash optimizer state or embeddings on the host are refused on npu instead of failing in torch.cuda.

TorchRec's memory stashing makes cuda streams, pins through cuda and resizes cuda storages; none of it is written
against a device module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

_MODULE = "torchrec.distributed.train_pipeline.experimental_pipelines"


def _refuse_npu(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        device = signature.bind(self, *args, **kwargs).arguments["device"]
        if device.type == "npu":
            raise ValueError(
                f"{type(self).__name__} stashes memory through torch.cuda and has no npu path (device is {device}): "
                "use TrainPipelineSparseDist or TrainPipelineFusedSparseDist"
            )
        original(self, *args, **kwargs)

    return __init__


def _refusal(pipeline: str, line: int, fingerprint: str) -> Adaptation:
    target = f"{_MODULE}:{pipeline}.__init__"
    return Adaptation(
        target=target,
        replace=_refuse_npu,
        why="on npu it fails in torch.cuda, with a message that does not name the cause",
        upstream=f"torchrec 1.8.0, distributed/train_pipeline/experimental_pipelines.py:{line}",
        delete_when="memory_stashing.py goes through the device's module",
        written_for={target: fingerprint},
    )


ADAPTATIONS: tuple[Adaptation, ...] = (
    _refusal("TrainPipelineSparseDistOptStash", 1009, "45b0f9fe75c20028"),
    _refusal("TrainPipelineSparseDistEmbStash", 1175, "8cb101191d6ca0dd"),  # TrainPipelinePrefetchEMS is one
)
