"""What a collective has brought is recorded on npu for the stream that waits for it, as on cuda.

TorchRec starts a collective on one stream (in its fused pipeline that of the lookups) and waits for it on another. The
result has been allocated for the first, which could give its memory away while the second still reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import current_stream, record_stream

_WAIT = "torchrec.distributed.comm_ops:Request._wait_impl"


def _recorded(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def _wait_impl(self: Any) -> Any:
        arrived = self.tensor  # in the precision of the wire; `original` lets go of it
        result = original(self)
        for value in (result, *(arrived if isinstance(arrived, (list, tuple)) else (arrived,))):
            if isinstance(value, torch.Tensor) and value.device.type == "npu":
                record_stream(value, current_stream(value.device))
        return result

    return _wait_impl


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_WAIT,
        replace=_recorded,
        why="the memory of what a collective brought goes back to the stream that started it while another reads it",
        upstream="torchrec 1.8.0, distributed/comm_ops.py:166",
        delete_when="the result is recorded on every accelerator",
        written_for={_WAIT: "66b5c40a0fc6183b"},
    ),
)
