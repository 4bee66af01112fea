"""`hccl` of the simulated npu: a torch.distributed backend that exchanges through gloo.

    dist.init_process_group("hccl")                  # or "cpu:gloo,npu:hccl"

The backend itself is csrc/process_group.cpp; there stand the order of streams that it keeps, and what it leaves out.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroupGloo, Store

NAME = "hccl"
_world_rank: int | None = None


def world_rank() -> int | None:
    """Rank of this process in the first group of `hccl` that it has joined, the world; None before."""
    return _world_rank


def register() -> None:
    """Makes `hccl` the backend of torch.distributed for npu tensors; does nothing the second time."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["npu"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    global _world_rank
    from turbogr_plugin.simnpu.simulation import native  # which imports this module

    if _world_rank is None:
        _world_rank = rank
    return native().hccl_over(ProcessGroupGloo(store, rank, size, timeout=timeout))
