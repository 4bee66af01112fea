"""The dense neighbours of the attention, norm · gate · dropout and norm + projection + SiLU, against eager chains."""

from __future__ import annotations

import torch

from benchmarks import harness
from benchmarks.attention import memory, yardsticks
from benchmarks.attention.problems import Case, Kernel, problem, runner
from benchmarks.attention.report import Options, Report, rate, share, times_faster


def measure_gate(options: Options) -> Report:
    """Figures of norm · gate · dropout, which is bound by memory traffic and, in ours, by the keyed random numbers."""
    return _measure("gate", options)


def measure_uvqk(options: Options) -> Report:
    """Figures of norm + projection + SiLU, most of which is matrix products."""
    return _measure("uvqk", options)


def _measure(kernel: Kernel, options: Options) -> Report:
    report = Report(kernel)
    whole, rest = divmod(options.tokens, options.cap)
    lengths = (options.cap,) * whole + ((rest,) if rest else ())
    case = Case(
        kernel=kernel,
        lengths=lengths,
        cap=options.cap,
        heads=options.heads,
        dim=options.dim,
        implementation=options.implementation,
        seed=options.seed,
    )
    report.figures |= {"tokens": case.tokens, "implementation": problem(case).explanation}
    variants = {side: runner(case.of(side)) for side in ("ours", "eager")} | {"mm": yardsticks.mm(torch.float32)}
    rounds = 2 * options.fast_rounds
    timings = report.steadily(
        "against the eager chain", lambda: harness.take_turns(variants, rounds=rounds, warmup=2), options
    )
    report.seconds(timings)
    ratio = times_faster(timings["eager"], timings["ours"])
    report.ratio("speedup_vs_eager", "times faster than the eager chain", ratio, aim=(">=", 1.5))
    if kernel == "uvqk":
        products = 3 * 2.0 * case.tokens * 4 * (options.heads * options.dim) ** 2
        mm = rate(yardsticks.MM_FLOPS, timings["mm"])
        for side in ("ours", "eager"):
            key = "gemm_fraction" if side == "ours" else "gemm_fraction_eager"
            report.ratio(key, f"{side}: share of torch.mm", share(products, timings[side], mm))
    ours, eager = (memory.measure(case.of(side), threads=options.threads) for side in ("ours", "eager"))
    report.figures |= {"bytes_added": ours.added, "bytes_added_eager": eager.added, "bytes_results": ours.results}
    report.figure(
        *("peak_memory_ratio", "memory that a step adds, ours / eager", ours.added / eager.added),
        aim=("<=", 1.0),
        remark=f"{ours.added / 2**20:,.0f} of {eager.added / 2**20:,.0f} MiB",
    )
    return report
