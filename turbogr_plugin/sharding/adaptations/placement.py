"""Where a shard lies: the rank and the device's index on its host, as for CUDA.

A plan can be made where no NPU is: PyTorch then has no name for it, and writes "privateuseone:1" for what is "npu:1" in
a process with a backend. Both are the same device, in pickles too. Naming it here instead would make every call of
`torch.accelerator` in a process without NPU raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from turbogr_plugin.backend.adaptation import Adaptation

_PLAN = "torchrec.distributed.sharding_plan:placement"
_PLANNERS = "torchrec.distributed.planner.planners:placement"
_UTILS = "torchrec.distributed.planner.utils:placement"


def _with_index(original: Callable[[str, int, int], str]) -> Callable[[str, int, int], str]:
    @functools.wraps(original)
    def placement(compute_device: str, rank: int, local_size: int) -> str:
        if compute_device != "npu":
            return original(compute_device, rank, local_size)
        return f"rank:{rank}/{torch._C._get_privateuse1_backend_name()}:{rank % local_size}"

    return placement


_WHY = "shards on npu are placed without an index (rank:3/npu), which differs from the device of their tensors"
_UNTIL = "TorchRec gives an index to every device but cpu"

ADAPTATIONS = (
    Adaptation(
        target=_PLAN,
        also=(_PLANNERS,),
        replace=_with_index,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/sharding_plan.py:78",
        delete_when=_UNTIL,
        written_for={_PLAN: "db0bd501de0020cd"},
    ),
    Adaptation(
        target=_UTILS,
        replace=_with_index,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/planner/utils.py:187",
        delete_when=_UNTIL,
        written_for={_UTILS: "40910335f552c3c9"},
    ),
)
