"""Assignment of random global batches of long sequences to ranks, and how long planning takes."""

from __future__ import annotations

import statistics
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance import peers
from benchmarks.balance.peers import Assign
from turbogr_plugin.sharding.batch_balance import balance_batch, idle_share
from turbogr_plugin.sharding.sequence_cost import SequenceCost

FIXED, KARMARKAR_KARP, OURS = "fixed batch", "NVIDIA's Karmarkar-Karp, equal counts", "ours"
METHODS: dict[str, Assign] = {
    FIXED: peers.fixed,
    KARMARKAR_KARP: peers.karmarkar_karp,
    "greedy by cost (the paper's, by tokens)": peers.greedy,
    "ours, equal counts": lambda costs, ranks: balance_batch(costs, ranks, equal_counts=True),
    OURS: balance_batch,
}


def draw(lengths: NDArray[np.int64], *, ranks: int, per_rank: int, batches: int, seed: int) -> NDArray[np.int64]:
    """[batches, ranks · per_rank] lengths of random global batches, each without repeated users."""
    generator = np.random.default_rng([seed, ranks, per_rank])
    return np.stack([generator.choice(lengths, ranks * per_rank, replace=False) for _ in range(batches)])


def loads_of(costs: NDArray[np.float64], ranks: int, assign: Assign) -> NDArray[np.float64]:
    """[batches, ranks] cost of each rank.

    Args:
        costs: [batches, samples].
        ranks: number of ranks.
        assign: gives the rank of each sample of a batch.
    """
    return np.stack([np.bincount(assign(batch, ranks), weights=batch, minlength=ranks) for batch in costs])


def mean_idle(lengths: NDArray[np.int64], cost: SequenceCost, ranks: int, assign: Assign) -> float:
    """Mean over batches of the share of time that ranks wait; `lengths` [batches, samples]."""
    costs = np.stack([cost.of(batch) for batch in lengths])
    return float(np.mean([idle_share(loads) for loads in loads_of(costs, ranks, assign)]))


def mean_token_gap(lengths: NDArray[np.int64], ranks: int, assign: Assign) -> float:
    """Mean over batches of the tokens of the fullest rank less those of the emptiest, assigned by tokens."""
    loads = loads_of(lengths.astype(np.float64), ranks, assign)
    return float((loads.max(axis=1) - loads.min(axis=1)).mean())


def planning_ms(lengths: NDArray[np.int64], cost: SequenceCost, ranks: int, assign: Assign) -> tuple[float, float]:
    """Median milliseconds of planning a batch: processor time of this thread, and by the clock."""
    processor, clock = [], []
    for batch in lengths:
        thread, started = time.thread_time(), time.perf_counter()
        assign(cost.of(batch), ranks)
        clock.append(time.perf_counter() - started)
        processor.append(time.thread_time() - thread)
    return statistics.median(processor) * 1e3, statistics.median(clock) * 1e3
