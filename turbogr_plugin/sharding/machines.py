"""Published figures of the hosts that a cluster is built of: devices, memory, links, each with its source.

A frozen record per machine, keyed by the name that a user gives to `npu_topology`. All figures are peaks of data
sheets and papers, per device and in one direction; what a job reaches is measured with `turbogr measure-links`.
Latency is not published: it is not counted, and a plan says so.

Left out: what a chip computes (backend/device_facts.py), and any figure measured by this project on an Ascend machine:
there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

GB, GiB = 1_000_000_000, 1 << 30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of host, and how hosts of this kind are joined."""

    name: str
    device: str
    """Device type: npu, cuda or cpu."""
    devices_per_node: int
    """Devices that processes see, one rank each."""
    memory_bytes: int
    """Of one device; on cpu of one rank."""
    memory_bandwidth: float
    """Bytes/s of one device's memory."""
    intra_node_bandwidth: float
    """Bytes/s that one device sends to the others of its fast domain, one direction, all links together."""
    inter_node_bandwidth: float
    """Bytes/s that one device sends out of its fast domain, one direction."""
    nodes_per_domain: int = 1
    """Hosts that the fast links join: 1 where they end at the host, more in a pod."""
    peak_flops: float | None = None
    """FLOP/s of dense bf16 or fp16 matrix products, for predictions of step times only."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Where each figure comes from, by field."""


_CLOUDMATRIX = "arXiv 2506.12708 (CloudMatrix384)"
_DATA_SHEETS = "arthurchiao.art, GPU performance data sheets (910B column)"
_NVIDIA = "NVIDIA data sheet (nvidia.com); NVLink counted in one direction"


def _sources(**fields: str) -> Mapping[str, str]:
    return MappingProxyType(fields)


def _dgx(
    gpu: str, *, memory: int, memory_speed: int, nvlink: tuple[int, int], nic: tuple[str, int], tflops: float
) -> Machine:
    """A DGX host: 8 GPUs on NVLink, a network card for each.

    Args:
        gpu: its name.
        memory: GB of a GPU.
        memory_speed: GB/s of its memory.
        nvlink: generation, and GB/s of a GPU in one direction.
        nic: card, and Gbit/s of it.
        tflops: of dense products in bf16.
    """
    (generation, nvlink_speed), (card, gbits) = nvlink, nic
    return Machine(
        name=f"dgx-{gpu.lower()}",
        device="cuda",
        devices_per_node=8,
        memory_bytes=memory * GB,
        memory_bandwidth=memory_speed * GB,
        intra_node_bandwidth=nvlink_speed * GB,
        inter_node_bandwidth=gbits * GB / 8,
        peak_flops=tflops * 1e12,
        sources=_sources(
            **dict.fromkeys(("devices_per_node", "memory_bytes", "memory_bandwidth", "peak_flops"), _NVIDIA),
            intra_node_bandwidth=f"NVLink {generation}, {_NVIDIA}",
            inter_node_bandwidth=f"DGX {gpu} data sheet: one {card} of {gbits} Gbit/s per GPU",
        ),
    )


_TABLE = (
    Machine(
        name="atlas-800t-a2",
        device="npu",
        devices_per_node=8,
        memory_bytes=64 * GiB,
        memory_bandwidth=1_600 * GB,
        intra_node_bandwidth=196 * GB,
        inter_node_bandwidth=25 * GB,
        sources=_sources(
            devices_per_node="arXiv 2504.07866 (Pangu Ultra): 8 NPUs per node, full mesh",
            memory_bytes="arXiv 2605.13433 (TurboGR): 910B1 with 64 GB",
            memory_bandwidth=f"half of the two-die package, {_CLOUDMATRIX}: 3.2 TB/s; the same die",
            intra_node_bandwidth=f"HCCS, 7 links of 56 GB/s in both directions together (392 GB/s), {_DATA_SHEETS}",
            inter_node_bandwidth="RoCE, 200 Gbit/s per NPU, arXiv 2504.07866 (Pangu Ultra)",
        ),
    ),
    Machine(
        name="atlas-900-a3",
        device="npu",
        devices_per_node=16,
        memory_bytes=64 * GiB,
        memory_bandwidth=1_600 * GB,
        intra_node_bandwidth=196 * GB,
        inter_node_bandwidth=25 * GB,
        nodes_per_domain=48,
        peak_flops=376e12,
        sources=_sources(
            devices_per_node=f"8 packages of two dies, a process sees a die, {_CLOUDMATRIX}",
            memory_bytes=f"half of 128 GB per package, {_CLOUDMATRIX}",
            memory_bandwidth=f"half of 3.2 TB/s per package, {_CLOUDMATRIX}",
            intra_node_bandwidth=f"unified bus, half of 392 GB/s per package, one direction, {_CLOUDMATRIX}",
            inter_node_bandwidth=f"RDMA plane, half of 400 Gbit/s per package, {_CLOUDMATRIX}",
            nodes_per_domain=f"48 nodes on one unified bus, {_CLOUDMATRIX}",
            peak_flops=f"376 TFLOP/s per die in fp16 and bf16, {_CLOUDMATRIX}",
        ),
    ),
    _dgx("A100", memory=80, memory_speed=2_039, nvlink=(3, 300), nic=("ConnectX-6", 200), tflops=312),
    _dgx("H100", memory=80, memory_speed=3_350, nvlink=(4, 450), nic=("ConnectX-7", 400), tflops=989.4),
    _dgx("H200", memory=141, memory_speed=4_800, nvlink=(4, 450), nic=("ConnectX-7", 400), tflops=989.4),
)

MACHINES: Mapping[str, Machine] = MappingProxyType({machine.name: machine for machine in _TABLE})


def machine(name: str, device: str | None = None) -> Machine:
    """The machine that a user names.

    Args:
        name: a key of `MACHINES`.
        device: the device type that it must have; None takes any.

    Raises:
        ValueError: no such machine, or one of another device type; the message lists those that are known.
    """
    known = {key: value for key, value in MACHINES.items() if device in (None, value.device)}
    if name not in known:
        kind = "" if device is None else f" of device type {device}"
        raise ValueError(f"machine must be one of {', '.join(known)}{kind}, got {name!r}; others come from a file")
    return known[name]
