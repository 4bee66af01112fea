"""Preprocessing: seconds and peak memory of `prepare` on generated KuaiRand-27K logs of 20 and 60 million rows.

    python -m benchmarks.prepare [--json] [--scratch DIR] [--runs N]

Aims on two cores: 20 M rows in at most 60 s with a peak under 4 GB, and at 60 M rows a peak at most 1.5 times that.
Logs (6 GB) are generated first, once, and not timed. Every run is a process of its own; its peak is
the largest resident size that the kernel recorded for it (ru_maxrss), file pages it has mapped included. Seconds are
the wall clock of the whole process, start of Python included; the processor seconds are printed beside them, since they
say more on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from turbogr_plugin.data import synthetic

SMALL, LARGE = 20_000_000, 60_000_000

_CHILD = """
import json, sys
from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.prepare import prepare
report = prepare(PrepareConfig(format="kuairand", inputs=[sys.argv[1]]), sys.argv[2])
print(json.dumps(report.as_dict()))
"""


@dataclass(frozen=True)
class Run:
    """One run of prepare."""

    wall: float
    processor: float
    peak_gb: float
    kept: int


def run_prepare(logs: Path, output: Path) -> Run:
    """Run prepare on `logs` in a process of its own."""
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(logs), str(output)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"prepare ended with exit code {child.returncode}")
    return Run(
        wall=time.perf_counter() - started,
        processor=usage.ru_utime + usage.ru_stime,
        peak_gb=usage.ru_maxrss * 1024 / 1e9,
        kept=json.loads(said.splitlines()[-1])["num_interactions"],
    )


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object in the last line")
    parser.add_argument("--scratch", type=Path, help="folder for the logs, about 6 GB (default: the system's)")
    parser.add_argument("--runs", type=int, default=3, help="runs at 20 M rows, of which the median counts")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="turbogr-prepare-", dir=options.scratch))
    try:
        for rows in (SMALL, LARGE):
            print(f"generating {rows:,} rows (not timed)", flush=True)
            synthetic.generate(folder / str(rows), rows=rows, seed=rows)

        def measure() -> tuple[list[Run], Run]:
            small = [run_prepare(folder / str(SMALL), folder / "store") for _ in range(options.runs)]
            return small, run_prepare(folder / str(LARGE), folder / "store")

        (small, large), drift = harness.steadily(measure, attempts=2)
    finally:
        shutil.rmtree(folder)
    seconds = statistics.median(run.wall for run in small)
    peak = max(run.peak_gb for run in small)
    harness.print_table(
        "prepare: generated KuaiRand-27K logs, default feedback rules, 5-core",
        ("rows", "wall s", "processor s", "peak GB", "rows/s", "kept"),
        [
            (rows, run.wall, run.processor, run.peak_gb, rows / run.wall, run.kept)
            for rows, runs in ((SMALL, small), (LARGE, [large]))
            for run in runs
        ],
    )
    figures = {
        "rows_per_second": SMALL / seconds,
        "seconds_20m": seconds,
        "processor_seconds_20m": statistics.median(run.processor for run in small),
        "peak_gb": peak,
        "peak_ratio_60m_20m": large.peak_gb / peak,
    }
    harness.finish(figures, drift=drift, as_json=options.json)


if __name__ == "__main__":
    main()
