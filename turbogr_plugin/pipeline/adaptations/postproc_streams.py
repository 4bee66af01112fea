"""Pipelined post-processing on npu: its stream, and the memory of what it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import device_module

_CLASS = "torchrec.distributed.train_pipeline.postproc:PipelinedPostproc"
_INIT, _RECORD = f"{_CLASS}.__init__", f"{_CLASS}.recursive_record_stream"


def _with_stream(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._dist_stream is not None and self._dist_stream.device.type == "npu":
            self._stream_context = device_module(self._dist_stream.device).stream

    return __init__


def _record_npu(original: staticmethod[..., None]) -> staticmethod[..., None]:
    stock = original.__func__

    @functools.wraps(stock)
    def recursive_record_stream(res: Any, stream: torch.Stream) -> None:
        if isinstance(res, torch.Tensor) and res.device.type == "npu":
            res.record_stream(stream)
        else:
            stock(res, stream)  # calls this again, by its name in the class, for what it holds

    return staticmethod(recursive_record_stream)


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_INIT,
        replace=_with_stream,
        why="an npu stream is entered through torch.cuda.stream, which raises",
        upstream="torchrec 1.8.0, distributed/train_pipeline/postproc.py:92",
        delete_when="the stream context comes from the device's module for every type",
        written_for={_INIT: "c0ca3685d71a6cbd"},
    ),
    Adaptation(
        target=_RECORD,
        replace=_record_npu,
        why="the memory of npu tensors goes back to the input stream while the compute stream still reads them",
        upstream="torchrec 1.8.0, distributed/train_pipeline/postproc.py:252",
        delete_when="the function records every tensor that is not on cpu",
        written_for={_RECORD: "d1ca0f95316b2aec"},
    ),
)
