"""What is publicly known of each SoC and GPU: peak FLOP/s, memory, links, cores, on-chip buffers. Unknown is None.

One frozen table, keyed by the name that the device's driver gives. Code asks for a figure or a capability and has to
live with None (no MFU is shown, no tile limit is assumed); it never compares names. A device that is not in the table
has no facts at all: the figures of a neighbour would be a guess.

Left out: what a running device can be asked (memory in use, `backend.memory`), and measured figures. Peaks are dense:
without structured sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from turbogr_plugin.backend.streams import device_module

KB, MB, GB = 1_000, 1_000_000, 1_000_000_000
KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
TERA = 1_000_000_000_000

_NVIDIA_A100 = (
    "NVIDIA A100 Tensor Core GPU datasheet (nvidia.com), and its architecture whitepaper for cores and caches"
)
_NVIDIA_H100 = (
    "NVIDIA H100 Tensor Core GPU datasheet (nvidia.com; dense = half of the sparse figures), and its whitepaper"
)
_NVIDIA_H200 = "NVIDIA H200 Tensor Core GPU datasheet (nvidia.com; dense = half of the sparse figures)"
_ASCEND_IR = (
    "AscendNPU-IR, bishengir/include/bishengir/Dialect/HACC/Targets/NPUTargetSpec.td (the compiler's own limits; "
    "for 910B3 seen again in the HIVM of ascendnpu-ir 1.2.0)"
)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Figures of one device; each is None where no public source was found."""

    name: str
    """As the driver gives it; "unknown" stands in no table."""
    source: str | None = None
    """Where the figures come from."""
    peak_flops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """FLOP/s of matrix products by kind: fp64, fp32, hf32 (TF32 on GPUs), bf16, fp16, fp8; unknown is not in it."""
    memory_bytes: int | None = None
    memory_bandwidth: float | None = None
    """Bytes/s of the device's own memory."""
    intra_node_bandwidth: float | None = None
    """Bytes/s of one device to the others of its node, in one direction, all links together."""
    inter_node_bandwidth: float | None = None
    """Bytes/s of one device to other nodes: a matter of the machine, not of the chip, so mostly None."""
    matrix_cores: int | None = None
    """Ascend: cube cores. GPU: streaming multiprocessors."""
    vector_cores: int | None = None
    """Ascend: vector cores. GPU: streaming multiprocessors."""
    unified_buffer_bytes: int | None = None
    """Ascend: UB of one vector core, what all tiles of a kernel's vector part have to fit in."""
    l1_bytes: int | None = None
    """Ascend: L1 of one cube core. GPU: shared memory that one block can have."""
    l0a_bytes: int | None = None
    l0b_bytes: int | None = None
    l0c_bytes: int | None = None
    """Ascend: operand and result buffers of one cube core."""
    float64: bool | None = None
    """Whether float64 operators run on the device."""
    bfloat16: bool | None = None
    fp8: bool | None = None

    def peak(self, kind: str) -> float | None:
        """Peak FLOP/s for one kind of matrix product, or None."""
        return self.peak_flops.get(kind)


def _flops(**tera: float) -> Mapping[str, float]:
    return MappingProxyType({kind: value * TERA for kind, value in tera.items()})


def _a100(name: str, memory: int, bandwidth: float, link: float | None) -> DeviceFacts:
    return DeviceFacts(
        name=name,
        source=_NVIDIA_A100,
        peak_flops=_flops(fp64=19.5, fp32=19.5, hf32=156, bf16=312, fp16=312),
        memory_bytes=memory,
        memory_bandwidth=bandwidth,
        intra_node_bandwidth=link,
        matrix_cores=108,
        vector_cores=108,
        l1_bytes=163 * KiB,
        float64=True,
        bfloat16=True,
        fp8=False,
    )


def _hopper_sxm(name: str, source: str, memory: int, bandwidth: float) -> DeviceFacts:
    return DeviceFacts(
        name=name,
        source=source,
        peak_flops=_flops(fp64=67, fp32=67, hf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9),
        memory_bytes=memory,
        memory_bandwidth=bandwidth,
        intra_node_bandwidth=450 * GB,  # NVLink 4: 900 GB/s, both directions
        matrix_cores=132,
        vector_cores=132,
        l1_bytes=227 * KiB,
        float64=True,
        bfloat16=True,
        fp8=True,
    )


def _ascend(name: str, cube_cores: int) -> DeviceFacts:
    """A 910B (A2) or 910_93 (A3): peak, memory and links stay None, no data sheet with them is published.

    Their cores store float64 and do not compute in it; operators that torch_npu registers for it fail or leave the
    cores, so the answer is no.
    """
    return DeviceFacts(
        name=name,
        source=_ASCEND_IR,
        matrix_cores=cube_cores,
        vector_cores=2 * cube_cores,
        unified_buffer_bytes=192 * KiB,
        l1_bytes=512 * KiB,
        l0a_bytes=64 * KiB,
        l0b_bytes=64 * KiB,
        l0c_bytes=128 * KiB,
        float64=False,
        bfloat16=True,
        fp8=False,
    )


_ASCEND_CUBE_CORES = {
    # A2
    "Ascend910B1": 24,
    "Ascend910B2": 24,
    "Ascend910B2C": 24,
    "Ascend910B3": 20,
    "Ascend910B4": 20,
    "Ascend910B4-1": 20,
    # A3: one die, which is what a process sees as one device
    "Ascend910_9362": 20,
    "Ascend910_9372": 20,
    "Ascend910_9381": 24,
    "Ascend910_9382": 24,
    "Ascend910_9391": 24,
    "Ascend910_9392": 24,
}

_TABLE = (
    _a100("NVIDIA A100-SXM4-40GB", 40 * GB, 1_555 * GB, 300 * GB),  # NVLink 3: 600 GB/s, both directions
    _a100("NVIDIA A100-SXM4-80GB", 80 * GB, 2_039 * GB, 300 * GB),
    _a100("NVIDIA A100-PCIE-40GB", 40 * GB, 1_555 * GB, None),  # with or without a bridge between two cards
    _a100("NVIDIA A100 80GB PCIe", 80 * GB, 1_935 * GB, None),
    _hopper_sxm("NVIDIA H100 80GB HBM3", _NVIDIA_H100, 80 * GB, 3_350 * GB),
    _hopper_sxm("NVIDIA H200", _NVIDIA_H200, 141 * GB, 4_800 * GB),
    *(_ascend(name, cores) for name, cores in _ASCEND_CUBE_CORES.items()),
)

FACTS: Mapping[str, DeviceFacts] = MappingProxyType({facts.name: facts for facts in _TABLE})


def facts_of(name: str) -> DeviceFacts:
    """The facts of the device that a driver calls `name`; all None, under that name, where it is not in the table.

    The Ascend 950 is there to be asked for (`Ascend950PR_*`, `Ascend950DT_*`), but nothing is public: the target table
    of its compiler says -1 for every size.
    """
    return FACTS.get(name, DeviceFacts(name=name))


def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of a device of this process, by the name that its module gives; a CPU has none."""
    if device.type == "cpu":
        return DeviceFacts(name="cpu", float64=True, bfloat16=True)
    name = getattr(device_module(device), "get_device_name", None)
    return DeviceFacts(name=device.type) if name is None else facts_of(name(device))
