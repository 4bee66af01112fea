"""Compute kernels on an NPU: dense and fused. Tables in host memory, on SSD or behind a cache are refused by name.

An NPU has no unified memory that fbgemm could use, and its key-value tables are CUDA code. Where a user allows such a
kernel beside one that is there, the planner takes the latter; where nothing else is allowed, it says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

#: "quant" can be planned; whether a quantised table runs is up to its operator.
NPU_KERNELS = ("dense", "fused", "quant")

_FILTER = "torchrec.distributed.planner.enumerators:EmbeddingEnumerator._filter_compute_kernels"


def refusal(table: str, kernels: list[str]) -> ValueError:
    """What is raised where only `kernels` may hold a table on an NPU."""
    return ValueError(
        f"table {table!r}: compute kernel {', '.join(map(repr, kernels))} does not exist on npu, which has no unified "
        f"memory and no key-value tables: use 'fused', or 'dense' for a data-parallel table"
    )


def check_constraints(constraints: Mapping[str, Any]) -> None:
    """Raises ValueError where a table's ParameterConstraints leave no kernel that an NPU has."""
    for table, constraint in constraints.items():
        kernels = constraint.compute_kernels
        if kernels and not set(kernels) & set(NPU_KERNELS):
            raise refusal(table, kernels)
        if constraint.use_virtual_table:
            raise ValueError(f"table {table!r}: use_virtual_table needs a key-value table, which npu does not have")


def _of_npu(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def _filter_compute_kernels(
        self: Any, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        if self._compute_device != "npu":
            return original(self, name, allowed_compute_kernels, sharding_type)
        there = [kernel for kernel in allowed_compute_kernels if kernel in NPU_KERNELS]
        return original(self, name, there, sharding_type)

    return _filter_compute_kernels


ADAPTATIONS = (
    Adaptation(
        target=_FILTER,
        replace=_of_npu,
        why="a sharder that offers UVM or key-value kernels on every device has them planned for npu",
        upstream="torchrec 1.8.0, distributed/planner/enumerators.py:421, mc_embedding_modules.py:393",
        delete_when="TorchRec's sharders offer to a device only what it has",
        written_for={_FILTER: "0cdedf99c9f2e8d8"},
    ),
)
