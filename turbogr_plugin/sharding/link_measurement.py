"""Measures the links of the ranks that run it, and makes a topology of them: `turbogr measure-links`.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m turbogr_plugin.cli measure-links --output links.json

Three kinds of traffic are timed inside every host at the same time, then between hosts at the same time, so that ranks
share links as they do in training:

    all-to-all    equal parts to every rank, as in TorchRec's exchange of looked-up rows; between hosts by all ranks
                  together. In several sizes, since libraries reach different shares of a link with each
    all-reduce    of one tensor; between hosts by the ranks with the same place on each host
    exchange      point-to-point messages, receives posted first, as in the exchange of gradients between groups, by
                  the same ranks

A bandwidth is the bytes that one rank sends in the level over the time of the slowest rank, less the time of a small
message; point-to-point, that is the latency. The time is the mean of the middle half of the repeats: a step has many
collectives, and where a library is fast or slow by chance a median jumps from one to the other. Memory is read at
random rows of a table, as a lookup does.

Left out: fast domains of several hosts (give `nodes_per_domain`, and links are still measured by host), and traffic of
other jobs, which counts as slower links.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.planner.types import Topology

from turbogr_plugin.backend.memory import memory_figures
from turbogr_plugin.backend.streams import device_module
from turbogr_plugin.sharding.link_bandwidths import LinkBandwidths, LinkSpeeds
from turbogr_plugin.sharding.topologies import cluster, save_topology

_A2A_PARTS = (8, 4, 2, 1)
"""All-to-all is timed with the size of a measurement divided by each of these; the whole comes last."""
_SMALL = 8
"""Elements per peer of a message that is all latency."""
_TABLE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One kind of traffic in one level."""

    level: str
    """intra or inter."""
    traffic: str
    ranks: int
    """That took part in each group."""
    bytes_sent: float
    """By one rank, in this level."""
    seconds: float
    """Of the slowest rank: mean of the middle half of the repeats."""
    small_seconds: float
    """Likewise, of a message of a few bytes."""
    spread: float
    """Slowest repeat over fastest."""

    @property
    def rate(self) -> float:
        """Bytes/s of one rank, without the latency, which explains no more than half of the time.

        What takes hardly longer than a small message would else be free, or take less than no time.
        """
        return self.bytes_sent / max(self.seconds - self.small_seconds, self.seconds / 2, 1e-9)


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """What was timed, and the topology that follows."""

    topology: Topology
    timings: list[Timing]
    memory_bandwidth: float

    def lines(self) -> list[str]:
        """A row per kind of traffic and level."""
        found = [f"{self.topology.world_size} ranks, {self.topology.local_world_size} per host"]
        for timing in self.timings:
            found.append(
                f"{timing.level} {timing.traffic:<10} of {timing.ranks:>4} ranks, {timing.bytes_sent / 1e6:6.2f} MB: "
                f"{timing.rate / 1e9:9.4g} GB/s per rank, {1e6 * timing.small_seconds:7.0f} us for a small one, "
                f"slowest/fastest repeat {timing.spread:.2f}"
            )
        if not any(timing.level == "inter" for timing in self.timings):
            found.append("one host: nothing was measured between hosts, where the file repeats the speeds inside")
        return [*found, f"memory: {self.memory_bandwidth / 1e9:.4g} GB/s per rank at random rows"]

    def save(self, path: str | Path) -> None:
        """Writes the topology's file, with what was timed beside it."""
        save_topology(self.topology, path)
        values = json.loads(Path(path).read_text())
        values["measured"] = [asdict(timing) for timing in self.timings]
        Path(path).write_text(json.dumps(values, indent=2) + "\n")


def measure_links(
    device: torch.device,
    *,
    ranks_per_node: int,
    megabytes: float = 8.0,
    repeats: int = 15,
    memory_bytes: int | None = None,
    nodes_per_domain: int = 1,
) -> LinkMeasurement:
    """Times the links between all ranks of the default process group; every rank calls it.

    Args:
        device: of this rank.
        ranks_per_node: ranks on each host, consecutive.
        megabytes: that each rank sends in a bandwidth measurement.
        repeats: of each measurement, after one that is not counted.
        memory_bytes: that a rank has for tables; None is the device's memory, on cpu its share of the host's.
        nodes_per_domain: hosts that fast links join, for the file.

    Returns:
        The same on every rank.

    Raises:
        ValueError: ranks that do not fill hosts, sizes or repeats below 1, unknown memory; on every rank.
    """
    world = dist.get_world_size()
    if ranks_per_node < 1 or world % ranks_per_node:
        raise ValueError(f"ranks_per_node must divide the {world} ranks, got {ranks_per_node}")
    if not 0 < megabytes < math.inf or repeats < 1:
        raise ValueError(f"megabytes must be positive and repeats at least 1, got {megabytes} and {repeats}")
    if memory_bytes is not None and memory_bytes < 1:
        raise ValueError(f"memory_bytes must be at least 1, got {memory_bytes}")
    memory = _memory(device, ranks_per_node) if memory_bytes is None else memory_bytes
    hosts = [list(range(first, first + ranks_per_node)) for first in range(0, world, ranks_per_node)]
    columns = [list(range(place, world, ranks_per_node)) for place in range(ranks_per_node)]
    timings: list[Timing] = []
    levels: dict[str, LinkSpeeds | None] = {}
    for level, members in (("intra", hosts), ("inter", columns)):
        levels[level] = None
        if len(members[0]) > 1:
            found = _time_level(level, members, device, megabytes * 1e6, repeats)
            timings.extend(found)
            levels[level] = _speeds(found)
    intra, inter = levels["intra"], levels["inter"]
    # A level without a second rank carries nothing; its figures are those of the other, or of memory.
    bandwidth = _agreed(_memory_bandwidth(device, repeats), device)
    alone = LinkSpeeds.same(bandwidth)
    topology = cluster(
        device=device.type,
        devices_per_node=ranks_per_node,
        nodes=world // ranks_per_node,
        nodes_per_domain=nodes_per_domain,
        memory_bytes=memory,
        memory_bandwidth=bandwidth,
        links=LinkBandwidths(intra or inter or alone, inter or intra or alone),
    )
    return LinkMeasurement(topology=topology, timings=timings, memory_bandwidth=bandwidth)


def _time_level(level: str, members: list[list[int]], device: torch.device, size: float, repeats: int) -> list[Timing]:
    rank, everyone = dist.get_rank(), list(range(dist.get_world_size()))
    own, group = members[0], None
    for ranks in members:
        made = dist.new_group(ranks)  # a collective: every rank makes every group
        if rank in ranks:
            own, group = ranks, made
    assert group is not None
    apart = (len(own) - 1) / len(own)
    if level == "inter":  # a host has a member in each group; what these send each other is not of this level
        to_all = (everyone, dist.group.WORLD, 1 - len(members) / len(everyone), _A2A_PARTS)
    else:
        to_all = (own, group, apart, _A2A_PARTS)
    kinds: dict[str, Any] = {
        "all_to_all": to_all,
        "all_reduce": (own, group, 2 * apart, (1,)),
        "exchange": (own, group, apart, (1,)),
    }
    found = []
    for traffic, (peers, together, leaving, parts) in kinds.items():
        count = len(peers)
        small, _ = _repeat(_traffic(traffic, _SMALL * count, peers, together, device), device, repeats)
        for part in parts:
            elements = max(1, int(size / part / 4 / count)) * count
            seconds, spread = _repeat(_traffic(traffic, elements, peers, together, device), device, repeats)
            found.append(
                Timing(
                    level=level,
                    traffic=traffic,
                    ranks=count,
                    bytes_sent=leaving * 4 * elements,
                    seconds=seconds,
                    small_seconds=small,
                    spread=spread,
                )
            )
    dist.destroy_process_group(group)
    return found


def _traffic(
    traffic: str, elements: int, ranks: list[int], group: dist.ProcessGroup, device: torch.device
) -> Callable[[], None]:
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    if traffic == "all_to_all":

        def all_to_all() -> None:
            dist.all_to_all_single(target, source, group=group)

        return all_to_all
    if traffic == "all_reduce":

        def all_reduce() -> None:
            dist.all_reduce(source.fill_(1.0), group=group)

        return all_reduce
    parts = len(ranks)
    own = ranks.index(dist.get_rank())

    def exchange() -> None:
        pieces: list[tuple[Tensor, Tensor]] = list(zip(target.chunk(parts), source.chunk(parts), strict=True))
        peers = [(place, rank) for place, rank in enumerate(ranks) if place != own]
        # Receives first: gloo's bulk data of a sender else blocks the other direction of its connection.
        operations = [dist.P2POp(dist.irecv, pieces[place][0], rank, group) for place, rank in peers]
        operations += [dist.P2POp(dist.isend, pieces[place][1], rank, group) for place, rank in peers]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return exchange


def _repeat(action: Callable[[], None], device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds of the slowest rank and the spread over repeats; the same on every rank."""
    seconds = torch.zeros(repeats + 1, dtype=torch.float64)
    for turn in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        action()
        _wait(device)
        seconds[turn] = time.perf_counter() - start
    seconds = seconds.float().to(device)  # no float64 on NPUs
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    counted = sorted(seconds[1:].tolist())
    aside = len(counted) // 4
    return statistics.mean(counted[aside : len(counted) - aside]), counted[-1] / max(counted[0], 1e-9)


def _speeds(found: list[Timing]) -> LinkSpeeds:
    rates: dict[str, Any] = {timing.traffic: timing.rate for timing in found}  # of the largest all-to-all
    # All-to-all between hosts has messages inside of them, too.
    latency = next(timing.small_seconds / (timing.ranks - 1) for timing in found if timing.traffic == "exchange")
    by_size = {timing.bytes_sent: timing.rate for timing in found if timing.traffic == "all_to_all"}
    return LinkSpeeds(**rates, latency=latency, all_to_all_by_size=tuple(by_size.items()))


def _memory_bandwidth(device: torch.device, repeats: int, dim: int = 128) -> float:
    """Bytes/s of reading random rows and writing them."""
    rows = _TABLE_BYTES // (4 * dim)
    table = torch.ones(rows, dim, device=device)
    ids = torch.randint(rows, (rows // 8,), generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty(ids.numel(), dim, device=device)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.index_select(table, 0, ids, out=out)
        _wait(device)
        times.append(time.perf_counter() - start)
    return 2 * out.numel() * 4 / statistics.median(times[1:])


def _agreed(value: float, device: torch.device) -> float:
    """The least over the ranks."""
    shared = torch.tensor([value], device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return float(shared)


def _memory(device: torch.device, ranks_per_node: int) -> int:
    total = memory_figures(device).total
    if total is None:
        raise ValueError(f"memory of {device} is unknown: give memory_bytes")
    return total // ranks_per_node if device.type == "cpu" else total


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        device_module(device).synchronize(device)
