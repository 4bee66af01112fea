"""Plans with groups go to models that carry them out; the models themselves are tried in test_planned_on_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingPlan

from turbogr_plugin.sharding import HierarchicalShardingPlan
from turbogr_plugin.sharding.adaptations.grouped_plan import check_groups


def _model(kind: type) -> Any:
    """A model that nobody has initialised."""
    return kind.__new__(kind)


class _OfTheirOwn(DMPCollection):
    """A subclass, which is trusted to know what exact groups are."""


class _Group:
    def size(self) -> int:
        return 2


def _env() -> Any:
    env = ShardingEnv2D.__new__(ShardingEnv2D)
    env.sharding_pg = _Group()  # type: ignore[assignment]
    return env


def _grouped(**values: Any) -> HierarchicalShardingPlan:
    return HierarchicalShardingPlan(plan={}, **{"group_size": 2, "world_size": 4, **values})


@pytest.mark.parametrize(
    "plan", [None, ShardingPlan({}), _grouped(group_size=4)], ids=["no plan", "a plan of TorchRec", "one group"]
)
def test_plans_without_groups_pass(plan: Any) -> None:
    check_groups(plan, _model(DistributedModelParallel), None)


def test_groups_need_a_model_that_has_groups() -> None:
    with pytest.raises(ValueError, match="plan is for 2 groups of 2 ranks, DistributedModelParallel shards over all"):
        check_groups(_grouped(), _model(DistributedModelParallel), ShardingEnv(4, 0))


def test_averaging_models_are_given_plans_that_average() -> None:
    check_groups(_grouped(sync="average"), _model(DMPCollection), _env())
    with pytest.raises(ValueError, match="with sync 'exact', DMPCollection averages weights"):
        check_groups(_grouped(), _model(DMPCollection), _env())
    check_groups(_grouped(), _model(_OfTheirOwn), _env())


def test_groups_of_another_size_than_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="1024 groups of 4 ranks, _OfTheirOwn was given sharding_group_size 2"):
        check_groups(_grouped(group_size=4, world_size=4096), _model(_OfTheirOwn), _env())
