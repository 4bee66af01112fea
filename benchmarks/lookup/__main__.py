"""The jagged embedding lookup against fbgemm's, padded and jagged, and what FP16 rows save.

    python -m benchmarks.lookup [--json]

The paper's shape (its Table 2): 1,064,960 positions of which 537,019 are padding; 8 tables of 200,000 rows of 128, ids
by the popularity of KuaiRand-27K's videos, fp32, row-wise Adagrad fused into the backward pass, on CPU, two threads.
Ours looks up the ids that are there, in C++; fbgemm looks up the padded ids, as one does without jagged tensors, and
the same jagged ids. Forward and backward are timed apart; every ratio is the median of ratios taken turn by turn. All
update tables that begin alike; those of ours and of fbgemm on the same ids must agree at the end.

Bytes are counted on two gloo ranks with TorchRec's sharded collections (bytes.py). docs/performance.md: a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.attention.report import Aim, Report, times_faster
from benchmarks.harness import Timing
from benchmarks.lookup import bytes as counted_bytes
from benchmarks.lookup.popularity import Ids, draw
from benchmarks.lookup.problems import LEARNING_RATE, Step, fbgemm, ours, take_turns
from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.jagged_unique import jagged_unique

AIMS: Mapping[str, Aim] = {
    "speedup_forward": (">=", 1.6),
    "speedup_backward": (">=", 1.5),
    "vs_tbe_forward": (">=", 0.97),
    "vs_tbe_backward": (">=", 1.4),
    "bytes_ratio": ("<=", 0.51),
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lookup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for name, standard, what in (
        ("tables", 8, "tables, one feature each"),
        ("rows", 200_000, "rows of each table"),
        ("dim", 128, "width of the tables"),
        ("batch", 130, "rows of the batch"),
        ("length", 1024, "positions of each row and feature"),
        ("padding", 537_019, "of all positions"),
        ("bag", 20, "mean number of ids of the pooled lookup's bags"),
        ("rounds", 7, "timed turns"),
        ("threads", 2, "threads of torch"),
        ("attempts", 2, "how often a measurement is made at most while the machine drifts"),
        ("seed", 0, "of the ids and the values"),
    ):
        parser.add_argument(f"--{name}", type=int, default=standard, help=f"{what} (default {standard})")
    parser.add_argument("--implementation", default="cpu", help="of ours (default cpu)")
    parser.add_argument("--no-bytes", dest="bytes", action="store_false", help="leave the two ranks out")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Report:
    """All figures."""
    report = Report("lookup")
    generator = torch.Generator().manual_seed(options.seed)
    ids = draw(options.tables, options.batch, options.length, options.padding, options.rows, options.seed)
    weights = torch.empty(options.tables * options.rows, options.dim).uniform_(-0.1, 0.1, generator=generator)
    unique = [len(part.unique()) for part in ids.by_feature(options.tables)]
    report.figures |= {
        "positions": ids.padded.numel(),
        "padding": ids.padding,
        "ids": ids.jagged.numel(),
        "unique_ids": sum(unique),
        "popularity": ids.source,
        "implementation": options.implementation,
    }
    _sequences(report, ids, weights, options)
    _bags(report, ids, weights, options)
    _parts(report, ids, options)
    if options.bytes:
        counted = counted_bytes.measure()
        report.figures["bytes"] = counted["bytes"]
        ratio = counted["bytes_ratio"]
        what = "bytes returned and sent with FP16 rows / FP32, largest of all counters"
        report.figure("bytes_ratio", what, ratio, aim=AIMS["bytes_ratio"])
    return report


def _steadily(report: Report, what: str, options: argparse.Namespace, measure: Callable[[], Any]) -> Any:
    print(f"lookup: {what}", file=sys.stderr, flush=True)
    result, drift = harness.steadily(measure, attempts=options.attempts)
    report.drifts.append(drift)
    return result


def _timed(
    report: Report, what: str, options: argparse.Namespace, steps: Mapping[str, Step]
) -> dict[str, tuple[Timing, Timing]]:
    for step in steps.values():
        step.prepare()
    timings: dict[str, tuple[Timing, Timing]] = _steadily(
        report, what, options, lambda: take_turns(steps, rounds=options.rounds)
    )
    for name, passes in timings.items():
        for direction, timing in zip(("forward", "backward"), passes, strict=True):
            report.figures.setdefault("seconds", {})[f"{what}: {name} {direction}"] = list(timing.seconds)
            report.figure(
                f"seconds_{what}_{name}_{direction}".replace(" ", "_"), f"{what}: {name}, {direction}, s", timing.median
            )
    return timings


def _ratios(
    report: Report, timings: Mapping[str, tuple[Timing, Timing]], slow: str, fast: str, key: str, what: str
) -> None:
    for number, direction in enumerate(("forward", "backward")):
        name = f"{key}_{direction}"
        ratio = times_faster(timings[slow][number], timings[fast][number])
        report.ratio(name, f"{what}, {direction}", ratio, aim=AIMS.get(name))


def _sequences(report: Report, ids: Ids, weights: Tensor, options: argparse.Namespace) -> None:
    features = options.tables
    steps = {
        "padded": fbgemm(ids.padded, ids.padded_offsets, weights, features),
        "fbgemm": fbgemm(ids.jagged, ids.jagged_offsets, weights, features),
        "ours": ours(ids.jagged, ids.jagged_offsets, weights, features, implementation=options.implementation),
    }
    timings = _timed(report, "sequences", options, steps)
    _ratios(report, timings, "padded", "ours", "speedup", "times faster than fbgemm on padded ids")
    _ratios(report, timings, "fbgemm", "ours", "vs_tbe", "times faster than fbgemm on the same ids")
    _ratios(report, timings, "padded", "fbgemm", "tbe_padded_vs_jagged", "fbgemm: padded / jagged")
    difference = float((steps["ours"].tables() - steps["fbgemm"].tables()).abs().max())
    what = "largest difference of a weight to fbgemm's after all steps"
    report.figure("largest_difference", what, difference, remark=f"learning rate {LEARNING_RATE}")


def _bags(report: Report, ids: Ids, weights: Tensor, options: argparse.Namespace) -> None:
    features = options.tables
    parts = ids.by_feature(features)
    bags = ids.jagged.numel() // features // options.bag
    ends = [torch.linspace(0, part.numel(), bags + 1).long()[1:] for part in parts]
    begins = [sum(part.numel() for part in parts[:number]) for number in range(features)]
    offsets = torch.cat([torch.zeros(1).long(), *(end + begin for end, begin in zip(ends, begins, strict=True))])
    steps = {
        "fbgemm": fbgemm(ids.jagged, offsets, weights, features, pooled=True),
        "ours": ours(ids.jagged, offsets, weights, features, pooled=True, implementation=options.implementation),
    }
    timings = _timed(report, "bags", options, steps)
    _ratios(report, timings, "fbgemm", "ours", "vs_tbe_bags", f"bags of {options.bag}: times faster than fbgemm")


def _parts(report: Report, ids: Ids, options: argparse.Namespace) -> None:
    features, which = options.tables, options.implementation
    tables = torch.cat([torch.zeros(1).long(), ids.jagged_offsets[options.batch :: options.batch]])
    rows = ids.jagged + torch.arange(features).repeat_interleave(tables.diff()) * options.rows
    grads = torch.randn(rows.numel(), options.dim)
    parts = ids.by_feature(features)
    variants: dict[str, Callable[[], object]] = {
        "jagged_unique": lambda: jagged_unique(ids.jagged, tables, implementation=which),
        "torch.unique": lambda: [part.unique(return_inverse=True) for part in parts],
        "coalesce_rows": lambda: coalesce_rows(rows, grads, implementation=which),
        "sparse coalesce": lambda: torch.sparse_coo_tensor(
            rows.unsqueeze(0), grads, (features * options.rows, options.dim), check_invariants=False
        ).coalesce(),
    }
    timings = _steadily(report, "parts", options, lambda: harness.take_turns(variants, rounds=options.rounds))
    report.seconds({f"parts: {name}": timing for name, timing in timings.items()})
    for key, slow, fast, what in (
        ("vs_torch_unique", "torch.unique", "jagged_unique", "jagged_unique: times faster than torch.unique"),
        ("vs_sparse_coalesce", "sparse coalesce", "coalesce_rows", "coalesce_rows: times faster than torch's coalesce"),
    ):
        report.ratio(key, what, times_faster(timings[slow], timings[fast]))


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    report = measure(options)
    report.print(f"lookup: {report.figures['ids']:,} ids of {report.figures['positions']:,} positions, ours in C++")
    worst = max(report.drifts, key=lambda drift: abs(drift.after / drift.before - 1))
    record = {**report.figures, "threads": options.threads, "seed": options.seed}
    harness.finish(record, drift=worst, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
