"""The whole planner: on npu it plans as for CUDA, and for the devices that TorchRec knows as without the plugin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.distributed.planner.types import PlannerError

from tests.sharding.adaptations.planning import as_values, constraints, plan
from tests.stock import without
from turbogr_plugin.sharding.adaptations import ADAPTATIONS

ROOMY = {"hbm_cap": 32 << 30}
TIGHT = {"hbm_cap": 120 << 20, "world_size": 4}  # the largest table takes 256 MB


@pytest.mark.parametrize("figures", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_a_plan_for_npu_is_the_plan_for_cuda_but_for_the_type_of_its_placements(figures: dict[str, Any]) -> None:
    kernels = constraints(compute_kernels=["fused", "dense"])
    cuda = as_values(plan("cuda", constraints=kernels, **figures))
    npu = as_values(plan("npu", **figures))
    name = torch.device("privateuseone").type  # "npu" in a process where a backend has named it
    assert npu == {table: {**values, "devices": [name] if values["devices"] else []} for table, values in cuda.items()}


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_a_plan_for_npu_is_the_plan_for_mtia_where_both_offer_the_sharding_type(kind: str) -> None:
    wanted = constraints(sharding_types=[kind])
    mtia, npu = (as_values(plan(device, constraints=wanted)) for device in ("mtia", "npu"))
    assert {values["type"] for values in npu.values()} == {kind}
    name = torch.device("privateuseone").type
    assert npu == {table: {**values, "devices": [name]} for table, values in mtia.items()}


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "grid_shard", "table_column_wise", "data_parallel"])
def test_torchrecs_own_sharders_offer_every_sharding_type_for_bags_on_npu(kind: str) -> None:
    wanted = constraints(sharding_types=[kind])
    wanted["s0"].sharding_types = ["row_wise"]
    found = as_values(plan("npu", constraints=wanted))
    assert {found[bag]["type"] for bag in ("b0", "b1")} == {kind}


def test_each_shard_on_npu_lies_on_the_device_of_its_local_rank() -> None:
    found = as_values(plan("npu", constraints=constraints(sharding_types=["row_wise"])))
    for values in found.values():
        assert values["places"] == [(rank, rank % 4) for rank in range(8)]


@pytest.mark.parametrize("device", ["cpu", "cuda", "mtia"])
def test_plans_for_other_devices_are_those_of_torchrec_alone(device: str) -> None:
    with without(ADAPTATIONS):
        expected = as_values(plan(device))
    assert as_values(plan(device)) == expected


def test_tables_that_do_not_fit_are_refused_on_npu_as_on_cuda() -> None:
    kernels = constraints(compute_kernels=["fused", "dense"])
    for device in ("cuda", "npu"):
        with pytest.raises(PlannerError, match="insufficient storage"):
            plan(device, constraints=kernels, world_size=2, hbm_cap=40 << 20)
