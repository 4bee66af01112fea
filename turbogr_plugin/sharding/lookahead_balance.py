"""Balance over a window of global batches, for few samples per rank, where no assignment of one batch is balanced.

With two long sequences per rank there is nothing to swap: a batch of 32 KuaiRand sequences on 16 ranks leaves 15 % of
the time idle however it is assigned. Over a window of batches the freedom is another one: which samples meet in a step.

1. All samples of the window are assigned to steps × ranks bins of nearly equal cost, as if all were ranks of one step.
2. Bins sorted by cost are cut into steps of neighbours: ranks of a step then cost nearly the same, though steps differ.
3. Steps must not differ much, or the order would be a sorted one in disguise and gradients would swing: the costs of
   steps stay within a band, `spread` = dearest / cheapest. A step above it takes some of the cheapest bins of the
   window in place of its own (a rank that waits wastes only its own time); the cheapest steps share their bins out
   among each other. Where the band lies is chosen so that least time is lost.
4. The order of the steps is random: of some permutations the one in which neighbours are least alike in the mean cost
   of their samples, whichever sign. Which rank gets which bin of a step is random.

A wider band leaves less time idle; its width is the caller's choice. Beyond the paper, which balances single batches.
Left out: carrying samples from one window to the next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from turbogr_plugin.sharding.batch_balance import TOLERANCE, assign
from turbogr_plugin.sharding.greedy_deal import bin_loads

WINDOW = 32
"""Most global batches in a window."""
SPREAD = 1.66
"""Largest over smallest cost of a step that is aimed at."""
_ORDERS = 16
"""Random orders among which to choose."""
_POSITIONS = np.linspace(0.2, 1.0, 9)
"""Where the band may lie: the share of its width, in logarithms, that is above the mean."""

Band = tuple[float, float]
"""Mean costs of a rank between which a step should be."""


def plan_window(
    costs: NDArray[np.float64],
    *,
    steps: int,
    ranks: int,
    generator: np.random.Generator,
    band: Band,
    memory: NDArray[np.float64] | None = None,
    memory_limit: float | None = None,
    tolerance: float = TOLERANCE,
) -> NDArray[np.int64]:
    """Assigns the samples of a window to its steps and ranks.

    Args:
        costs: [n] of the samples, in random order, as `batch_balance.exact_costs` rounds them.
        steps: global batches to make of them.
        ranks: number of ranks.
        generator: of the order; in the same state on all ranks.
        band: what `choose_band` found, for all windows of an epoch the same.
        memory: [n] what each sample takes of the memory limit.
        memory_limit: most that the samples of a rank and step may take together.
        tolerance: share of the mean load by which the largest may exceed it where all bins can be equal.

    Returns:
        [n] int64, step · ranks + rank of each sample.

    Raises:
        ValueError: no assignment within the memory limit was found.
    """
    bins = steps * ranks
    bin_of = assign(costs, bins, memory=memory, limit=memory_limit, tolerance=tolerance)
    loads = bin_loads(costs, bin_of, bins)
    rows = _steps_of_neighbours(loads, steps, ranks, band)
    samples = np.bincount(bin_of, minlength=bins)
    mean_costs = loads[rows].sum(axis=1) / np.maximum(samples[rows].sum(axis=1), 1)
    rows = generator.permuted(rows[_fair_order(mean_costs, generator)], axis=1)
    position = np.empty(bins, dtype=np.int64)
    position[rows.ravel()] = np.arange(bins)
    return position[bin_of]


def choose_band(costs: NDArray[np.float64], *, steps: int, ranks: int, mean: float, spread: float) -> Band:
    """The band of the given width in which a window loses least time, among those that its steps can keep.

    Args:
        costs: [n] of the samples of a typical window, as `batch_balance.exact_costs` rounds them.
        steps: global batches of the window.
        ranks: number of ranks.
        mean: cost of a rank and step in the whole epoch.
        spread: upper end over lower end, at least 1.
    """
    loads = bin_loads(costs, assign(costs, steps * ranks), steps * ranks)
    candidates: list[tuple[float, float, Band]] = []
    for above in _POSITIONS:
        band = (mean * spread ** (above - 1), mean * spread**above)
        of_ranks = loads[_steps_of_neighbours(loads, steps, ranks, band)]
        of_steps = of_ranks.sum(axis=1)
        exceeded = round(max(of_steps.max() / max(of_steps.min(), 1.0) / spread, 1.0), 2)
        candidates.append((exceeded, float(of_ranks.max(axis=1).sum()), band))
    return min(candidates)[2]


def _steps_of_neighbours(loads: NDArray[np.float64], steps: int, ranks: int, band: Band) -> NDArray[np.int64]:
    """[steps, ranks] bins, from the cheapest step to the dearest, mean loads within the band where possible."""
    low, high = band
    order = np.argsort(loads, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(loads[order])])
    rows = np.empty((steps, ranks), dtype=np.int64)
    first, end, dear = 0, len(order), steps  # bins order[first:end] are left for the steps below `dear`
    while dear > 1:
        riders = np.arange(ranks)
        means = (total[end] - total[end - ranks + riders] + total[first + riders] - total[first]) / ranks
        enough = np.flatnonzero(means <= high)
        taken = int(enough[0]) if len(enough) else ranks - 1
        if taken == 0:
            break
        dear -= 1
        rows[dear] = np.concatenate([order[first : first + taken], order[end - ranks + taken : end]])
        first, end = first + taken, end - ranks + taken
    cheap = 1
    while cheap < dear and total[first + cheap * ranks] - total[first] < low * cheap * ranks:
        cheap += 1
    # Each of these steps takes one of every `cheap` neighbours, in alternating direction.
    shared = order[first : first + cheap * ranks].reshape(ranks, cheap)
    shared[1::2] = shared[1::2, ::-1]
    rows[:cheap] = shared.T
    rows[cheap:dear] = order[first + cheap * ranks : end].reshape(dear - cheap, ranks)
    return rows


def _fair_order(mean_costs: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.int64]:
    """A random order of the steps in which successive ones are as little correlated as in the best of some."""
    orders = generator.permuted(np.tile(np.arange(len(mean_costs)), (_ORDERS, 1)), axis=1)
    centred = mean_costs - mean_costs.mean()
    along = centred[orders]
    return orders[np.abs((along[:, 1:] * along[:, :-1]).sum(axis=1)).argmin()]
