"""Planning by several ranks: one plan or one message everywhere, and measured links."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.npu.ranks import Call, RankPool
from turbogr_plugin.sharding import cpu_topology, topology_from_file
from turbogr_plugin.sharding.link_bandwidths import link_bandwidths
from turbogr_plugin.sharding.topologies import save_topology

HERE = "tests.sharding.planned_on_ranks"


@pytest.mark.timeout(150)
def test_every_rank_has_the_plan_of_rank_0_or_its_refusal(ranks: RankPool) -> None:
    planned, refused, stock = ranks.run(
        [Call(f"{HERE}:{name}", {}, world_size=4) for name in ("collective_plan", "refusals", "stock_models")]
    )
    first, *others = planned.result()
    assert first[:2] == [2, 4]
    assert all(other == first for other in others)

    for messages in refused.result():
        storage, optimizer, size = messages
        assert storage.startswith("PlannerError: ")
        assert "no group fits: with all 4 ranks in one group" in storage
        assert "ValueError: optimizer must be one of SGD" in optimizer
        assert size == "ValueError: topology has 8 ranks, the process group has 4"

    for grouped, whole, exact, other_size, average in stock.result():
        assert "plan is for 2 groups of 2 ranks, DistributedModelParallel shards over all ranks" in grouped
        assert "use turbogr_plugin.sharding.HierarchicalModelParallel" in grouped
        assert whole == "DistributedModelParallel is made"
        assert "with sync 'exact', DMPCollection averages weights" in exact
        assert "DMPCollection was given sharding_group_size 4" in other_size
        assert average == "DMPCollection is made"


@pytest.mark.timeout(150)
def test_hosts_with_fewer_ranks_than_the_topology_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (outcome,) = ranks.run([Call(f"{HERE}:hosts_with_fewer_ranks", {"path": str(tmp_path)}, world_size=4)])
    wanted = [
        "the plan's topology has 4 ranks per host, but rank 0 runs on a host with 2 (4 of 4 ranks lack some): start 4 "
        "ranks on each host, or plan for a topology with 2",
        "the plan's topology has 4 ranks per host, but rank 2 runs on a host with 3 (2 of 4 ranks lack some): start 4 "
        "ranks on each host, or plan for a topology with 3",
        "the plan's topology has 2 ranks per host, but rank 2 runs on a host with 1 (2 of 4 ranks lack some): start 2 "
        "ranks on each host, or plan for a topology with 1",
    ]
    uneven = (
        "the plan's topology has 3 ranks per host, but rank 0 runs on a host with 2 (3 of 4 ranks lack some): start 3 "
        "ranks on each host, or plan for a topology with 2"
    )
    refused = [f"{number}: {message}" for message in wanted for number in range(2)]
    made = ["0 is made", "1 is made"]
    others = [
        f"all ranks must have one plan, got plans for {plans} ranks per host"
        for plans in ([2, 2, 2, 4], [2, None, 2, 2])
    ]
    for messages in outcome.result():
        assert messages == [*refused, *made, *made, f"0: {uneven}", f"1: {uneven}", *others]


@pytest.mark.timeout(150)
def test_a_file_that_some_ranks_lack_is_told_to_all(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    save_topology(cpu_topology(ranks_per_node=2, nodes=2, memory_bytes=1 << 30, intra=1e9, inter=1e7), path)
    (outcome,) = ranks.run([Call(f"{HERE}:links_of_some_ranks", {"path": str(path)}, world_size=4)])
    assert all(f"groups: {path}.none: no such file" in message for message in outcome.result()), outcome.result()


@pytest.mark.timeout(150)
def test_a_plan_of_one_group_is_carried_out_by_torchrec(ranks: RankPool) -> None:
    calls = [Call(f"{HERE}:carried_out", {"device_type": device}, world_size=4) for device in ("cpu", "npu")]
    for outcome in ranks.run(calls):
        first, *others = outcome.result()
        assert len(first) == 4
        assert all(other == first for other in others)


@pytest.mark.timeout(150)
def test_measured_links_make_a_topology(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    (outcome,) = ranks.run([Call(f"{HERE}:measured", {"path": str(path)}, world_size=4)])
    for timings, lines in outcome.result():
        # of 0.2 MB half goes to the other rank of a host, or to the two of the other host
        expected = [
            [level, kind, ranks, sent]
            for level, to_all in (("intra", 2), ("inter", 4))
            for kind, ranks, sizes in (
                ("all_to_all", to_all, (12_500, 25_000, 50_000, 100_000)),
                ("all_reduce", 2, (200_000,)),
                ("exchange", 2, (100_000,)),
            )
            for sent in sizes
        ]
        assert [[*timing[:3], pytest.approx(timing[3], abs=16)] for timing in timings] == expected
        assert lines[0] == "4 ranks, 2 per host"
    topology = topology_from_file(path)
    assert (topology.world_size, topology.local_world_size, topology.compute_device) == (4, 2, "cpu")
    assert {device.storage.ddr for device in topology.devices} == {1 << 30}
    links = link_bandwidths(topology.comms_bandwidths)
    assert links.intra.latency > 0
    assert links.inter.exchange > 0
    assert len(links.inter.all_to_all_by_size) == 4
    assert links.inter.all_to_all_by_size[-1][1] == links.inter.all_to_all
