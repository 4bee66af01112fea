"""PrefetchTrainPipelineSparseDist with execute_all_batches=False fills itself once, on npu and CPU.

Two batches are in flight when a step begins, and TorchRec asks for three to see that the pipeline is filled: every step
fills it again, distributes batches a second time, and draws two batches too many from the loader.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.distributed.train_pipeline.train_pipelines:PrefetchTrainPipelineSparseDist.fill_pipeline"
_IN_FLIGHT = 2  # batches that fill_pipeline leaves


def _once(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def fill_pipeline(self: Any, dataloader_iter: Any) -> None:
        if self._device.type not in ("cpu", "npu") or len(self.batches) < _IN_FLIGHT:
            original(self, dataloader_iter)

    return fill_pipeline


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_once,
        why="without execute_all_batches each step distributes batches twice and training ends two batches early",
        upstream="torchrec 1.8.0, distributed/train_pipeline/train_pipelines.py:2107; "
        "https://github.com/meta-pytorch/torchrec/pull/4503",
        delete_when="the pull request is in the oldest TorchRec that is supported",
        written_for={_TARGET: "8087fbde5ba1efc2"},
    ),
)
