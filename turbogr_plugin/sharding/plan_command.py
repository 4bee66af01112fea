"""`turbogr plan`: predicted steps, communication and efficiency of the paper's models, from 8 to thousands of ranks.

turbogr plan --ranks 8..4096
turbogr plan --ranks 32,128 --model fuxi-large --at-least 350 --wire fp16 --topology links.json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torchrec.distributed.planner.types import Topology

from turbogr_plugin.sharding.link_bandwidths import link_bandwidths
from turbogr_plugin.sharding.machines import MACHINES
from turbogr_plugin.sharding.scale_prediction import (
    PAPER_MODELS,
    ScalePoint,
    kuairand_items,
    predict_scale,
    scale_lines,
)
from turbogr_plugin.sharding.topologies import (
    cluster,
    machine_topology,
    memory_bandwidth,
    memory_of,
    topology_from_file,
)

_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: TFLOP/s per device that the Table 1 of the paper implies for 128 devices: samples/s x FLOPs / MFU = 12.12 PFLOP/s.
_PEAK_OF_THE_PAPER = 94.7


@dataclass(frozen=True)
class ScaleReport:
    """Predictions of several models."""

    assumptions: list[str]
    models: dict[str, list[ScalePoint]]

    def lines(self) -> list[str]:
        """Assumptions, then a table per model."""
        found = list(self.assumptions)
        for name, points in self.models.items():
            found += ["", name, *scale_lines(PAPER_MODELS[name], points)]
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "assumptions": self.assumptions,
            "models": {name: [asdict(point) for point in points] for name, points in self.models.items()},
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    machines = ", ".join(MACHINES)
    add = parser.add_argument
    add("--ranks", default="8..4096", help="First..last by powers of two, or a list: 8,32,128 (%(default)s)")
    add("--model", default="all", help=f"all, or of {', '.join(PAPER_MODELS)} (%(default)s)")
    add("--machine", default="atlas-800t-a2", help=f"Published figures: {machines} (%(default)s)")
    add("--topology", metavar="FILE", help="Links and memory as measured, in place of --machine")
    add("--at-least", type=int, default=350, help="Items with so many exposures in KuaiRand-27K (%(default)s)")
    add("--peak-tflops", type=float, help="Of one device; the machine's, else what the paper's tables imply")
    add("--utilisation", type=float, default=0.5, help="Share of it that the dense part reaches alone (%(default)s)")
    add("--wire", choices=list(_WIRES), default="fp32", help="Of gradients between groups (%(default)s)")
    add("--group-size", type=int, help="Ranks that hold every table once (chosen for each size)")
    add("--overlap", type=float, default=0.0, help="Share of the tables' communication that is hidden (%(default)s)")
    add("--json", action="store_true", help="Print JSON")


def run(given: argparse.Namespace) -> ScaleReport:
    """Predicts what the options ask for.

    Raises:
        ValueError: an option with a value that is not allowed.
    """
    if given.model != "all" and given.model not in PAPER_MODELS:
        raise ValueError(f"--model must be all or one of {', '.join(PAPER_MODELS)}, got {given.model!r}")
    names = list(PAPER_MODELS) if given.model == "all" else [given.model]
    measured = None if given.topology is None else topology_from_file(given.topology)
    topologies = [_of_size(given.machine, measured, ranks) for ranks in ranks_of(given.ranks)]
    published = MACHINES[given.machine].peak_flops if measured is None else None
    peak = given.peak_tflops or (published / 1e12 if published else _PEAK_OF_THE_PAPER)
    access = kuairand_items(given.at_least)
    planner: dict[str, Any] = {"wire_dtype": _WIRES[given.wire], "overlap": given.overlap}
    if given.group_size is not None:
        planner["group_size"] = given.group_size
    models = {
        name: predict_scale(
            PAPER_MODELS[name],
            topologies,
            access=access,
            peak_flops=peak * 1e12,
            utilisation=given.utilisation,
            planner=planner,
        )
        for name in names
    }
    links = link_bandwidths(topologies[-1].comms_bandwidths)
    source = f"{given.machine} (published figures)" if measured is None else f"{given.topology} (measured)"
    assumptions = [
        f"{source}: {links.intra.all_to_all / 1e9:.3g} GB/s per rank inside a fast domain, "
        f"{links.inter.all_to_all / 1e9:.3g} GB/s between",
        f"dense part at {given.utilisation:.0%} of {peak:.4g} TFLOP/s per rank; tables: {access.rows:,} items with at "
        f"least {given.at_least} exposures, row-wise Adagrad; gradients between groups in {given.wire}",
        "64 negatives per position; predictions, not measurements",
    ]
    return ScaleReport(assumptions, models)


def ranks_of(text: str) -> list[int]:
    """Numbers of ranks: "8..4096" by powers of two, "8,32,128" as listed.

    Raises:
        ValueError: neither, or numbers below 1 or falling.
    """
    parts = text.split("..")
    try:
        if len(parts) == 2:
            first, last = (int(part) for part in parts)
            found = [first * 2**power for power in range(32) if first * 2**power <= last]
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"--ranks must be like 8..4096 or 8,32,128 with numbers >= 1, got {text!r}")
    return found


def _of_size(name: str, measured: Topology | None, ranks: int) -> Topology:
    """The cluster of `ranks`; less than a host is part of one."""
    if measured is None:
        machine = MACHINES.get(name)
        per_node = ranks if machine is None else min(ranks, machine.devices_per_node)
        return machine_topology(name, nodes=_nodes(ranks, per_node), devices_per_node=per_node)
    per_node = min(ranks, measured.local_world_size)
    return cluster(
        device=measured.compute_device,
        devices_per_node=per_node,
        nodes=_nodes(ranks, per_node),
        nodes_per_domain=max(1, measured.intra_group_size // measured.local_world_size),
        memory_bytes=memory_of(measured, measured.devices[0].storage),
        memory_bandwidth=memory_bandwidth(measured),
        links=link_bandwidths(measured.comms_bandwidths),
    )


def _nodes(ranks: int, per_node: int) -> int:
    if ranks % per_node:
        raise ValueError(f"--ranks must be whole hosts of {per_node} ranks, got {ranks}")
    return ranks // per_node
