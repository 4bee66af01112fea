"""What the planner chooses, says and refuses."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from tests.sharding.planned import SHARDERS, Tables, planner, shardings
from turbogr_plugin.sharding import (
    AccessHistogram,
    BatchStatistics,
    HierarchicalShardingPlan,
    cpu_topology,
    npu_topology,
)
from turbogr_plugin.sharding.plan_report import sent_over_link
from turbogr_plugin.sharding.scale_prediction import kuairand_items

ROW_WISE = {"item": ParameterConstraints(sharding_types=["row_wise"])}
GB = 1_000_000_000
GIB = 1 << 30


def _items(at_least: int, lookups: int, **arguments: Any) -> HierarchicalShardingPlan:
    """Plans KuaiRand's items with so many exposures, dim 128, `lookups` per rank, on two hosts of two ranks."""
    access = kuairand_items(at_least)
    topology = cpu_topology(ranks_per_node=2, nodes=2, memory_bytes=64 * GB, intra=1e9, inter=100e6 / 8 / 2)
    statistics = BatchStatistics(lengths={"f_item": lookups / 8}, access={"item": access})
    found = planner(
        topology,
        batch_size=8,
        batch_statistics=statistics,
        constraints=ROW_WISE,
        optimizer="EXACT_ROWWISE_ADAGRAD",
        **arguments,
    )
    return found.plan(Tables({"item": (access.rows, 128)}), SHARDERS)


def test_groups_are_chosen_where_ids_repeat() -> None:
    plan = _items(1000, 8_192)
    assert isinstance(plan, ShardingPlan)
    assert (plan.group_size, plan.groups, plan.world_size, plan.sync) == (2, 2, 4, "exact")
    assert shardings(plan)["item"].ranks == [0, 1]
    assert plan.report is not None
    by_size = {candidate.group_size: candidate for candidate in plan.report.candidates}
    # u = 0.65 in groups of two: a third of the bytes between hosts is saved, 1 - u.
    saved = 1 - by_size[2].between_domains_bytes / by_size[4].between_domains_bytes
    assert saved == pytest.approx(0.35, abs=0.01)
    assert by_size[2].algorithms == {"all_gather": 1}
    assert by_size[2].prediction is not None
    assert by_size[4].prediction is not None
    assert by_size[2].prediction.step < 0.75 * by_size[4].prediction.step


def test_groups_are_not_chosen_for_bytes_that_they_do_not_save_and_the_plan_says_so() -> None:
    plan = _items(1, 4_096)
    assert plan.group_size == 4
    assert plan.report is not None
    by_size = {candidate.group_size: candidate for candidate in plan.report.candidates}
    assert by_size[4].verdict == "chosen"
    assert by_size[2].verdict.startswith(("slower by", "saves"))
    assert "MB per rank between fast domains" in by_size[2].verdict


def test_a_narrow_wire_makes_groups_pay_where_fp32_does_not() -> None:
    assert _items(20, 8_192).group_size == 4
    assert _items(20, 8_192, wire_dtype=torch.float16).group_size == 2


def test_minimum_gain_is_asked_of_every_smaller_group() -> None:
    assert _items(1000, 8_192, minimum_gain=0.9).group_size == 4


def test_the_report_prints_with_the_plan() -> None:
    text = str(_items(1000, 8_192))
    assert "4 ranks in 2 group(s) of 2, sync exact" in text
    assert "row_wise" in text
    for part in ("GB/rank", "all-to-all", "exchange", "step", "MB out", "     2 x 2     chosen", "note: latency"):
        assert part in text, part


def test_groups_must_hold_all_tables_and_the_smallest_that_does_is_named() -> None:
    # 32 GB of rows and state on ranks of 6 GB: groups of 8 hold 4 GB each.
    topology = npu_topology("atlas-800t-a2", nodes=2, memory_bytes=6 * GB)
    module = Tables({"t": (62_500_000, 128)})
    plan = planner(topology, batch_size=8).plan(module, SHARDERS)
    assert plan.report is not None
    fits = {candidate.group_size: candidate.fits for candidate in plan.report.candidates}
    assert fits == {16: True, 8: True, 4: False, 2: False, 1: False}
    message = re.escape("no plan for 4 group(s) of 4 ranks") + "(.|\n)*" + re.escape("on each of ranks 0 to 3")
    with pytest.raises(PlannerError, match=message + "(.|\n)*smallest group that fits is 8") as caught:
        planner(topology, batch_size=8, group_size=4).plan(module, SHARDERS)
    assert "missing: 2" in str(caught.value)


def test_a_model_that_fits_nowhere_says_what_would_do() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1, memory_bytes=GB)
    with pytest.raises(PlannerError) as caught:
        planner(topology, batch_size=8).plan(Tables({"t": (62_500_000, 128)}), SHARDERS)
    text = str(caught.value)
    assert "no group fits: with all 8 ranks in one group 3 GB are missing per rank; about 40 ranks" in text
    assert "missing: 3 GB on each of ranks 0 to 7" in text


def test_the_reservation_optimizer_and_activations_take_memory_from_tables() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=2, memory_bytes=10 * GB)
    module = Tables({"t": (62_500_000, 128)})

    def smallest(**arguments: Any) -> int:
        plan = planner(topology, batch_size=8, **arguments).plan(module, SHARDERS)
        assert plan.report is not None
        return min(candidate.group_size for candidate in plan.report.candidates if candidate.fits)

    assert smallest() == 4
    assert smallest(storage_reservation=FixedPercentageStorageReservation(0.25)) == 8
    assert smallest(optimizer="ADAM") == 16
    assert smallest(activation_bytes=3 * GB) == 8


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise", "table_row_wise", "grid_shard"])
def test_constraints_are_kept(kind: str) -> None:
    topology = npu_topology("atlas-800t-a2", nodes=2)
    wanted = {"b": ParameterConstraints(sharding_types=[kind], min_partition=32)}
    plan = planner(topology, group_size=16, constraints=wanted).plan(Tables(bags={"b": (10_000, 128)}), SHARDERS)
    found = shardings(plan)["b"]
    assert found.sharding_type == kind
    assert len(found.ranks) == {"row_wise": 16, "table_wise": 1, "column_wise": 4, "table_row_wise": 8}.get(kind, 32)
    assert plan.node_group_size == (8 if kind in ("table_row_wise", "grid_shard") else None)


def test_tables_by_host_stay_on_a_host_where_fast_links_join_several() -> None:
    topology = npu_topology("atlas-900-a3", nodes=2)  # one pod
    wanted = {"b": ParameterConstraints(sharding_types=["table_row_wise"])}
    plan = planner(topology, constraints=wanted, group_size=32).plan(Tables(bags={"b": (10_000, 128)}), SHARDERS)
    assert shardings(plan)["b"].ranks in (list(range(16)), list(range(16, 32)))
    assert plan.node_group_size == 16


def test_shards_cover_each_table_once_and_lie_on_the_ranks_of_one_group() -> None:
    rng = np.random.default_rng(11)
    rows = {f"s{i}": (int(rng.integers(50, 5_000)), 64) for i in range(6)}
    bags = {f"b{i}": (int(rng.integers(50, 5_000)), 32) for i in range(6)}
    topology = npu_topology("atlas-800t-a2", nodes=2)
    for size in (16, 8, 4, 2, 1):
        plan = planner(topology, group_size=size).plan(Tables(rows, bags), SHARDERS)
        assert plan.group_size == size
        found = shardings(plan)
        assert set(found) == set(rows) | set(bags)
        for table, sharding in found.items():
            if sharding.sharding_spec is None:
                assert sharding.sharding_type == "data_parallel"
                continue
            area = sum(np.prod(shard.shard_sizes) for shard in sharding.sharding_spec.shards)
            assert area == np.prod({**rows, **bags}[table])
            assert all(0 <= shard.placement.rank() < size for shard in sharding.sharding_spec.shards)


def test_sequences_on_cpu_are_never_replicated() -> None:
    topology = cpu_topology(ranks_per_node=2, nodes=1, memory_bytes=GB, intra=1e9, inter=1e9)
    plan = planner(topology, group_size=2).plan(Tables({"s": (10, 8)}), SHARDERS)
    assert shardings(plan)["s"].sharding_type != "data_parallel"


@pytest.mark.parametrize(
    "arguments",
    [
        {"proposer": GreedyProposer()},
        {"proposer": [UniformProposer(), GreedyProposer(use_depth=False)]},
        {"partitioner": GreedyPerfPartitioner()},
    ],
    ids=["proposer", "proposers", "partitioner"],
)
def test_torchrecs_own_search_plans_each_size_where_its_parts_are_given(arguments: dict[str, Any]) -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1, devices_per_node=4)
    module = Tables({"s": (10_000, 64)}, {"b0": (5_000, 64), "b1": (100, 64)})
    plan = planner(topology, **arguments).plan(module, SHARDERS)
    assert plan.report is not None
    assert any("TorchRec's search" in note for note in plan.report.notes)
    assert [candidate.group_size for candidate in plan.report.candidates] == [4, 2, 1]
    whole = planner(topology, group_size=4, **arguments).plan(module, SHARDERS)
    reserve = FixedPercentageStorageReservation(0.0)
    stock = EmbeddingShardingPlanner(
        topology=topology, batch_size=64, storage_reservation=reserve, stats=[], debug=False, **arguments
    )
    assert whole.plan == stock.plan(module, SHARDERS).plan


def test_a_dense_part_that_leaves_no_room_is_not_answered_with_more_ranks() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1, memory_bytes=GB)
    with pytest.raises(PlannerError) as caught:
        planner(topology, activation_bytes=2 * GB).plan(Tables({"t": (1_000_000, 128)}), SHARDERS)
    text = str(caught.value)
    assert "which has 0 GB for them" in text
    assert "ranks, or" not in text


def test_what_torchrecs_search_cannot_place_is_refused_by_rank_too() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1, memory_bytes=GB)
    with pytest.raises(PlannerError) as caught:
        planner(topology, proposer=GreedyProposer()).plan(Tables({"t": (62_500_000, 128)}), SHARDERS)
    assert "missing: 3 GB on each of ranks 0 to 7" in str(caught.value)
    assert "TorchRec's search: Unable to find a plan for this model because of insufficient storage" in str(
        caught.value
    )


def test_statistics_of_torchrec_print_the_chosen_group(caplog: pytest.LogCaptureFixture) -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1)
    with caplog.at_level("INFO"):
        plan = planner(topology, stats=EmbeddingStats(), debug=True).plan(Tables({"s": (10_000, 64)}), SHARDERS)
    assert "Planner Statistics" in caplog.text
    assert plan.group_size == 8
    assert "on ranks [0, 1, 2, 3, 4, 5, 6, 7]" in caplog.text


def test_many_tables_on_1024_ranks_are_planned() -> None:
    """The bar is 60 s for 500 tables, which take about 20 s of one core; here 30 of them."""
    rng = np.random.default_rng(12)
    rows = {f"t{i}": (int(10 ** rng.uniform(3, 6.5)), 128) for i in range(30)}
    start = time.process_time()
    plan = planner(npu_topology("atlas-800t-a2", nodes=128), batch_size=512).plan(Tables(rows), SHARDERS)
    print(f"{time.process_time() - start:.1f} s of CPU time, group size {plan.group_size}")
    assert len(shardings(plan)) == 30


def test_a_model_without_tables_has_an_empty_plan() -> None:
    plan = planner(npu_topology("atlas-800t-a2", nodes=1)).plan(torch.nn.Linear(1, 1), SHARDERS)
    assert plan.plan == {}
    assert plan.group_size == plan.world_size == 8


def _managed_collision(buckets: int) -> torch.nn.Module:
    meta = torch.device("meta")
    tables = [EmbeddingConfig(name="t", num_embeddings=64, embedding_dim=8, feature_names=["f"])]
    remap = MCHManagedCollisionModule(
        zch_size=64,
        device=meta,
        eviction_interval=1,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        buckets=buckets,
    )
    managed = ManagedCollisionCollection({"t": remap}, tables)
    return torch.nn.Sequential(
        ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=tables, device=meta), managed)
    )


def test_tables_of_managed_collision_have_one_group() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1, devices_per_node=4)
    sharders = get_default_sharders()
    plan = planner(topology).plan(_managed_collision(4), sharders)
    assert plan.group_size == 4
    assert plan.report is not None
    assert any("one group only" in note for note in plan.report.notes)
    with pytest.raises(ValueError, match="group_size must be all 4 ranks for tables of managed collision"):
        planner(topology, group_size=2).plan(_managed_collision(4), sharders)
    with pytest.raises(PlannerError, match="uneven buckets per rank"):
        planner(topology).plan(_managed_collision(3), sharders)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 3}, "group_size must divide the 8 ranks"),
        ({"group_size": "all"}, "got 'all'; allowed: 8, 4, 2, 1"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
        ({"batch_size": -8}, "batch_size must be a whole number >= 1, got -8"),
        ({"sync": "sum"}, "sync must be 'exact' or 'average', got 'sum'"),
        ({"sync_interval": 0}, "sync_interval must be a whole number >= 1, got 0"),
        ({"wire_dtype": torch.int8}, "wire_dtype must be torch.float32, torch.bfloat16, torch.float16"),
        ({"dense_seconds": float("inf")}, "dense_seconds must be a number >= 0, got inf"),
        ({"activation_bytes": float("nan")}, "activation_bytes must be a number >= 0, got nan"),
        ({"overlap": 1.5}, "overlap must be 0 to 1, got 1.5"),
        ({"minimum_gain": 1.0}, "minimum_gain must be from 0 up to but not 1"),
        ({"staleness": -1}, "staleness must be a whole number >= 0, got -1"),
        ({"performance_model": object()}, "performance_model is made for the topology of one group"),
    ],
)
def test_wrong_arguments_are_named_with_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        planner(npu_topology("atlas-800t-a2", nodes=1), **arguments)


def test_statistics_of_what_the_model_has_not_are_named_in_the_report() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1)
    rows = AccessHistogram.from_counts(np.arange(1, 11))
    for statistics, noted in (
        (BatchStatistics(access={"t": rows, "u": rows}, lengths={"f_t": 3.0, "f_u": 3.0}), "ignored: u, f_u"),
        (BatchStatistics(access={"t": rows}, lengths={"f_t": 3.0}), None),
    ):
        plan = planner(topology, batch_statistics=statistics).plan(Tables({"t": (10, 8)}), SHARDERS)
        assert plan.report is not None
        notes = [note for note in plan.report.notes if note.startswith("statistics of tables and features")]
        assert [note.rsplit("has not, ")[1] for note in notes] == [noted] * (noted is not None)


def test_tables_without_rows_and_popularity_of_other_tables_are_refused() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1)
    module = Tables({"t": (10, 8)})
    module.sequences.embeddings["t"].weight = torch.nn.Parameter(torch.empty(0, 8, device="meta"))
    with pytest.raises(ValueError, match=re.escape("table 't' of sequences has shape (0, 8)")):
        planner(topology).plan(module, SHARDERS)
    other = BatchStatistics(access={"t": kuairand_items(1000)})
    with pytest.raises(ValueError, match=re.escape("access['t'] has 20719 rows, the table has 10")):
        planner(topology, batch_statistics=other).plan(Tables({"t": (10, 8)}), SHARDERS)


def test_bytes_between_domains_are_the_mean_over_ranks() -> None:
    topology = cpu_topology(ranks_per_node=2, nodes=2, memory_bytes=GB, intra=1e9, inter=1e9)
    constraints = {"t": ParameterConstraints(sharding_types=["table_wise"])}
    statistics = BatchStatistics(lengths={"f_t": 10.0})
    made = planner(topology, batch_size=8, group_size=4, constraints=constraints, batch_statistics=statistics)
    plan = made.plan(Tables({"t": (1_000, 16)}), SHARDERS)
    assert plan.report is not None
    (candidate,) = plan.report.candidates
    # One rank holds the table: two ranks of the other host ask it for 80 rows each, and send back their gradients.
    of_holder = 2 * 80 * (8 + 2 * 16 * 4)
    assert candidate.between_domains_bytes == pytest.approx(of_holder / 4)
    assert sent_over_link(candidate, ranks=2, world=4, dense_bytes=0.0) == pytest.approx(of_holder / 2)


@pytest.mark.parametrize("caps", [[8, 8, 4, 4], [4, 4, 8, 8], [4, 8, 8, 4]], ids=str)
def test_a_group_may_fill_what_its_smaller_peers_have(caps: list[int]) -> None:
    topology = Topology(
        world_size=4,
        compute_device="npu",
        local_world_size=2,
        custom_topology_data=CustomTopologyData({"hbm_cap": [cap * GIB for cap in caps]}, 4),
    )
    # Both groups are sharded alike, and each rank has a peer of 4 GiB.
    wanted = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    fits = planner(topology, group_size=2, constraints=wanted).plan(Tables({"t": (1_000, 64)}), SHARDERS)
    assert fits.report is not None
    assert fits.report.candidates[0].memory_allowed == 4 * GIB
    module = Tables({"t": (10 * GIB // 256, 64)})  # halves of 5 GiB
    with pytest.raises(PlannerError, match=r"which has 4\.29 GB for them"):
        planner(topology, group_size=2, constraints=wanted).plan(module, SHARDERS)
