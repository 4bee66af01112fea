"""Fused HSTU and FuXi attention and their dense neighbours, against PyTorch without them and against the machine.

    python -m benchmarks.attention [--json] [--kernel hstu|fuxi|gate|uvqk]

Lengths are drawn from the real list of KuaiRand-27K's clicks per user and capped; fp32, forward and backward by
torch.autograd.grad, two threads. Every ratio is the median of ratios taken turn by turn in one process. Useful work
counts allowed pairs alone, 4 D per pair and head (FuXi 8), times 3.5 with backward. The baselines (`baselines/`):
eager padded PyTorch with the bias as a dense tensor, no loop over rows or heads; the same under torch.compile; the
padded form of Meta's code; for the dense neighbours the eager chain. docs/performance.md: the method, and a run.

The JSON object has the figures of the kernel; without --kernel those of HSTU, and those of each under its name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import harness
from benchmarks.attention import dense, fuxi, hstu
from benchmarks.attention.report import Options, Report

KERNELS: dict[str, Callable[[Options], Report]] = {
    "hstu": hstu.measure,
    "fuxi": fuxi.measure,
    "gate": dense.measure_gate,
    "uvqk": dense.measure_uvqk,
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--kernel", choices=KERNELS, help="only this one (default: all)")
    for name, what in (
        ("cap", "longest row"),
        ("batch", "rows"),
        ("heads", "heads"),
        ("dim", "dim of a head"),
        ("tokens", "tokens of the dense neighbours"),
        ("rounds", "turns of what takes seconds; the rest takes more"),
        ("threads", "threads of torch"),
        ("seed", "of the lengths and the values"),
    ):
        standard = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=standard, help=f"{what} (default {standard})")
    parser.add_argument("--implementation", help="of ours, instead of the fastest that serves the call")
    parser.add_argument("--no-compiled", dest="compiled", action="store_false", help="leave torch.compile out")
    return parser.parse_args(arguments)


def combined(reports: list[Report]) -> dict[str, Any]:
    """The JSON object: the figures of one report, or those of HSTU and each under its name."""
    if len(reports) == 1:
        return {"kernel": reports[0].kernel, **reports[0].figures}
    return {**reports[0].figures, **{report.kernel: report.figures for report in reports}}


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    parsed = vars(parse_arguments(arguments))
    as_json, kernel = parsed.pop("json"), parsed.pop("kernel")
    options = Options(**parsed)
    torch.set_num_threads(options.threads)
    reports = []
    for name in [kernel] if kernel else KERNELS:
        report = KERNELS[name](options)
        report.print(f"{name}: {report.figures['implementation']}")
        print(flush=True)
        reports.append(report)
    drifts = [drift for report in reports for drift in report.drifts]
    worst = max(drifts, key=lambda drift: abs(drift.after / drift.before - 1))
    record = {**combined(reports), "threads": options.threads, "seed": options.seed}
    harness.finish(record, drift=worst, as_json=as_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
