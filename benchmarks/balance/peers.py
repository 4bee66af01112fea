"""What balance is compared with: the fixed batch, the paper's greedy assignment, and NVIDIA's Karmarkar-Karp.

Each takes the costs of a global batch and gives the rank of each sample, as `balance_batch` does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Assign = Callable[[NDArray[np.float64], int], NDArray[np.int64]]
"""Costs of a global batch and number of ranks -> rank of each sample."""


def fixed(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """No balance: rank r takes every ranks-th sample from the r-th on."""
    return np.arange(len(costs)) % ranks


def greedy(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """The paper's section 4.1.3: the longest first, each to the rank with the least (LPT)."""
    loads = [(0.0, rank) for rank in range(ranks)]
    rank_of = np.empty(len(costs), dtype=np.int64)
    for sample in np.argsort(-costs, kind="stable").tolist():
        load, rank = loads[0]
        rank_of[sample] = rank
        heapq.heapreplace(loads, (load + float(costs[sample]), rank))
    return rank_of


def karmarkar_karp(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Largest differencing with as many samples on every rank, as NVIDIA's recsys-examples describe their balancer.

    Neighbours in the sorted order form groups of one sample per rank. The two groups that differ most within themselves
    are merged, the largest share of one with the smallest of the other, until one group is left.

    Args:
        costs: [n]; samples of no cost fill up what is missing to a multiple of the ranks.
        ranks: number of ranks.
    """
    samples = len(costs)
    costs = np.append(costs, np.zeros(-samples % ranks))
    ascending = np.argsort(costs, kind="stable").reshape(-1, ranks)
    # (negative difference, tie breaker, loads ascending, samples of each share)
    groups = [(float(costs[row[0]] - costs[row[-1]]), n, costs[row], row[:, None]) for n, row in enumerate(ascending)]
    heapq.heapify(groups)
    while len(groups) > 1:
        _, _, loads, shares = heapq.heappop(groups)
        _, number, other_loads, other_shares = heapq.heappop(groups)
        merged = loads + other_loads[::-1]
        order = np.argsort(merged, kind="stable")
        both = np.concatenate([shares, other_shares[::-1]], axis=1)[order]
        merged = merged[order]
        heapq.heappush(groups, (float(merged[0] - merged[-1]), number, merged, both))
    shares = groups[0][3]
    rank_of = np.empty(len(costs), dtype=np.int64)
    rank_of[shares] = np.arange(ranks)[:, None]
    return rank_of[:samples]
