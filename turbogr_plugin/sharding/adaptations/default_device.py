"""The device type where the caller names none: `npu` in a process that has one and no CUDA.

DistributedModelParallel without a device stays on CPU, as TorchRec documents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchrec.distributed.global_settings import get_propogate_device  # TorchRec's spelling

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import device_module

_TYPE = "torchrec.distributed.utils:get_device_type"
_SHARD = "torchrec.distributed.shard:_shard"
_MODULES = "torchrec.distributed.shard:_shard_modules"


def npu_is_available() -> bool:
    """Whether PyTorch's PrivateUse1 is an NPU and this process sees at least one."""
    backend = getattr(torch, "npu", None)
    return torch._C._get_privateuse1_backend_name() == "npu" and backend is not None and backend.is_available()


def _npu_before_cpu(original: Callable[[], str]) -> Callable[[], str]:
    @functools.wraps(original)
    def get_device_type() -> str:
        found = original()
        return "npu" if found == "cpu" and npu_is_available() else found

    return get_device_type


def _default_device(device: torch.device | None) -> torch.device | None:
    if device is None and not get_propogate_device() and not torch.cuda.is_available() and npu_is_available():
        return torch.device("npu", device_module(torch.device("npu")).current_device())
    return device


def _shard_on_npu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _shard(
        module: Any, plan: Any, env: Any = None, device: torch.device | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        return original(module, plan, env, _default_device(device), *args, **kwargs)

    return _shard


def _shard_modules_on_npu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _shard_modules(
        module: Any, env: Any = None, device: torch.device | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        return original(module, env, _default_device(device), *args, **kwargs)

    return _shard_modules


_WHY_SHARD = "without a device, modules are sharded onto the CPU of a host that has NPUs"
_UNTIL_SHARD = "TorchRec asks torch.accelerator instead of torch.cuda"

ADAPTATIONS = (
    Adaptation(
        target=_TYPE,
        also=(
            "torchrec.distributed.planner.planners:get_device_type",
            "torchrec.distributed.sharding_plan:get_device_type",
        ),
        replace=_npu_before_cpu,
        why="a planner without a topology plans for the CPU on a host that has NPUs",
        upstream="torchrec 1.8.0, distributed/utils.py:55, planner/planners.py:530, sharding_plan.py:952",
        delete_when="TorchRec asks torch.accelerator",
        written_for={_TYPE: "42fd26a0588afef8"},
    ),
    Adaptation(
        target=_SHARD,
        replace=_shard_on_npu,
        why=_WHY_SHARD,
        upstream="torchrec 1.8.0, distributed/shard.py:123",
        delete_when=_UNTIL_SHARD,
        written_for={_SHARD: "371630b49969db30"},
    ),
    Adaptation(
        target=_MODULES,
        replace=_shard_modules_on_npu,
        why=_WHY_SHARD,
        upstream="torchrec 1.8.0, distributed/shard.py:248",
        delete_when=_UNTIL_SHARD,
        written_for={_MODULES: "04fa3469496acb0b"},
    ),
)
