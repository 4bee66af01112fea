"""The one harness of all benchmarks: what ran where, timing in turns, machine speed before and after, and the output.

A benchmark prints a table for people and, with `--json`, one JSON object as its last line. Ratios come from one run in
which the variants take turns, as medians with their spread. Shared machines drift by a factor of two, so the machine's
own speed is sampled before and after, and a measurement around which it drifted by more than 15 % is repeated.

Left out: profiling, and any knowledge of what is measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

PACKAGES = ("turbogr-plugin", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "duckdb", "pyarrow")
DRIFT_ALLOWED = 0.15


def machine() -> dict[str, Any]:
    """Machine, versions and commit of this run, for the record."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout, with `+` when files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs."""

    median: float
    lower: float
    """First quartile."""
    upper: float
    """Third quartile."""
    runs: int
    seconds: tuple[float, ...] = ()
    """All of them, in the order of the turns."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Median and quartiles of the runs, of which there is at least one."""
        return cls(*_quartiles(seconds), len(seconds), tuple(seconds))

    def __str__(self) -> str:
        return f"{self.median:.4g} s [{self.lower:.4g} .. {self.upper:.4g}, {self.runs} runs]"


@dataclass(frozen=True)
class Ratio:
    """A ratio that was taken turn by turn, so that a slow minute hits both of its sides."""

    median: float
    lower: float
    """First quartile."""
    upper: float
    """Third quartile."""

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> Ratio:
        """Median and quartiles of the quotients of the turns."""
        return cls(*_quartiles([above / below for above, below in zip(over, under, strict=True)]))

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.lower:.3g} .. {self.upper:.3g}]"


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, first quartile, third quartile)."""
    lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75])
    return float(median), float(lower), float(upper)


def take_turns(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    synchronize: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Time the variants in turns, a b c a b c, so that slow minutes hit all of them.

    Args:
        variants: name -> what to time.
        rounds: timed runs of each.
        warmup: runs of each before, not timed.
        synchronize: waits for the device; called before and after every timed run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + rounds):
        for name, run in variants.items():
            if synchronize:
                synchronize()
            started = time.perf_counter()
            run()
            if synchronize:
                synchronize()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return {name: Timing.of(values) for name, values in seconds.items()}


def probe() -> float:
    """Machine speed: seconds of a fixed piece of work (matrix products, memory traffic, interpreter), about 0.3 s."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((384, 384), dtype=np.float32)
    values = rng.integers(0, 1 << 40, size=1 << 20)

    def work() -> float:
        started = time.perf_counter()
        product = matrix
        for _ in range(10):
            product = product @ matrix
            product /= np.abs(product).max()
        np.sort(values)
        sum(number * number for number in range(100_000))
        return time.perf_counter() - started

    work()
    return statistics.median(work() for _ in range(5))


@dataclass(frozen=True)
class Drift:
    """Machine speed around a measurement."""

    before: float
    after: float
    attempts: int
    steady: bool
    """Whether the last attempt stayed within the allowed drift."""

    def __str__(self) -> str:
        change = (self.after / self.before - 1) * 100
        judged = "steady" if self.steady else f"NOT steady within {DRIFT_ALLOWED:.0%}: read the figures with care"
        return f"machine speed {change:+.0f} % during the run, {self.attempts} attempt(s): {judged}"


def steadily(measure: Callable[[], T], *, attempts: int = 3) -> tuple[T, Drift]:
    """Measure between two speed probes; again, up to `attempts` times, while the machine drifts by more than 15 %."""
    for attempt in range(1, attempts + 1):
        before = probe()
        result = measure()
        after = probe()
        steady = max(before, after) / min(before, after) - 1 <= DRIFT_ALLOWED
        if steady or attempt == attempts:
            return result, Drift(before, after, attempt, steady)
    raise ValueError(f"attempts must be at least 1, got {attempts}.")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in columns as wide as their widest cell; numbers to the right."""
    texts = [[f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[n]) for row in [list(header), *texts]) for n in range(len(header))]
    numeric = [all(isinstance(row[n], (int, float)) for row in rows) for n in range(len(header))]
    print(title)
    for row in [list(header), ["-" * width for width in widths], *texts]:
        cells = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)]
        print("  " + "  ".join(cells).rstrip())


def finish(figures: Mapping[str, Any], *, drift: Drift | None, as_json: bool) -> None:
    """Print machine and drift and, if asked for, the figures as one JSON object in the last line."""
    here = machine()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    print(f"{here['cpu']}, {here['cores']} cores, {here['memory_gb']} GB, load {here['load_average'][0]}; {versions}")
    if drift:
        print(drift)
    if as_json:
        record = {**figures, "machine": here, "drift": asdict(drift) if drift else None}
        print(json.dumps(record))
