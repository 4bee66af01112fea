"""FuXi attention, three channels with bucketed times: against padded PyTorch, in time and memory."""

from __future__ import annotations

import torch

from benchmarks import harness
from benchmarks.attention import lengths, memory, yardsticks
from benchmarks.attention.problems import Case, Side, problem, runner
from benchmarks.attention.report import Options, Report, rate, share, times_faster


def measure(options: Options) -> Report:
    """All figures of FuXi attention."""
    report = Report("fuxi")
    drawn = lengths.kuairand(options.batch, cap=options.cap, seed=options.seed)
    case = Case(
        kernel="fuxi",
        lengths=drawn.values,
        cap=options.cap,
        heads=options.heads,
        dim=options.dim,
        implementation=options.implementation,
        seed=options.seed,
    )
    report.figures |= {"lengths": drawn.values, "lengths_source": drawn.source, "pairs": case.pairs}
    report.figures["implementation"] = problem(case).explanation
    sides: tuple[Side, ...] = ("ours", "padded", *(("compiled",) if options.compiled else ()))
    variants = {side: runner(case.of(side)) for side in sides} | {"mm": yardsticks.mm(torch.float32)}
    timings = report.steadily(
        "against padded rows", lambda: harness.take_turns(variants, rounds=options.rounds), options
    )
    report.seconds(timings)
    ratio = times_faster(timings["padded"], timings["ours"])
    report.ratio("speedup_vs_padded", "times faster than padded", ratio, aim=(">=", 8))
    if options.compiled:
        ratio = times_faster(timings["compiled"], timings["ours"])
        report.ratio("speedup_vs_compiled", "times faster than padded under torch.compile", ratio)
    mm = rate(yardsticks.MM_FLOPS, timings["mm"])
    report.ratio("gemm_fraction", "share of torch.mm", share(case.useful_flops, timings["ours"], mm))
    report.ratio("gemm_fraction_padded", "padded: share of torch.mm", share(case.useful_flops, timings["padded"], mm))
    report.memory_saved(*(memory.measure(case.of(side), threads=options.threads) for side in ("ours", "padded")))
    return report
