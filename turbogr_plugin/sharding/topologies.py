"""Topologies by name, from a file, and the part of one that a group of ranks sees.

    topology = npu_topology("atlas-800t-a2", nodes=4)
    topology = cuda_topology("dgx-h100", nodes=4)
    topology = cpu_topology(ranks_per_node=2, nodes=2, memory_bytes=8 << 30, intra=5e9, inter=12.5e6)
    topology = topology_from_file("links.json")          # as `turbogr measure-links` writes it

Each is TorchRec's Topology with its link speeds by kind of traffic (link_bandwidths.py), and goes wherever a Topology
goes. TorchRec's `local_world_size` is a host; where fast links join several hosts, its `pod_size` says how many.

Left out: hosts of different kinds in one job.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.types import CustomTopologyData, Storage, Topology

from turbogr_plugin.sharding.link_bandwidths import (
    MILLISECONDS,
    LinkBandwidths,
    LinkSpeeds,
    is_number,
    link_bandwidths,
)
from turbogr_plugin.sharding.machines import Machine, machine

_FILE_KIND = "turbogr topology 1"
_FILE_FIELDS = {
    "device": str,
    "devices_per_node": int,
    "nodes": int,
    "nodes_per_domain": int,
    "memory_bytes": int,
    "memory_bandwidth": float,
    "links": dict,
}


def npu_topology(name: str, *, nodes: int, devices_per_node: int | None = None, **figures: Any) -> Topology:
    """A cluster of Ascend machines.

    Args:
        name: a machine of sharding/machines.py: "atlas-800t-a2", "atlas-900-a3".
        nodes: hosts of the job.
        devices_per_node: ranks per host; None is all devices of a host.
        figures: fields of `Machine` that replace the published ones (`memory_bytes`, `inter_node_bandwidth`, ...), and
            `latency`, seconds per message on both levels, which nobody has published.

    Raises:
        ValueError: an unknown machine, counts below 1, more ranks per host than it has devices.
    """
    return _topology_of(machine(name, "npu"), nodes, devices_per_node, figures)


def cuda_topology(name: str, *, nodes: int, devices_per_node: int | None = None, **figures: Any) -> Topology:
    """A cluster of NVIDIA machines: "dgx-a100", "dgx-h100", "dgx-h200"; the rest as `npu_topology`."""
    return _topology_of(machine(name, "cuda"), nodes, devices_per_node, figures)


def machine_topology(name: str, *, nodes: int, devices_per_node: int | None = None, **figures: Any) -> Topology:
    """A cluster of any known machine; arguments and errors as `npu_topology`."""
    return _topology_of(machine(name), nodes, devices_per_node, figures)


def cpu_topology(
    *,
    ranks_per_node: int,
    nodes: int,
    memory_bytes: int,
    intra: float | LinkSpeeds,
    inter: float | LinkSpeeds,
    memory_bandwidth: float = 10e9,
) -> Topology:
    """CPU hosts, of which nothing is published.

    Args:
        ranks_per_node: processes on a host.
        nodes: hosts of the job.
        memory_bytes: of one rank.
        intra: speeds between ranks of a host; a number is bytes/s of every kind of traffic.
        inter: speeds of one rank to other hosts, likewise.
        memory_bandwidth: bytes/s that a rank reads; the default is one core of a server.

    Raises:
        ValueError: a count or a speed that is not positive.
    """
    levels = [speed if isinstance(speed, LinkSpeeds) else LinkSpeeds.same(speed) for speed in (intra, inter)]
    return cluster(
        device="cpu",
        devices_per_node=ranks_per_node,
        nodes=nodes,
        nodes_per_domain=1,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        links=LinkBandwidths(*levels),
    )


def cluster(
    *,
    device: str,
    devices_per_node: int,
    nodes: int,
    nodes_per_domain: int,
    memory_bytes: int,
    memory_bandwidth: float,
    links: LinkBandwidths,
) -> Topology:
    """A topology of equal hosts.

    Args:
        device: npu, cuda or cpu.
        devices_per_node: ranks of a host.
        nodes: hosts.
        nodes_per_domain: hosts that the fast links join.
        memory_bytes: of one rank.
        memory_bandwidth: bytes/s of one rank.
        links: speeds inside and between fast domains.

    Raises:
        ValueError: a figure that is not positive, or an unknown device type.
    """
    counts = {"nodes": nodes, "devices_per_node": devices_per_node, "nodes_per_domain": nodes_per_domain}
    for name, value in {**counts, "memory_bytes": memory_bytes, "memory_bandwidth": memory_bandwidth}.items():
        whole = name in counts
        if not is_number(value) or (whole and not isinstance(value, int)) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive {'whole number' if whole else 'number'}, got {value!r}")
    if device not in ("npu", "cuda", "cpu"):
        raise ValueError(f"device must be npu, cuda or cpu, got {device!r}")
    # Within one domain, cut where the domains of the job are whole.
    pod = min(nodes_per_domain, nodes)
    while nodes % pod:
        pod -= 1
    per_millisecond = memory_bandwidth / MILLISECONDS
    memory = {"ddr_cap": int(memory_bytes)} if device == "cpu" else {"hbm_cap": int(memory_bytes)}
    bandwidth = {"ddr_mem_bw": per_millisecond} if device == "cpu" else {"hbm_mem_bw": per_millisecond}
    return Topology(
        world_size=nodes * devices_per_node,
        compute_device=device,
        local_world_size=devices_per_node,
        pod_size=pod,
        generalized_comms_bandwidths=links,
        created_by_factory=True,  # silences a warning about TopologyFactory, which knows no level but two figures
        **memory,
        **bandwidth,
    )


def topology_from_file(path: str | Path) -> Topology:
    """Reads a topology that `save_topology` or `turbogr measure-links` has written.

    Raises:
        ValueError: no such file, or a figure that is missing or wrong; the message names the file and the field.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        values = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    kind = values.get("kind") if isinstance(values, dict) else values
    if kind != _FILE_KIND:
        raise ValueError(f"{path}: kind must be {_FILE_KIND!r}, got {kind!r}")
    for name, wanted in _FILE_FIELDS.items():
        allowed = (int, float) if wanted is float else (wanted,)
        if not isinstance(values.get(name), allowed) or isinstance(values.get(name), bool):
            raise ValueError(f"{path}: {name} must be {wanted.__name__}, got {values.get(name)!r}")
    figures = {name: values[name] for name in _FILE_FIELDS}
    figures["links"] = LinkBandwidths.from_json(values["links"], str(path))
    try:
        return cluster(**figures)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_topology(topology: Topology, path: str | Path) -> None:
    """Writes a topology for `topology_from_file`.

    Raises:
        ValueError: devices with different memory, which the file has no place for.
    """
    memories = {memory_of(topology, device.storage) for device in topology.devices}
    if len(memories) != 1:
        raise ValueError(f"topology must have devices of one size to be a file, got {sorted(memories)} bytes")
    domain = min(topology.intra_group_size, topology.world_size)
    values = {
        "kind": _FILE_KIND,
        "device": topology.compute_device,
        "devices_per_node": topology.local_world_size,
        "nodes": topology.world_size // topology.local_world_size,
        "nodes_per_domain": max(1, domain // topology.local_world_size),
        "memory_bytes": memories.pop(),
        "memory_bandwidth": _memory_bandwidth(topology),
        "links": link_bandwidths(topology.comms_bandwidths).as_json(),
    }
    Path(path).write_text(json.dumps(values, indent=2) + "\n")


def group_topology(topology: Topology, group_size: int) -> Topology:
    """The topology of the first `group_size` ranks, with for each rank the least memory of its peers in all groups.

    A plan for one group holds for all of them, so that a rank can hold what the smallest of its peers can.

    Raises:
        ValueError: `group_size` does not divide the number of ranks, or cuts a host in an uneven way.
    """
    check_group_size(topology, group_size)
    local = min(topology.local_world_size, group_size)
    domain = min(topology.intra_group_size, group_size)
    peers = [topology.devices[rank::group_size] for rank in range(group_size)]
    smallest = {
        f"{kind}_cap": [min(getattr(device.storage, kind) for device in column) for column in peers]
        for kind in ("hbm", "ddr", "ssd")
    }
    found = Topology(
        world_size=group_size,
        compute_device=topology.compute_device,
        local_world_size=local,
        pod_size=max(1, domain // local),
        hbm_mem_bw=topology.hbm_mem_bw,
        ddr_mem_bw=topology.ddr_mem_bw,
        ssd_mem_bw=topology.ssd_mem_bw,
        hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
        bwd_compute_multiplier=topology.bwd_compute_multiplier,
        weighted_feature_bwd_compute_multiplier=topology.weighted_feature_bwd_compute_multiplier,
        uneven_sharding_perf_multiplier=topology.uneven_sharding_perf_multiplier,
        generalized_comms_bandwidths=topology.comms_bandwidths,
        custom_topology_data=copy.copy(topology._custom_topology_data) and CustomTopologyData(smallest, group_size),
        created_by_factory=True,
    )
    for rank, device in enumerate(found.devices):
        device.storage = Storage(**{kind: smallest[f"{kind}_cap"][rank] for kind in ("hbm", "ddr", "ssd")})
    return found


def group_sizes(topology: Topology) -> list[int]:
    """All sizes of groups of consecutive ranks that a topology can be cut into, largest first."""
    world, host = topology.world_size, topology.local_world_size
    return [size for size in range(world, 0, -1) if world % size == 0 and (size % host == 0 or host % size == 0)]


def check_group_size(topology: Topology, group_size: int) -> None:
    """Raises ValueError where `group_sizes` does not have this one, with those that it has."""
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size not in group_sizes(topology):
        raise ValueError(
            f"group_size must divide the {topology.world_size} ranks and, with {topology.local_world_size} ranks per "
            f"host, be a divisor or a multiple of a host, got {group_size!r}; allowed: "
            f"{', '.join(map(str, group_sizes(topology)))}"
        )


def with_less_memory(topology: Topology, size: int) -> Topology:
    """A copy whose devices have `size` bytes less of what tables lie in."""
    found = copy.copy(topology)
    found._devices = copy.deepcopy(topology.devices)
    for device in found._devices:
        kind = "ddr" if topology.compute_device == "cpu" else "hbm"
        setattr(device.storage, kind, max(0, getattr(device.storage, kind) - size))
    return found


def memory_of(topology: Topology, storage: Storage) -> int:
    """Bytes of what tables lie in: HBM, on cpu the host's memory."""
    return int(storage.ddr if topology.compute_device == "cpu" else storage.hbm)


def memory_bandwidth(topology: Topology) -> float:
    """Bytes/s at which one rank reads its tables."""
    return float(_memory_bandwidth(topology))


def _memory_bandwidth(topology: Topology) -> float:
    per_millisecond = topology.ddr_mem_bw if topology.compute_device == "cpu" else topology.hbm_mem_bw
    return float(per_millisecond * MILLISECONDS)


def _topology_of(found: Machine, nodes: int, devices_per_node: int | None, figures: dict[str, Any]) -> Topology:
    latency = figures.pop("latency", 0.0)
    allowed = ("memory_bytes", "memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth", "nodes_per_domain")
    for name in figures:
        if name not in allowed:
            raise ValueError(f"figures must be of {', '.join((*allowed, 'latency'))}, got {name!r}")
    values = {name: figures.get(name, getattr(found, name)) for name in allowed}
    ranks = found.devices_per_node if devices_per_node is None else devices_per_node
    if not 1 <= ranks <= found.devices_per_node:
        raise ValueError(
            f"devices_per_node must be between 1 and {found.devices_per_node}, which a host of {found.name} has, "
            f"got {devices_per_node}"
        )
    return cluster(
        device=found.device,
        devices_per_node=ranks,
        nodes=nodes,
        nodes_per_domain=values["nodes_per_domain"],
        memory_bytes=values["memory_bytes"],
        memory_bandwidth=values["memory_bandwidth"],
        links=LinkBandwidths(
            LinkSpeeds.same(values["intra_node_bandwidth"], latency),
            LinkSpeeds.same(values["inter_node_bandwidth"], latency),
        ),
    )
