"""Named, measured and partial topologies."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner.types import CollectiveType, CustomTopologyData, Topology

from turbogr_plugin.sharding import cpu_topology, cuda_topology, npu_topology, topology_from_file
from turbogr_plugin.sharding.link_bandwidths import LinkSpeeds, link_bandwidths
from turbogr_plugin.sharding.machines import MACHINES
from turbogr_plugin.sharding.topologies import group_sizes, group_topology, memory_bandwidth, save_topology

GIB = 1 << 30


def test_a_named_npu_cluster_is_a_topology_of_torchrec() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=4)
    assert isinstance(topology, Topology)
    assert (topology.world_size, topology.local_world_size, topology.intra_group_size) == (32, 8, 8)
    assert topology.compute_device == "npu"
    assert {device.storage.hbm for device in topology.devices} == {64 * GIB}
    assert topology.intra_host_bw == 196e9 / 1000  # bytes per millisecond
    assert topology.comms_bandwidths.get_bw(8, 32, CollectiveType.ALL_TO_ALL) == 25e9 / 1000
    assert topology.comms_bandwidths.get_bw(8, 32, CollectiveType.ALL_REDUCE) == 8 * 25e9 / 1000
    assert memory_bandwidth(topology) == pytest.approx(1.6e12)


def test_fast_links_of_a_pod_join_its_hosts() -> None:
    assert npu_topology("atlas-900-a3", nodes=4).intra_group_size == 64
    assert npu_topology("atlas-900-a3", nodes=96).intra_group_size == 768
    assert npu_topology("atlas-900-a3", nodes=72).intra_group_size == 16 * 36  # equal domains only


@pytest.mark.parametrize("name", MACHINES)
def test_every_published_figure_has_a_source(name: str) -> None:
    machine = MACHINES[name]
    figures = {field.name for field in fields(machine)} - {"name", "device", "sources"}
    given = {figure for figure in figures if getattr(machine, figure) != (1 if figure == "nodes_per_domain" else None)}
    assert set(machine.sources) == given


def test_published_figures_can_be_replaced() -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1, memory_bytes=32 * GIB, inter_node_bandwidth=1e9, latency=1e-5)
    assert topology.devices[0].storage.hbm == 32 * GIB
    assert link_bandwidths(topology.comms_bandwidths).inter == LinkSpeeds.same(1e9, 1e-5)


def test_a_file_gives_back_the_topology(tmp_path: Path) -> None:
    by_size = ((1e5, 2e9), (1e6, 1e9))
    speeds = LinkSpeeds(all_to_all=1e9, all_reduce=2e9, exchange=3e9, latency=1e-4, all_to_all_by_size=by_size)
    for topology in (
        npu_topology("atlas-900-a3", nodes=4),
        cuda_topology("dgx-h100", nodes=2, devices_per_node=4),
        cpu_topology(ranks_per_node=2, nodes=2, memory_bytes=GIB, intra=5e9, inter=speeds),
    ):
        save_topology(topology, tmp_path / "links.json")
        found = topology_from_file(tmp_path / "links.json")
        assert found._hash() == topology._hash()
        assert found.comms_bandwidths == topology.comms_bandwidths


def test_a_speed_lies_between_those_of_the_sizes_around_it() -> None:
    points = ((1e4, 4e9), (1e6, 2e9), (4e6, 1e9))
    speeds = LinkSpeeds(all_to_all=1e9, all_reduce=1.0, exchange=1.0, all_to_all_by_size=points)
    assert [speeds.all_to_all_of(size) for size, _ in points] == pytest.approx([rate for _, rate in points])
    assert speeds.all_to_all_of(1e5) == pytest.approx(3e9)  # ten times the smaller size, a tenth of the larger
    assert speeds.all_to_all_of(2e6) == pytest.approx(1.5e9)
    assert [speeds.all_to_all_of(size) for size in (0, 1, 1e9)] == pytest.approx([4e9, 4e9, 1e9])
    assert LinkSpeeds.same(3e9).all_to_all_of(7) == 3e9


def test_a_file_without_speeds_by_size_holds_one_for_all(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    topology = npu_topology("atlas-800t-a2", nodes=2)
    save_topology(topology, path)
    values = json.loads(path.read_text())
    for level in values["links"].values():
        del level["all_to_all_by_size"]
    path.write_text(json.dumps(values))
    assert topology_from_file(path).comms_bandwidths == topology.comms_bandwidths


def test_a_group_sees_the_first_ranks_and_the_least_memory_of_their_peers() -> None:
    caps = [8, 8, 8, 8, 8, 4, 8, 2]
    topology = Topology(
        world_size=8,
        compute_device="npu",
        local_world_size=4,
        custom_topology_data=CustomTopologyData({"hbm_cap": [cap * GIB for cap in caps]}, 8),
    )
    group = group_topology(topology, 4)
    assert [device.storage.hbm // GIB for device in group.devices] == [8, 4, 8, 2]
    assert (group.world_size, group.local_world_size, group.intra_group_size) == (4, 4, 4)
    pair = group_topology(topology, 2)
    assert [device.storage.hbm // GIB for device in pair.devices] == [8, 2]
    assert pair.local_world_size == 2


def test_groups_are_parts_of_hosts_or_whole_hosts() -> None:
    assert group_sizes(npu_topology("atlas-800t-a2", nodes=3)) == [24, 8, 4, 2, 1]
    assert group_sizes(cpu_topology(ranks_per_node=6, nodes=1, memory_bytes=GIB, intra=1e9, inter=1e9)) == [6, 3, 2, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: npu_topology("atlas-9000", nodes=1), "machine must be one of atlas-800t-a2, atlas-900-a3"),
        (lambda: npu_topology("dgx-h100", nodes=1), "of device type npu, got 'dgx-h100'"),
        (lambda: npu_topology("atlas-800t-a2", nodes=0), "nodes must be a positive whole number, got 0"),
        (lambda: npu_topology("atlas-800t-a2", nodes=1, devices_per_node=9), "between 1 and 8, which a host of atlas"),
        (lambda: npu_topology("atlas-800t-a2", nodes=1, memory=1), "memory_bytes, memory_bandwidth"),
        (lambda: group_topology(npu_topology("atlas-800t-a2", nodes=3), 12), "allowed: 24, 8, 4, 2, 1"),
        (lambda: group_topology(npu_topology("atlas-800t-a2", nodes=3), 5), "must divide the 24 ranks"),
        (lambda: LinkSpeeds.same(0), "all_to_all must be a positive number of bytes/s, got 0"),
        (
            lambda: LinkSpeeds(all_to_all=1, all_reduce=1, exchange=1, all_to_all_by_size=((2, 1), (1, 1))),
            "bytes ascending and bytes/s, got ((2, 1), (1, 1))",
        ),
        (lambda: LinkSpeeds.same(float("nan")), "all_to_all must be a positive number of bytes/s, got nan"),
        (lambda: LinkSpeeds.same(1, -1), "latency must be a number of seconds >= 0, got -1"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(kind="other"), "kind must be 'turbogr topology 1', got 'other'"),
        (lambda values: values.pop("nodes"), "nodes must be int, got None"),
        (lambda values: values.update(memory_bytes="64G"), "memory_bytes must be int, got '64G'"),
        (lambda values: values["links"]["inter"].pop("latency"), "links.inter must have exactly"),
        (
            lambda values: values["links"]["inter"].update(all_to_all_by_size=[[1, 0]]),
            "links.inter: all_to_all_by_size must be pairs of positive numbers",
        ),
        *(
            (
                lambda values, wrong=wrong: values["links"]["inter"].update(all_to_all_by_size=wrong),
                "links.inter: all_to_all_by_size must be pairs of positive numbers",
            )
            for wrong in ([1], None, "x", [[1, 2, 3]], [[1, True]])
        ),
        (lambda values: values.update(memory_bandwidth=10**400), "memory_bandwidth must be a positive number"),
        (lambda values: values["links"]["inter"].update(exchange=10**400), "links.inter: exchange must be a positive"),
        (lambda values: values["links"]["inter"].update(all_to_all=True), "links.inter: all_to_all must be a positive"),
        (lambda values: values["links"]["intra"].update(exchange=-1), "links.intra: exchange must be a positive"),
        (lambda values: values.update(device="tpu"), "device must be npu, cuda or cpu, got 'tpu'"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "links.json"
    save_topology(npu_topology("atlas-800t-a2", nodes=2), path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        topology_from_file(path)
    assert str(path) in str(caught.value)


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'x'}: not JSON")):
        topology_from_file(tmp_path / "x")
    (tmp_path / "x").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        topology_from_file(tmp_path / "x")
