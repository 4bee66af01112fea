"""DMPCollection on CPU and npu: TorchRec refuses the one and the other; here replicas become their mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import (
    DMPCollectionConfig,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingStrategy,
)

from tests.npu.ranks import Call, RankPool
from tests.stock import without
from turbogr_plugin.sharding.adaptations import dmp_collection

RUN = "tests.sharding.adaptations.on_ranks:replicas"

#: device, sharding type, optimizer, groups of neighbouring ranks, optimizer states per table shard
CASES = [
    ("cpu", "row_wise", "EXACT_ROWWISE_ADAGRAD", True, 1),
    ("cpu", "column_wise", "EXACT_SGD", False, 0),
    ("npu", "row_wise", "ADAM", True, 2),
    ("npu", "row_wise", "EXACT_ADAGRAD", False, 1),
    ("npu", "column_wise", "ADAM", False, 2),
    ("npu", "table_wise", "EXACT_SGD", True, 0),
]


@pytest.mark.timeout(200)
def test_replicas_become_their_mean_on_every_device_whatever_the_optimizer(ranks: RankPool) -> None:
    calls = [
        Call(RUN, {"device_type": device, "kind": kind, "optimizer": optimizer, "contiguous": contiguous}, world_size=4)
        for device, kind, optimizer, contiguous, _ in CASES
    ]
    for case, outcome in zip(CASES, ranks.run(calls, timeout=180), strict=True):
        device, kind, _, contiguous, states = case
        for rank, found in enumerate(outcome.result()):
            assert found["replicas"] == (
                [rank % 2, rank % 2 + 2] if contiguous else [rank - rank % 2, rank - rank % 2 + 1]
            )
            assert found["from mean"] < 1e-6, case
            shards = 2 if kind != "table_wise" else 1
            assert found["states"] == states * shards, case
            place = f"rank:{rank}/cpu" if device == "cpu" else f"rank:{rank}/npu:{rank % 2}"
            assert found["places"] == [place], case
        assert max(found["apart"] for found in outcome.values) > 0.01, case
        if states:
            assert max(found["states apart"] for found in outcome.values) > 0.01, case


@pytest.mark.timeout(100)
def test_torchrec_alone_knows_no_state_of_adam(ranks: RankPool) -> None:
    arguments = {"device_type": "npu", "kind": "row_wise", "optimizer": "ADAM", "contiguous": True, "stock": True}
    (outcome,) = ranks.run([Call(RUN, arguments, world_size=4)])
    assert all("KeyError: 'sum'" in error for error in outcome.errors), outcome.error


@pytest.mark.parametrize("device", ["cpu", "privateuseone:0"])
def test_torchrec_alone_refuses_every_device_but_cuda_and_mtia(device: str) -> None:
    def construct() -> None:
        DMPCollection(
            torch.nn.Linear(1, 1),
            torch.device(device),
            plan=None,
            world_size=2,
            sharding_group_size=1,
            global_pg=None,
        )

    with without(dmp_collection.ADAPTATIONS), pytest.raises(AssertionError, match="only supports CUDA or MTIA"):
        construct()


def test_shards_on_cpu_are_placed_without_the_index_that_torchrec_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_parallel, "get_local_size", lambda: 4)

    def remapped(device: str, contiguous: bool) -> list[str]:
        rows = [ShardMetadata([rank, 0], [1, 8], f"rank:{rank}/{device}") for rank in range(2)]
        spec = EnumerableShardingSpec(rows)
        sharding = ParameterSharding("row_wise", "fused", ranks=[0, 1], sharding_spec=spec)
        plan = ShardingPlan({"tables": EmbeddingModuleShardingPlan(t=sharding)})
        collection = DMPCollection.__new__(DMPCollection)
        object.__setattr__(collection, "_device", torch.device(device))
        collection._remap_sharding_plan(plan, 3, 2, 2, use_inter_host_allreduce=contiguous)
        assert sharding.ranks == ([2, 3] if contiguous else [1, 3])
        return [str(shard.placement) for shard in spec.shards]

    with without(dmp_collection.ADAPTATIONS):
        assert all(":" in place.partition("/")[2] for place in remapped("cpu", False))
        on_cuda = remapped("cuda", False)
    assert remapped("cpu", False) == ["rank:1/cpu", "rank:3/cpu"]
    assert remapped("cpu", True) == ["rank:2/cpu", "rank:3/cpu"]
    assert remapped("cuda", False) == on_cuda


def plan_of(ranks: list[int]) -> ShardingPlan:
    sharding = ParameterSharding(sharding_type="row_wise", compute_kernel="fused", ranks=ranks)
    return ShardingPlan({"tables": EmbeddingModuleShardingPlan(t=sharding)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sharding_group_size": 3}, "sharding_group_size 3 does not divide world_size 4"),
        ({"sharding_group_size": 0}, "sharding_group_size 0 does not divide world_size 4"),
        ({"sharding_strategy": ShardingStrategy.FULLY_SHARDED}, "FULLY_SHARDED needs CUDA, the device is cpu"),
        ({"use_sharded_relay": True}, "use_sharded_relay needs CUDA, the device is cpu"),
        ({"plan": plan_of([0, 1, 2, 3])}, r"table 't': the plan names rank 3, a group has 2.*Topology\(world_size=2\)"),
        (
            {"submodule_configs": [DMPCollectionConfig(torch.nn.Linear, plan_of([0]), sharding_group_size=8)]},
            "sharding_group_size 8 does not divide world_size 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_group_is_made(changed: dict[str, Any], message: str) -> None:
    fitting = {"plan": plan_of([0, 1]), "world_size": 4, "sharding_group_size": 2, "global_pg": None}
    with pytest.raises(ValueError, match=message):
        DMPCollection(torch.nn.Linear(1, 1), torch.device("cpu"), **{**fitting, **changed})


def test_other_devices_are_still_refused() -> None:
    with pytest.raises(AssertionError, match="only supports CUDA or MTIA"):
        DMPCollection(torch.nn.Linear(1, 1), torch.device("xpu:0"), None, 2, 1, None)
