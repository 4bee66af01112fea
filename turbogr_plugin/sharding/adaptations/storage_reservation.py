"""Memory set aside for the dense part and the input batches: on an NPU it comes out of HBM.

Left out: the reservation classes themselves. They are the user's choice, and all of them call these two.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

_MODULE = "torchrec.distributed.planner.storage_reservations"


def _from_hbm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reserve(topology: Any, *args: Any, **kwargs: Any) -> Any:
        if topology.compute_device == "npu":
            topology = copy.copy(topology)  # shallow: what is reserved is taken off the devices of the caller's
            topology._compute_device = "mtia"
        return original(topology, *args, **kwargs)

    return reserve


ADAPTATIONS = (
    Adaptation(
        target=f"{_MODULE}:_reserve_dense_storage",
        replace=_from_hbm,
        why="nothing is reserved for the dense part of a model on npu, and tables fill the memory that it needs",
        upstream="torchrec 1.8.0, distributed/planner/storage_reservations.py:93",
        delete_when="TorchRec asks whether a device has HBM instead of listing names",
        written_for={f"{_MODULE}:_reserve_dense_storage": "4e3dfb177bb9fda9"},
    ),
    Adaptation(
        target=f"{_MODULE}:_get_kjt_storage",
        replace=_from_hbm,
        why="nothing is reserved for the input batches of a model on npu",
        upstream="torchrec 1.8.0, distributed/planner/storage_reservations.py:112",
        delete_when="TorchRec asks whether a device has HBM instead of listing names",
        written_for={f"{_MODULE}:_get_kjt_storage": "6a71537be9f9a612"},
    ),
)
