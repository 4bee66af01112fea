"""DeviceToHostTensorAwaitable waits for an npu event where the tensor is on npu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.memory import copy_to_host

_INIT = "torchrec.distributed.types:DeviceToHostTensorAwaitable.__init__"
_WAIT = "torchrec.distributed.types:DeviceToHostTensorAwaitable._wait_impl"


def _with_npu_event(original: Callable[[Any, torch.Tensor], None]) -> Callable[[Any, torch.Tensor], None]:
    from torchrec.distributed.types import LazyAwaitable  # the host is there once its parts are replaced

    @functools.wraps(original)
    def __init__(self: Any, tensor_on_device: torch.Tensor) -> None:
        if tensor_on_device.device.type != "npu":
            original(self, tensor_on_device)
            return
        LazyAwaitable.__init__(self)
        copy = copy_to_host(tensor_on_device)
        # The names that _wait_impl reads; the source has to live until the copy is over.
        self._tensor, self._event, self._source = copy.result, copy.event, tensor_on_device

    return __init__


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_INIT,
        replace=_with_npu_event,
        why="it makes a torch.cuda.Event, which raises where torch has no CUDA",
        upstream="torchrec 1.8.0, distributed/types.py:519",
        delete_when="the event comes from the module of the tensor's device",
        written_for={_INIT: "a6e5428bebc5c3e6", _WAIT: "11494fb36bb836a4"},
    ),
)
