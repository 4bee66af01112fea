"""A result that is there at once, without a collective, is recorded on npu for the stream that takes it.

TorchRec wraps it in `NoWait`: embeddings of a data-parallel table, or of an all-to-all among one rank (as across hosts
where there is one). In the fused pipeline they are computed on the stream of the lookups and read on another, so that
their memory could be given away while it is read. What comes from a collective is recorded in collective_results.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import current_stream, record_stream

_TARGET = "torchrec.distributed.types:NoWait._wait_impl"


def _recorded(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def _wait_impl(self: Any) -> Any:
        result = original(self)
        if isinstance(result, torch.Tensor):
            device = result.device
        elif isinstance(result, KeyedJaggedTensor):
            device = result.device()
        else:
            return result
        if device.type == "npu":
            record_stream(result, current_stream(device))
        return result

    return _wait_impl


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_recorded,
        why="the memory of a lookup's result goes back to the lookup's stream while the forward reads it on another",
        upstream="torchrec 1.8.0, distributed/types.py:392",
        delete_when="the pipelines record what they take from another stream",
        written_for={_TARGET: "c54181bd2ddd276f"},
    ),
)
