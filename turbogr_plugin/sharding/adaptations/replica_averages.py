"""DMPCollection averages replicas on CPU without a change that autograd sees, so that SemiSync runs with it there.

SemiSync has looked the next batch up when the tables are averaged, and autograd refuses that lookup's backward if the
version of a table has changed since. The averages of NCCL and HCCL leave the version as it is; gloo's divides in place
and changes it. The lookup's backward reads the table as it is then, which is what SemiSync means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, dtype

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.distributed.model_parallel:DMPCollection._allreduce_tensors"


def _unseen_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _allreduce_tensors(
        self: Any, ctx: Any, tensors_dict: dict[dtype, list[Tensor]], *args: Any, **kwargs: Any
    ) -> None:
        if self._device.type == "cpu":  # .data shares the memory, and not the version
            tensors_dict = {kind: [tensor.data for tensor in tensors] for kind, tensors in tensors_dict.items()}
        original(self, ctx, tensors_dict, *args, **kwargs)

    return _allreduce_tensors


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_unseen_on_cpu,
        why="SemiSync with DMPCollection raises 'modified by an inplace operation' on CPU",
        upstream="torchrec 1.8.0, distributed/model_parallel.py:1553; torch 2.13, ProcessGroupGloo's average",
        delete_when="gloo's average leaves the version of a tensor, as NCCL's does",
        written_for={_TARGET: "9ae2c3f59e4de452"},
    ),
)
