"""TorchRec's train pipelines get their streams on npu.

They make them only for the device types that they list, so that on any other the stages run one after the other and
nothing says so. Each `__init__` runs as it is; what it has left out is set behind it, with the priorities that it has
for cuda. Subclasses, a user's too, call these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import device_module, new_stream

_MODULE = "torchrec.distributed.train_pipeline.train_pipelines"
_WHY = "the pipeline has no streams on npu: copy, input distribution and compute run one after the other, silently"
_DELETE_WHEN = "the pipelines ask the device for streams instead of comparing its type with a list"


def _base(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._device.type == "npu":
            self._stream_context = device_module(self._device).stream
            self._memcpy_stream = new_stream(self._device)

    return __init__


def _sparse_dist(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._device.type == "npu":
            self._stream_context = device_module(self._device).stream
            self._memcpy_stream = new_stream(self._device, priority=-1)
            self._data_dist_stream = new_stream(self._device, priority=-1)

    return __init__


def _fused(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # None is left by emb_lookup_stream="new" alone: "data_dist" and "current" have found a stream.
        if self._device.type == "npu" and self._emb_lookup_stream is None:
            self._emb_lookup_stream = new_stream(self._device)
        if self._device.type == "cpu":
            # "current" is a torch.cpu.Stream here; torch.cuda.stream would enter it where an accelerator is present.
            self._stream_context = torch.cpu.stream

    return __init__


def _prefetch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._device.type == "npu":
            self._prefetch_stream = new_stream(self._device)
            self._default_stream = new_stream(self._device)

    return __init__


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=f"{_MODULE}:TrainPipelineBase.__init__",
        replace=_base,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/train_pipeline/train_pipelines.py:284 and 296",
        delete_when=_DELETE_WHEN,
        written_for={f"{_MODULE}:TrainPipelineBase.__init__": "a9dfc6f9db97008c"},
    ),
    Adaptation(
        target=f"{_MODULE}:TrainPipelineSparseDist.__init__",
        replace=_sparse_dist,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/train_pipeline/train_pipelines.py:616, 622 and 627",
        delete_when=_DELETE_WHEN,
        written_for={f"{_MODULE}:TrainPipelineSparseDist.__init__": "48955b2c3269f493"},
    ),
    Adaptation(
        target=f"{_MODULE}:TrainPipelineFusedSparseDist.__init__",
        replace=_fused,
        why='emb_lookup_stream="new" leaves the lookup without a stream on npu, "current" fails on cpu beside an npu',
        upstream="torchrec 1.8.0, distributed/train_pipeline/train_pipelines.py:1506",
        delete_when=_DELETE_WHEN,
        written_for={f"{_MODULE}:TrainPipelineFusedSparseDist.__init__": "a988eeb5494ebab6"},
    ),
    Adaptation(
        target=f"{_MODULE}:PrefetchTrainPipelineSparseDist.__init__",
        replace=_prefetch,
        why="without a stream nothing is prefetched on npu, and the forward then misses its input",
        upstream="torchrec 1.8.0, distributed/train_pipeline/train_pipelines.py:2088 and 2093",
        delete_when=_DELETE_WHEN,
        written_for={f"{_MODULE}:PrefetchTrainPipelineSparseDist.__init__": "1e243652918b1363"},
    ),
)
