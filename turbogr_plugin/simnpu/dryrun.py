"""Runs a training script, unchanged, on the simulated npu, and reports what it would meet on a real one.

The script runs in processes of its own: every Python process of the tree gets the device at the end of its
`import torch` (bootstrap/sitecustomize.py), records what it does (dryrun_process.py) and leaves it in a folder, from
which this module makes the report (dryrun_report.py).

Left out: time. Operators run on the CPU, so nothing here tells how fast an NPU is; nor how accurate, as the arithmetic
is the CPU's. Processes that start Python with -E, -I or -S are not seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from turbogr_plugin.errors import InputError
from turbogr_plugin.simnpu.dryrun_record import FOLDER, SETTINGS, read_all
from turbogr_plugin.simnpu.dryrun_report import DryRunReport, literals_of

MAX_DEVICES = 64
Policy = Literal["report", "strict", "permissive"]
POLICIES = get_args(Policy)


@dataclass(frozen=True, kw_only=True)
class DryRunSettings:
    """What is simulated."""

    devices: int = 8
    """Simulated devices of this machine."""
    memory_gb: float = 64.0
    """Memory of each device, in GB of 10^9 bytes; an allocation beyond it fails as on a device."""
    policy: Policy = "report"
    """What an operator without a kernel there does: run on the CPU, as there, and be reported; raise; run unseen."""
    nproc_per_node: int | None = None
    """Ranks to start the script with, as torchrun does; None starts it once."""

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MAX_DEVICES:
            raise InputError(f"--devices {self.devices}: 1 to {MAX_DEVICES} are allowed")
        if not self.memory_gb > 0:
            raise InputError(f"--memory-gb {self.memory_gb}: it must be positive")
        if self.nproc_per_node is not None and not 1 <= self.nproc_per_node <= self.devices:
            raise InputError(
                f"--nproc-per-node {self.nproc_per_node}: 1 to {self.devices} are allowed, one rank per device "
                f"(--devices {self.devices})"
            )


def run(
    script: Path, arguments: Sequence[str], settings: DryRunSettings, *, output_to_stderr: bool = False
) -> DryRunReport:
    """Runs the script to its end and reports.

    An interrupt from the keyboard ends the script, not the report.

    Args:
        script: a Python file.
        arguments: those of the script.
        settings: what is simulated.
        output_to_stderr: lets the script write to standard error what it writes to standard output.

    Raises:
        InputError: no such script.
    """
    if not script.is_file():
        raise InputError(f"SCRIPT {script} is not a file: give the path of a Python script")
    launcher: list[str] = []
    if settings.nproc_per_node is not None:
        ranks = str(settings.nproc_per_node)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    with tempfile.TemporaryDirectory(prefix="turbogr-dryrun-") as name:
        folder = Path(name)
        (folder / SETTINGS).write_text(json.dumps(asdict(settings)))
        command = [sys.executable, *launcher, str(script), *arguments]
        code, interrupted = _wait_for(
            subprocess.Popen(command, env=_environment(folder), stdout=2 if output_to_stderr else None)
        )
        records = read_all(folder)
    return DryRunReport(
        script=script,
        settings=asdict(settings),
        exit_code=code,
        interrupted=interrupted,
        processes=records,
        literals=literals_of(script, records),
    )


def _environment(folder: Path) -> dict[str, str]:
    bootstrap = str(Path(__file__).parent / "bootstrap")
    former = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([bootstrap, *filter(None, [former])]),
        FOLDER: str(folder),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu would claim the device, and fail where CANN is missing
        "CUDA_VISIBLE_DEVICES": "",  # an NPU host has no GPU
    }


def _wait_for(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Exit code, and whether the keyboard has interrupted; a second interrupt kills."""
    interrupted = False
    while True:
        try:
            return process.wait(), interrupted
        except KeyboardInterrupt:  # the terminal has sent it to the script as well
            if interrupted:
                process.kill()
            interrupted = True
