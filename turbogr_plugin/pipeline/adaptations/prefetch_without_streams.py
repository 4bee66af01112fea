"""PrefetchTrainPipelineSparseDist runs on CPU: what the prefetch stage hands to the forward is handed on there too.

There is nothing to prefetch (caches between host and device are a cuda feature of fbgemm), but the stage also moves a
batch's input from the distribution to the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

_UTILS = "torchrec.distributed.train_pipeline.utils:prefetch_embeddings"
_PIPELINES = "torchrec.distributed.train_pipeline.train_pipelines:prefetch_embeddings"


def _hand_on(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def prefetch_embeddings(
        context: Any,
        pipelined_modules: list[Any],
        device: Any,
        stream_context: Callable[..., Any],
        data_dist_stream: Any,
        forward_stream: Any,
    ) -> None:
        if device.type != "cpu" or data_dist_stream is not None:
            original(context, pipelined_modules, device, stream_context, data_dist_stream, forward_stream)
            return
        for module in pipelined_modules:
            name = module.forward.name
            dist_input = context.input_dist_tensors_requests.pop(name).wait()
            module.prefetch(ctx=context.module_contexts[name], dist_input=dist_input, forward_stream=None)
            context.module_input_post_prefetch[name] = dist_input
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)

    return prefetch_embeddings


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_UTILS,
        replace=_hand_on,
        why="without a stream the stage returns at once, and the forward then misses its input",
        upstream="torchrec 1.8.0, distributed/train_pipeline/utils.py:771",
        delete_when="the stage does its work without streams as well",
        written_for={_UTILS: "d52a8b0948f7f5cd"},
        also=(_PIPELINES,),
    ),
)
