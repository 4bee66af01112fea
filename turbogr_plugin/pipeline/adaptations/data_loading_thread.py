"""The loading thread of the evaluation pipelines copies to the npu of its process, on a stream of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import device_module, new_stream

_INIT = "torchrec.distributed.train_pipeline.utils:DataLoadingThread.__init__"
_RUN = "torchrec.distributed.train_pipeline.utils:DataLoadingThread.run"
_DELETE_WHEN = "the thread asks the device's module for the stream and sets its device for every type"


def _with_stream(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        self: Any,
        device: torch.device,
        dataloader_iter: Iterator[Any],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: Any = None,
    ) -> None:
        if device.type == "npu" and memcpy_stream is None:
            memcpy_stream = new_stream(device, priority=memcpy_stream_priority)
        original(self, device, dataloader_iter, to_device_non_blocking, memcpy_stream_priority, memcpy_stream)

    return __init__


def _on_its_device(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def run(self: Any) -> None:
        if self._device.type == "npu":
            device_module(self._device).set_device(self._memcpy_stream.device)
        original(self)

    return run


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_INIT,
        replace=_with_stream,
        why="the thread has no stream on npu unless it is given one, and its copies wait for the compute stream",
        upstream="torchrec 1.8.0, distributed/train_pipeline/utils.py:649",
        delete_when=_DELETE_WHEN,
        written_for={_INIT: "8c874456557cdbb3"},
    ),
    Adaptation(
        target=_RUN,
        replace=_on_its_device,
        why="a new thread's current device is npu:0, where every rank of a host would open a context",
        upstream="torchrec 1.8.0, distributed/train_pipeline/utils.py:667",
        delete_when=_DELETE_WHEN,
        written_for={_RUN: "3967ff7cf6ddc754"},
    ),
)
