"""Balance of samples over ranks, against the fixed batch and NVIDIA's Karmarkar-Karp, on real sequence lengths.

    python -m benchmarks.balance [--json] [--seed N]

Long sequences are the clicks per user of KuaiRand-27K, capped at 4096; their cost is the forward work of an HSTU block,
10·D²·L + 2·D·L² with D = 512. Short ones are Amazon Beauty's, whose cost is their tokens. Idle is the share of the
ranks' time that they wait for the slowest, 1 - mean/max over ranks: a mean over 200 random global batches, or over all
steps of an epoch where whole epochs are planned. Nothing is trained: the loads are counted. Planning is one thread that
waits for nothing, so its processor time is what it takes on a core of its own: that is plan_ms; the time by the clock,
which on a busy machine is longer, stands beside it. docs/balance.md: the method, and a run.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.balance import epochs, global_batches, lengths, peers
from benchmarks.balance.global_batches import FIXED, KARMARKAR_KARP, METHODS, OURS
from turbogr_plugin.sharding.sequence_cost import SequenceCost
from turbogr_plugin.sharding.step_plans import LookaheadPlan, ReallocationPlan, StepPlan, TokenBudgetPlan

CAP, DIM = 4096, 512
COST = SequenceCost.hstu(DIM)
RANKS = (16, 64, 256, 1024)
BATCHES = 200
FEW_RANKS = (16, 64)
OTHER_SPREADS = (1.5, 2.0)
SHORT_RANKS, SHORT_BATCH = 16, 256
AIMS = {
    "idle_8_16": 0.004,
    "idle_8_64": 0.003,
    "idle_8_256": 0.003,
    "idle_8_1024": 0.003,
    "token_gap_16": 250,
    "plan_ms": 10,
    "idle_2_16": 0.024,
    "idle_2_64": 0.024,
    "batch_cost_spread": 1.70,
    "length_autocorr": 0.1,
    "idle_short": 0.010,
}
"""What the project wants of each figure, at most."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seed", type=int, default=0, help="of the batches and the orders (default 0)")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"random global batches (default {BATCHES})")
    return parser.parse_args(arguments)


Drawn = dict[int, NDArray[np.int64]]
"""[batches, samples] lengths of the random global batches, by ranks."""


def planning_times(drawn: Drawn) -> dict[str, tuple[float, float]]:
    """Median milliseconds of planning for the most ranks, by method: processor time and by the clock."""
    ranks = max(drawn)
    return {name: global_batches.planning_ms(drawn[ranks], COST, ranks, assign) for name, assign in METHODS.items()}


def long_batches(drawn: Drawn, times: dict[str, tuple[float, float]], *, seed: int) -> dict[str, Any]:
    """Eight samples per rank: idle time by method and number of ranks, token gap, planning time."""
    figures: dict[str, Any] = {}
    rows = []
    for name, assign in METHODS.items():
        idle = {f"idle_8_{ranks}": global_batches.mean_idle(drawn[ranks], COST, ranks, assign) for ranks in drawn}
        gap = global_batches.mean_token_gap(drawn[16], 16, assign)
        processor, clock = times[name]
        figures[name] = {**idle, "token_gap_16": gap, "plan_ms": processor, "plan_clock_ms": clock}
        rows.append(
            (name, *(f"{value:.4f}" for value in idle.values()), f"{gap:,.0f}", f"{processor:.2f}", f"{clock:.2f}")
        )
    harness.print_table(
        f"8 samples per rank, {len(drawn[16])} random global batches, seed {seed}; idle share by number of ranks, "
        "token gap on 16\nranks when assigned by tokens (paper: 10,726 fixed, 559 greedy), planning for "
        f"{max(drawn):,} ranks (median of processor time, and by the clock)",
        ("method", *(f"idle {ranks:,}" for ranks in drawn), "token gap 16", "plan ms", "clock ms"),
        rows,
    )
    return {**figures[OURS], "long_batches": figures}


def few_samples(clicks: lengths.Lengths, *, seed: int) -> dict[str, Any]:
    """Two samples per rank, whole epochs: idle time, and whether the order is still a shuffle."""
    costs = COST.of(clicks.values)
    figures: dict[str, Any] = {}
    ours: dict[int, epochs.Epoch] = {}
    rows = []
    for ranks in FEW_RANKS:
        common: dict[str, Any] = {"ranks": ranks, "global_batch_size": 2 * ranks, "seed": seed}
        plans: dict[str, StepPlan] = {
            FIXED: epochs.PeerPlan(costs, **common, assign=peers.fixed),
            KARMARKAR_KARP: epochs.PeerPlan(costs, **common, assign=peers.karmarkar_karp),
            "ours, each batch for itself": ReallocationPlan(costs, **common),
            **{
                f"ours, 32 batches ahead, band {spread}": LookaheadPlan(costs, **common, spread=spread)
                for spread in OTHER_SPREADS
            },
            "ours, 32 batches ahead": LookaheadPlan(costs, **common),
        }
        for name, plan in plans.items():
            epoch = epochs.measure(plan, clicks.values, costs)
            figures[f"{name}, {ranks} ranks"] = vars(epoch)
            rows.append(
                (ranks, name, f"{epoch.idle:.4f}", f"{epoch.spread:.3f}", f"{epoch.autocorrelation:+.3f}", epoch.steps)
            )
            ours[ranks] = epoch
    harness.print_table(
        f"2 samples per rank on average, a whole epoch, seed {seed}; spread is the largest over the smallest cost of a "
        "step without the last,\nautocorrelation that of the mean length of successive steps",
        ("ranks", "method", "idle", "spread", "autocorrelation", "steps"),
        rows,
    )
    return {
        **{f"idle_2_{ranks}": epoch.idle for ranks, epoch in ours.items()},
        "batch_cost_spread": max(epoch.spread for epoch in ours.values()),
        "length_autocorr": max(epoch.autocorrelation for epoch in ours.values()),
        "few_samples": figures,
    }


def short_sequences(beauty: lengths.Lengths, *, seed: int) -> dict[str, Any]:
    """Batches filled to the mean tokens of a fixed batch, whole epochs."""
    tokens = SequenceCost.tokens().of(beauty.values)
    common: dict[str, Any] = {"ranks": SHORT_RANKS, "seed": seed}
    fixed: dict[str, Any] = {**common, "global_batch_size": SHORT_BATCH * SHORT_RANKS}
    plan = TokenBudgetPlan(tokens, **common, batch_size=SHORT_BATCH)
    plans: dict[str, StepPlan] = {
        FIXED: epochs.PeerPlan(tokens, **fixed, assign=peers.fixed),
        KARMARKAR_KARP: epochs.PeerPlan(tokens, **fixed, assign=peers.karmarkar_karp),
        "ours, each batch reallocated": ReallocationPlan(tokens, **fixed),
        "ours, filled to the budget": plan,
    }
    measured = {name: epochs.measure(each, beauty.values, tokens) for name, each in plans.items()}
    harness.print_table(
        f"Short sequences, {SHORT_RANKS} ranks, seed {seed}: a fixed batch of {SHORT_BATCH}, and batches filled to its "
        f"mean of {plan.budget:,.0f} tokens",
        ("method", "idle", "most samples of a rank", "steps"),
        [(name, f"{epoch.idle:.4f}", epoch.most_samples, epoch.steps) for name, epoch in measured.items()],
    )
    return {
        "idle_short": measured["ours, filled to the budget"].idle,
        "short_sequences": {name: vars(epoch) for name, epoch in measured.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    parsed = parse_arguments(arguments)
    clicks, beauty = lengths.clicks(CAP), lengths.beauty()
    print(f"{clicks.source}; {beauty.source}; seed {parsed.seed}\n")
    figures: dict[str, Any] = {"seed": parsed.seed, "lengths": [clicks.source, beauty.source]}
    drawn = {
        ranks: global_batches.draw(clicks.values, ranks=ranks, per_rank=8, batches=parsed.batches, seed=parsed.seed)
        for ranks in RANKS
    }
    times, drift = harness.steadily(lambda: planning_times(drawn))
    figures |= long_batches(drawn, times, seed=parsed.seed)
    print()
    figures |= few_samples(clicks, seed=parsed.seed)
    print()
    figures |= short_sequences(beauty, seed=parsed.seed)
    print()
    harness.print_table(
        "What is to be reached",
        ("figure", "measured", "aim", ""),
        [
            (key, f"{figures[key]:.4g}", f"<= {aim:g}", "reached" if figures[key] <= aim else "MISSED")
            for key, aim in AIMS.items()
        ],
    )
    harness.finish(figures, drift=drift, as_json=parsed.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
