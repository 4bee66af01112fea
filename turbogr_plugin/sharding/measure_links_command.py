"""`turbogr measure-links`, run by every rank of the job whose links are to be measured:

torchrun --nproc-per-node 8 -m turbogr_plugin.cli measure-links --device npu --output links.json
"""

from __future__ import annotations

import argparse
import math
from datetime import timedelta
from pathlib import Path

from turbogr_plugin.backend.collectives import process_group, ranks_per_host
from turbogr_plugin.backend.current_device import current_device
from turbogr_plugin.sharding.link_measurement import LinkMeasurement, measure_links

#: A rank that never comes fails the others after this long.
_PATIENCE = timedelta(minutes=5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--output", type=Path, required=True, help="File to write, by rank 0; an existing one is replaced")
    add("--device", default="cpu", help="cpu, cuda or npu (%(default)s)")
    add("--megabytes", type=float, default=8.0, help="That a rank sends at once (%(default)g)")
    add("--repeats", type=int, default=15, help="Of each measurement (%(default)s)")
    add("--memory-gb", type=float, help="That a rank has for tables (the device's, on cpu its share of the host's)")
    add("--nodes-per-domain", type=int, default=1, help="Hosts that fast links join (%(default)s)")


def run(given: argparse.Namespace) -> LinkMeasurement | None:
    """Measures and writes the file; the measurement on rank 0, None on the others.

    Raises:
        ValueError: an option with a value that is not allowed.
    """
    if given.memory_gb is not None and not 0 < given.memory_gb < math.inf:
        raise ValueError(f"--memory-gb must be positive, got {given.memory_gb:g}")
    if not given.output.resolve().parent.is_dir():
        raise ValueError(f"--output: {given.output.resolve().parent} is no folder")
    device = current_device(given.device)
    with process_group(device, timeout=_PATIENCE) as group:
        found = measure_links(
            device,
            ranks_per_node=ranks_per_host(group),
            megabytes=given.megabytes,
            repeats=given.repeats,
            memory_bytes=None if given.memory_gb is None else int(given.memory_gb * 1e9),
            nodes_per_domain=given.nodes_per_domain,
        )
        if group.rank() != 0:
            return None
        found.save(given.output)
        return found
