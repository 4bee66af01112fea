"""Estimated bytes of a shard: those on an NPU are HBM as on CUDA, and an unknown device has no estimate at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

_CALCULATE = "torchrec.distributed.planner.shard_estimators:calculate_shard_storages"
_USAGE = "torchrec.distributed.types:compute_storage_usage"
_BASE_USAGE = "torchrec.distributed.types:ModuleSharder.storage_usage"

_KNOWN = ("cpu", "cuda", "mtia", "npu")


def _never_zero(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def calculate_shard_storages(
        sharder_data: Any, sharding_type: str, tensor: Any, compute_device: str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        if compute_device not in _KNOWN:
            raise ValueError(
                f"compute_device {compute_device!r}: the memory of a table is known for {', '.join(_KNOWN)} only"
            )
        # Not "mtia": TorchRec puts quantised tables of that one into host memory.
        estimated_as = "cuda" if compute_device == "npu" else compute_device
        return original(sharder_data, sharding_type, tensor, estimated_as, *args, **kwargs)

    return calculate_shard_storages


def _hbm_of_npu(original: Callable[..., dict[str, int]]) -> Callable[..., dict[str, int]]:
    @functools.wraps(original)
    def storage_usage(self: Any, tensor: Any, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        return original(self, tensor, "cuda" if compute_device_type == "npu" else compute_device_type, compute_kernel)

    return storage_usage


ADAPTATIONS = (
    Adaptation(
        target=_CALCULATE,
        replace=_never_zero,
        why="every table on a device with an unknown name is estimated as zero bytes, so that anything fits anywhere",
        upstream="torchrec 1.8.0, distributed/planner/shard_estimators.py:448 and 460",
        delete_when="TorchRec asks whether a device has HBM, and raises for one that it does not know",
        written_for={_CALCULATE: "df15280c8efacce4", _USAGE: "a1fb82451c33033d"},
    ),
    Adaptation(
        target=_BASE_USAGE,
        replace=_hbm_of_npu,
        why="a sharder of one's own that does not override storage_usage dies of a bare assertion on npu",
        upstream="torchrec 1.8.0, distributed/types.py:1491",
        delete_when="TorchRec asks whether a device has HBM instead of listing names",
        written_for={_BASE_USAGE: "eeed189be0c2c000"},
    ),
)
