from __future__ import annotations

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import CustomTopologyData, Topology

from tests.sharding.adaptations.planning import as_values, constraints, plan
from tests.stock import without
from turbogr_plugin.sharding.adaptations import enumerator

GB = 1 << 30
BY_HBM = {"hbm_cap": [3 * GB, GB, GB, GB]}
BOTH = {**BY_HBM, "ddr_cap": [GB, GB, GB, 3 * GB]}


def capacities(device: str, data: dict[str, list[int]]) -> list[int] | None:
    topology = Topology(4, device, custom_topology_data=CustomTopologyData(data, 4))
    found: list[int] | None = EmbeddingEnumerator(topology=topology, batch_size=8)._device_memory_sizes
    return found


def test_the_memory_of_each_npu_is_its_hbm_where_torchrec_takes_the_hosts() -> None:
    with without(enumerator.ADAPTATIONS):
        assert capacities("npu", BY_HBM) is None
        assert capacities("npu", BOTH) == BOTH["ddr_cap"]
    assert capacities("npu", BY_HBM) == capacities("npu", BOTH) == BY_HBM["hbm_cap"]
    assert capacities("npu", {"ddr_cap": BOTH["ddr_cap"]}) is None


def test_other_devices_keep_their_capacities() -> None:
    assert capacities("cuda", BOTH) == capacities("mtia", BOTH) == BOTH["hbm_cap"]
    assert capacities("cpu", BOTH) == BOTH["ddr_cap"]


def test_rows_are_cut_in_proportion_to_the_hbm_of_each_npu() -> None:
    wanted = constraints(sharding_types=["row_wise"])
    custom = CustomTopologyData(BY_HBM, 4)
    npu, cuda = (
        as_values(plan(device, world_size=4, constraints=wanted, custom_topology_data=custom))
        for device in ("npu", "cuda")
    )
    assert [size[0] for size, _ in npu["b0"]["shards"]] == [500_000, 166_666, 166_666, 166_668]
    assert {table: values["shards"] for table, values in npu.items()} == {
        table: values["shards"] for table, values in cuda.items()
    }
