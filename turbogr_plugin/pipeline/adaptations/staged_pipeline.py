"""StagedTrainPipeline and its sparse stage switch streams on npu by torch.npu instead of torch.cuda."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import device_module, new_stream

_PIPELINE = "torchrec.distributed.train_pipeline.train_pipelines:StagedTrainPipeline.__init__"
_STAGE = "torchrec.distributed.train_pipeline.pipeline_stage:SparseDataDistUtil.__init__"
_DELETE_WHEN = "the stream context comes from the device's module for every type"


def _pipeline(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        device = self._compute_stream.device
        if device.type == "npu":
            self._stream_context = device_module(device).stream

    return __init__


def _stage(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._device.type == "npu":
            self._stream_context = device_module(self._device).stream
            self._default_stream = new_stream(self._device)

    return __init__


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_PIPELINE,
        replace=_pipeline,
        why="a stage with an npu stream is entered through torch.cuda.stream, which raises",
        upstream="torchrec 1.8.0, distributed/train_pipeline/train_pipelines.py:2651",
        delete_when=_DELETE_WHEN,
        written_for={_PIPELINE: "f9a60540ca310561"},
    ),
    Adaptation(
        target=_STAGE,
        replace=_stage,
        why="the sparse stage enters npu streams through torch.cuda.stream and records no use by the default stream",
        upstream="torchrec 1.8.0, distributed/train_pipeline/pipeline_stage.py:212 and 235",
        delete_when=_DELETE_WHEN,
        written_for={_STAGE: "82adbfe25e57f9d4"},
    ),
)
