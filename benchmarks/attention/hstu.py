"""HSTU attention: against padded PyTorch, against the machine's own speed, over caps, on short rows, and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import product

import torch

from benchmarks import harness
from benchmarks.attention import lengths, memory, useful_rates, yardsticks
from benchmarks.attention.problems import Case, Side, problem, runner
from benchmarks.attention.report import BIASES, Options, Report, rate, share, times_faster

PAIRS_PER_SAMPLE = 40_000_000
"""A timed piece of work of the cost over caps: steps of a small cap are repeated up to so many pairs."""

SIDES: tuple[Side, ...] = ("ours", "padded")


def measure(options: Options) -> Report:
    """All figures of HSTU attention."""
    report = Report("hstu")
    drawn = lengths.kuairand(options.batch, cap=options.cap, seed=options.seed)
    case = Case(
        kernel="hstu",
        lengths=drawn.values,
        cap=options.cap,
        heads=options.heads,
        dim=options.dim,
        implementation=options.implementation,
        seed=options.seed,
    )
    report.figures |= {"lengths": drawn.values, "lengths_source": drawn.source, "pairs": case.pairs}
    report.figures["implementation"] = problem(case).explanation
    _against_padded(report, case, options)
    _memory(report, case, options)
    useful_rates.measure(report, case, options)
    _short_rows(report, case, options)
    _cost_over_caps(report, case, options)
    return report


def _against_padded(report: Report, case: Case, options: Options) -> None:
    sides: tuple[Side, ...] = (*SIDES, *(("compiled",) if options.compiled else ()))
    cases = {f"{side} {name}": case.of(side, bias=bias) for (name, (_, bias)), side in product(BIASES.items(), sides)}
    cases["meta no bias"] = case.of("meta", bias=False)
    variants = {name: runner(one) for name, one in cases.items()} | {"mm": yardsticks.mm(torch.float32)}
    timings = report.steadily(
        "against padded rows", lambda: harness.take_turns(variants, rounds=options.rounds), options
    )
    report.seconds({f"slow turns: {name}": timing for name, timing in timings.items()})
    for (name, (suffix, _)), aim in zip(BIASES.items(), (14, 11), strict=True):
        ours, padded = timings[f"ours {name}"], timings[f"padded {name}"]
        report.ratio(
            *(f"speedup_vs_padded{suffix}", f"times faster than padded, {name}", times_faster(padded, ours)),
            aim=(">=", aim),
        )
    if options.compiled:
        for (name, (suffix, _)), aim in zip(BIASES.items(), (11, 6), strict=True):
            ratio = times_faster(timings[f"compiled {name}"], timings[f"ours {name}"])
            what = f"times faster than padded under torch.compile, {name}"
            report.ratio(f"speedup_vs_compiled{suffix}", what, ratio, aim=(">=", aim))
    ratio = times_faster(timings["meta no bias"], timings["ours no bias"])
    report.ratio("speedup_vs_meta_style", "times faster than Meta's padded form, no bias", ratio, aim=(">=", 10))
    mm = rate(yardsticks.MM_FLOPS, timings["mm"])
    for name, (suffix, _) in BIASES.items():
        what = f"padded: share of torch.mm, {name}"
        report.ratio(f"gemm_fraction_padded{suffix}", what, share(case.useful_flops, timings[f"padded {name}"], mm))


def _memory(report: Report, case: Case, options: Options) -> None:
    report.memory_saved(*(memory.measure(case.of(side), threads=options.threads) for side in SIDES))
    row = options.long_row
    long = case.of("ours", lengths=(row,), cap=row)
    found = memory.measure(long, threads=options.threads)
    report.figure(
        "workspace_bytes_per_thread",
        f"bytes of workspace per thread, one row of {row}",
        found.workspace // options.threads,
        aim=("<=", 4 * 2**20),
        remark="" if found.counted is None else f"{found.counted // options.threads:,} counted by the kernel",
    )
    report.figures["workspace_bytes_counted"] = found.counted


def _short_rows(report: Report, case: Case, options: Options) -> None:
    drawn = lengths.beauty(options.short_batch, seed=options.seed)
    short = case.of("ours", lengths=drawn.values, cap=max(drawn.values))
    report.figures |= {"short_lengths_source": drawn.source, "short_mean_length": short.tokens / len(drawn.values)}
    variants = {
        f"{side} {name}": runner(short.of(side, bias=bias))
        for side, (name, (_, bias)) in product(SIDES, BIASES.items())
    }
    timings = report.steadily(
        "short rows", lambda: harness.take_turns(variants, rounds=5 * options.fast_rounds, warmup=3), options
    )
    report.seconds({f"short rows: {name}": timing for name, timing in timings.items()})
    for key, name, aim in (("speedup_short", "no bias", 6), ("speedup_short_bias", "both biases", None)):
        ratio = times_faster(timings[f"padded {name}"], timings[f"ours {name}"])
        report.ratio(key, f"short rows: times faster than padded, {name}", ratio, aim=(">=", aim) if aim else None)


def processor_seconds(
    steps: Mapping[int, Callable[[], object]], times: Mapping[int, int], rounds: int
) -> dict[int, float]:
    """Processor time of one step, all threads together: the median of turns.

    Args:
        steps: what to run, by cap.
        times: how often it is run per turn.
        rounds: turns; one more comes before, not counted.
    """
    taken: dict[int, list[float]] = {cap: [] for cap in steps}
    for turn in range(rounds + 1):
        for cap, step in steps.items():
            started = time.process_time()
            for _ in range(times[cap]):
                step()
            if turn:
                taken[cap].append((time.process_time() - started) / times[cap])
    return {cap: statistics.median(values) for cap, values in taken.items()}


def _cost_over_caps(report: Report, case: Case, options: Options) -> None:
    caps = options.caps
    drawn = {cap: lengths.kuairand(options.batch, cap=cap, seed=options.seed).values for cap in caps}
    cases = {cap: case.of("ours", lengths=drawn[cap], cap=cap) for cap in caps}
    steps = {cap: runner(one) for cap, one in cases.items()}
    times = {cap: max(1, min(16, PAIRS_PER_SAMPLE // one.pairs)) for cap, one in cases.items()}
    seconds = report.steadily("cost over caps", lambda: processor_seconds(steps, times, options.rounds + 1), options)
    cost = {cap: seconds[cap] / cases[cap].pairs * 1e9 for cap in caps}
    report.figures["nanoseconds_per_pair"] = cost
    report.figure(
        *("cost_vs_work_spread", "processor time per pair over caps, largest / smallest", _spread(cost, caps[0])),
        aim=("<=", 1.35),
    )
    above = caps[1]
    key = f"cost_vs_work_spread_from_{above}"
    report.figure(key, f"the same from cap {above} up", _spread(cost, above))
    rows: list[tuple[object, ...]] = [(cap, cases[cap].pairs, nanoseconds) for cap, nanoseconds in cost.items()]
    report.details.append(("Processor time per allowed pair, all heads", ("cap", "pairs", "ns per pair"), rows))


def _spread(cost: Mapping[int, float], lowest: int) -> float:
    values = [one for cap, one in cost.items() if cap >= lowest]
    return max(values) / min(values)
