"""Who holds what: planning of the embedding tables over ranks.

What a training script names is here; each is imported on first use, since it brings torch and torchrec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "turbogr_plugin.sharding":  # reached through the link at the root, which is for readers only
    raise ImportError(f"`{__name__}` is only a link for readers: import turbogr_plugin.sharding")

if TYPE_CHECKING:
    from turbogr_plugin.sharding.access_histogram import AccessHistogram as AccessHistogram
    from turbogr_plugin.sharding.batch_statistics import BatchStatistics as BatchStatistics
    from turbogr_plugin.sharding.hierarchical_model_parallel import (
        HierarchicalModelParallel as HierarchicalModelParallel,
    )
    from turbogr_plugin.sharding.hierarchical_plan import HierarchicalShardingPlan as HierarchicalShardingPlan
    from turbogr_plugin.sharding.hierarchical_planner import HierarchicalShardingPlanner as HierarchicalShardingPlanner
    from turbogr_plugin.sharding.topologies import cpu_topology as cpu_topology
    from turbogr_plugin.sharding.topologies import cuda_topology as cuda_topology
    from turbogr_plugin.sharding.topologies import npu_topology as npu_topology
    from turbogr_plugin.sharding.topologies import topology_from_file as topology_from_file

_MODULES = {
    "AccessHistogram": "access_histogram",
    "BatchStatistics": "batch_statistics",
    "HierarchicalModelParallel": "hierarchical_model_parallel",
    "HierarchicalShardingPlan": "hierarchical_plan",
    "HierarchicalShardingPlanner": "hierarchical_planner",
    "cpu_topology": "topologies",
    "cuda_topology": "topologies",
    "npu_topology": "topologies",
    "topology_from_file": "topologies",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
