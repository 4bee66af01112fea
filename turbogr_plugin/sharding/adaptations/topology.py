"""Topologies of NPUs, and the configurations that a topology can be made from.

Topology is adapted last of all that a planner needs, and only if every source behind the others is the expected one:
a planner that knows `npu` here and nowhere else would take a table there for zero bytes.

Memory per NPU is what the caller gives, else TorchRec's HBM_CAP of 32 GiB as for every accelerator: the device that
happens to sit in the planning process must not decide the plan of a cluster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.sharding.adaptations import (
    device_kernels,
    enumerator,
    kernel_bandwidth,
    placement,
    sharding_types,
    storage_estimate,
    storage_reservation,
)

_TYPES = "torchrec.distributed.planner.types"

#: What an estimate, a plan or a placement for `npu` rests on.
_PLANNER = (
    *storage_estimate.ADAPTATIONS,
    *storage_reservation.ADAPTATIONS,
    *kernel_bandwidth.ADAPTATIONS,
    *enumerator.ADAPTATIONS,
    *device_kernels.ADAPTATIONS,
    *sharding_types.ADAPTATIONS,
    *placement.ADAPTATIONS,
)


def _with_npu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, world_size: int, compute_device: str, *args: Any, **kwargs: Any) -> None:
        original(self, world_size, "mtia" if compute_device == "npu" else compute_device, *args, **kwargs)
        self._compute_device = compute_device

    return init


def _checked_as_accelerator(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def get_validation_issues(self: Any, compute_device: str | None = None) -> list[str]:
        return original(self, "mtia" if compute_device == "npu" else compute_device)

    return get_validation_issues


def _valid_for_npu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate(self: Any) -> None:
        if self.compute_device != "npu":  # the device is all that is validated
            original(self)

    return validate


ADAPTATIONS = (
    Adaptation(
        target=f"{_TYPES}:HardwareConfig.get_validation_issues",
        replace=_checked_as_accelerator,
        why="an HBM capacity of 0 passes unnoticed for npu",
        upstream="torchrec 1.8.0, distributed/planner/types.py:497",
        delete_when="TorchRec asks whether a device has HBM instead of listing names",
        written_for={f"{_TYPES}:HardwareConfig.get_validation_issues": "c0440b40a9e6a4dd"},
    ),
    Adaptation(
        target=f"{_TYPES}:KernelConfig.validate",
        replace=_valid_for_npu,
        why="TopologyFactory refuses npu: 'compute_device must be one of {cuda, mtia, cpu}'",
        upstream="torchrec 1.8.0, distributed/planner/types.py:692",
        delete_when="TorchRec validates against the devices that this torch knows",
        written_for={f"{_TYPES}:KernelConfig.validate": "9c96d7b68985b8ca"},
    ),
    Adaptation(
        target=f"{_TYPES}:Topology.__init__",
        replace=_with_npu,
        why="Topology refuses npu: 'unsupported compute device npu'",
        upstream="torchrec 1.8.0, distributed/planner/types.py:986 and 1000",
        delete_when="TorchRec takes any device type and asks whether it has HBM",
        written_for={f"{_TYPES}:Topology.__init__": "6c54f9ff8cbd6ca9"}
        | {source: expected for each in _PLANNER for source, expected in each.written_for.items()},
    ),
)
