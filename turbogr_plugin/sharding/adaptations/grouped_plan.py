"""A plan with groups of ranks is refused by classes that would carry it out as a plan of all ranks.

A HierarchicalShardingPlan is a ShardingPlan, so it goes wherever one goes. Stock DistributedModelParallel would put all
tables on the ranks of the first group and leave the others without any, which then hang or fail deep in a collective.
Stock DMPCollection would average weights where the plan says that gradients are summed. Both are refused on every rank,
before any collective. A subclass of DMPCollection is trusted to do as the plan says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingEnv2D

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.sharding.hierarchical_plan import HierarchicalShardingPlan

_DMP = "torchrec.distributed.model_parallel:DistributedModelParallel.__init__"


def check_groups(plan: Any, owner: Any, env: Any) -> None:
    """Refuses a plan with several groups where it would not be carried out as such.

    Args:
        plan: any sharding plan, or None.
        owner: the model that is to carry it out.
        env: its sharding environment, or None.

    Raises:
        ValueError: the owner shards over all ranks, over groups of another size, or averages where sums are planned.
    """
    if not isinstance(plan, HierarchicalShardingPlan) or plan.groups == 1:
        return
    planned = f"plan is for {plan.groups} groups of {plan.group_size} ranks"
    name = type(owner).__name__
    way_out = (
        "use turbogr_plugin.sharding.HierarchicalModelParallel, or plan with "
        f"HierarchicalShardingPlanner(group_size={plan.world_size})"
    )
    if not isinstance(owner, DMPCollection):
        raise ValueError(f"{planned}, {name} shards over all ranks: {way_out}")
    size = env.sharding_pg.size() if isinstance(env, ShardingEnv2D) else None
    if size != plan.group_size:
        raise ValueError(f"{planned}, {name} was given sharding_group_size {size}")
    if type(owner) is DMPCollection and plan.sync == "exact":
        raise ValueError(f"{planned} with sync 'exact', {name} averages weights: {way_out} or sync='average'")


def _without_groups(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any, module: Any, env: Any = None, device: Any = None, plan: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        check_groups(plan, self, env)
        original(self, module, env, device, plan, *args, **kwargs)

    return init


ADAPTATIONS = (
    Adaptation(
        target=_DMP,
        replace=_without_groups,
        why="a plan for groups of ranks is carried out on the first group alone, and the other ranks hang or fail",
        upstream="torchrec 1.8.0, distributed/model_parallel.py:297",
        delete_when="TorchRec's plans say how many ranks they are for, and are checked",
        written_for={_DMP: "3f54fa67e8c35849"},
    ),
)
