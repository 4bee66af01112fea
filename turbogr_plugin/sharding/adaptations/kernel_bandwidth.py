"""Bytes per millisecond that a table kernel on an NPU reads, in the planner's cost model: those of HBM.

Left out: measured figures. A topology that knows its machine gives `hbm_mem_bw`, or an estimator of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

_LOOKUP = "torchrec.distributed.planner.constants:kernel_bw_lookup"
_IMPORTED = "torchrec.distributed.planner.estimator.types:kernel_bw_lookup"


def _bandwidth_of_npu(original: Callable[..., float | None]) -> Callable[..., float | None]:
    @functools.wraps(original)
    def kernel_bw_lookup(compute_device: str, *args: Any, **kwargs: Any) -> float | None:
        # "mtia" has dense, fused and quant at the speed of HBM, and none of the kernels that an NPU lacks.
        return original("mtia" if compute_device == "npu" else compute_device, *args, **kwargs)

    return kernel_bw_lookup


ADAPTATIONS = (
    Adaptation(
        target=_LOOKUP,
        also=(_IMPORTED,),
        replace=_bandwidth_of_npu,
        why="the cost model refuses every kernel on npu, dense ones too: 'unsupported compute kernel'",
        upstream="torchrec 1.8.0, distributed/planner/constants.py:54, estimator/types.py:470",
        delete_when="TorchRec lets a device bring its own bandwidths",
        written_for={_LOOKUP: "e89909b49747e80f"},
    ),
)
