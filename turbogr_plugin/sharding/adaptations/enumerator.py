"""The planner's enumerator on NPUs: uneven memory per rank is HBM, and constraints that cannot be met are refused.

The refusal comes when the planner is made, on every rank. TorchRec would find the same while it plans, which rank 0
alone does and the others wait for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.sharding.adaptations.device_kernels import check_constraints

_INIT = "torchrec.distributed.planner.enumerators:EmbeddingEnumerator.__init__"


def _for_npu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any,
        topology: Any,
        batch_size: int,
        constraints: Mapping[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if topology.compute_device == "npu":
            check_constraints(constraints or {})
        original(self, topology, batch_size, constraints, *args, **kwargs)
        if topology.compute_device == "npu":
            custom = topology._custom_topology_data
            has_hbm = custom is not None and custom.has_data("hbm_cap")
            self._device_memory_sizes = custom.get_data("hbm_cap") if has_hbm else None

    return init


ADAPTATIONS = (
    Adaptation(
        target=_INIT,
        replace=_for_npu,
        why="rows of a table on npu are cut in the proportions of ddr_cap, and hbm_cap of each rank is ignored",
        upstream="torchrec 1.8.0, distributed/planner/enumerators.py:113",
        delete_when="TorchRec asks whether a device has HBM instead of listing names",
        written_for={_INIT: "f24d60a1adfc7efe"},
    ),
)
