"""The planner's printed statistics: per cent of HBM that each NPU uses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from turbogr_plugin.backend.adaptation import Adaptation

_LOG = "torchrec.distributed.planner.stats:EmbeddingStats._log_rank_mem_usage_and_perf"


def _with_hbm(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def _log_rank_mem_usage_and_perf(self: Any, topology: Any, *args: Any, **kwargs: Any) -> list[str]:
        if topology.compute_device == "npu":
            topology = copy.copy(topology)
            topology._compute_device = "mtia"
        return original(self, topology, *args, **kwargs)

    return _log_rank_mem_usage_and_perf


ADAPTATIONS = (
    Adaptation(
        target=_LOG,
        replace=_with_hbm,
        why="the statistics print 0% of HBM used for every npu, whatever lies there",
        upstream="torchrec 1.8.0, distributed/planner/stats.py:817",
        delete_when="TorchRec asks whether a device has HBM instead of listing names",
        written_for={_LOG: "138e93459cee479b"},
    ),
)
