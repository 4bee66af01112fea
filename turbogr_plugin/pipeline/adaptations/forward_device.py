"""A pipelined forward without a stream works on its module's device and not on cuda.

That is every one on CPU, and those of TrainPipelineSparseDistLite on npu.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation

_INIT = "torchrec.distributed.train_pipeline.runtime_forwards:BaseForward.__init__"


def _on_the_modules_device(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._stream is None:
            device = getattr(self._module, "_device", None)
            if isinstance(device, torch.device) and device.type in ("cpu", "npu"):
                self._device = device

    return __init__


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_INIT,
        replace=_on_the_modules_device,
        why='without a stream the device is "cuda", and asking it for its current stream raises',
        upstream="torchrec 1.8.0, distributed/train_pipeline/runtime_forwards.py:68",
        delete_when="the forward takes the device of its module",
        written_for={_INIT: "6f02c28b66ac9201"},
    ),
)
