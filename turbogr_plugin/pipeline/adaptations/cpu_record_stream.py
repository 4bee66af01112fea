"""TrainPipelineSemiSync and TrainPipelineFusedSparseDist run on CPU: nothing is recorded for a stream that is none.

Both ask the CPU for its current stream, get a `torch.cpu.Stream`, and hand it to `Tensor.record_stream`, which knows
only streams of accelerators. Two of the functions on that way take None for "no stream", so None is what they get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation

_UTILS = "torchrec.distributed.train_pipeline.utils"
_PIPELINES = "torchrec.distributed.train_pipeline.train_pipelines"
_STAGE = "torchrec.distributed.train_pipeline.pipeline_stage"
_EXPERIMENTAL = "torchrec.distributed.train_pipeline.experimental_pipelines"
_KEYED_TENSOR = "torchrec.sparse.jagged_tensor:KeyedTensor.record_stream"
_WHY = "on cpu it raises: Tensor.record_stream does not take a torch.cpu.Stream"
_DELETE_WHEN = "Tensor.record_stream accepts a torch.cpu.Stream, or the pipelines pass None on cpu"


def _wait_for_events(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _wait_for_events(batch: Any, context: Any, stream: Any) -> None:
        original(batch, context, _none_on_cpu(stream))

    return _wait_for_events


def _start_embedding_lookup(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _start_embedding_lookup(
        module: Any, context: Any, source_stream: Any, target_stream: Any, stream_context: Callable[..., Any]
    ) -> None:
        original(module, context, source_stream, _none_on_cpu(target_stream), stream_context)

    return _start_embedding_lookup


def _record_stream(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def record_stream(self: Any, stream: Any) -> None:
        if _none_on_cpu(stream) is not None:
            original(self, stream)

    return record_stream


def _none_on_cpu(stream: Any) -> Any:
    return None if isinstance(stream, torch.cpu.Stream) else stream


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=f"{_UTILS}:_wait_for_events",
        replace=_wait_for_events,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/train_pipeline/utils.py:187-206, called by train_pipelines.py:1857",
        delete_when=_DELETE_WHEN,
        written_for={f"{_UTILS}:_wait_for_events": "97f82be8cc8d34fa"},
        also=(f"{_PIPELINES}:_wait_for_events",),
    ),
    Adaptation(
        target=f"{_UTILS}:_start_embedding_lookup",
        replace=_start_embedding_lookup,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/train_pipeline/utils.py:310, called by train_pipelines.py:1539 and 1950",
        delete_when=_DELETE_WHEN,
        written_for={f"{_UTILS}:_start_embedding_lookup": "f1b3e46153d87b4e"},
        also=(f"{_PIPELINES}:_start_embedding_lookup", f"{_STAGE}:_start_embedding_lookup"),
    ),
    Adaptation(
        target=_KEYED_TENSOR,
        replace=_record_stream,
        why=_WHY,
        upstream="torchrec 1.8.0, sparse/jagged_tensor.py:3735, called by runtime_forwards.py:221",
        delete_when=_DELETE_WHEN,
        written_for={_KEYED_TENSOR: "ca9a8d86060365bd"},
    ),
)
