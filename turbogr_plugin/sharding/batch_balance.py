"""Global token reallocation: the samples of one global batch over the ranks, sequences whole, so that nobody waits.

The paper's section 4.1.3 sorts by tokens and assigns greedily. Here a cost linear and quadratic in the length takes the
place of tokens, greedy dealing is followed by swaps between ranks, and a memory limit per rank holds. Numbers of
samples per rank are free, which the global mean of the loss permits; NVIDIA's balancer keeps them equal.

The plan is a function of its arguments to the bit, on every machine: costs are rounded to integers small enough that
every sum is exact in whatever order it is taken, and sorting is stable. All ranks can therefore plan for themselves.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from turbogr_plugin.sharding.greedy_deal import bin_loads, deal
from turbogr_plugin.sharding.load_exchange import exchange_loads

TOLERANCE = 0.0015
"""Load above the mean, as a share of it, that is not worth another swap."""
ROUNDS = 64
"""Most rounds of swaps."""


def balance_batch(
    costs: ArrayLike,
    ranks: int,
    *,
    equal_counts: bool = False,
    memory: ArrayLike | None = None,
    memory_limit: float | None = None,
    tolerance: float = TOLERANCE,
) -> NDArray[np.int64]:
    """Spreads samples over ranks so that the largest load comes close to the mean.

    Args:
        costs: [n] cost of each sample, at least 0 (`SequenceCost.of`).
        ranks: number of ranks, at least 1.
        equal_counts: lets the numbers of samples per rank differ by at most one.
        memory: [n] what each sample takes of the memory limit, in whole numbers: its tokens, or bytes.
        memory_limit: most that the samples of a rank may take together.
        tolerance: share of the mean load by which the largest may exceed it.

    Returns:
        [n] int64, the rank of each sample.

    Raises:
        ValueError: bad arguments, a sample that exceeds the limit alone, or samples for which no assignment within the
            limit was found; with equal counts a limit may be out of reach that free counts would meet.
    """
    exact = exact_costs(costs, "costs")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    weights = checked_memory(memory, memory_limit, len(exact))
    tolerance = checked_tolerance(tolerance)
    return assign(exact, ranks, equal_counts=equal_counts, memory=weights, limit=memory_limit, tolerance=tolerance)


def assign(
    costs: NDArray[np.float64],
    bins: int,
    *,
    equal_counts: bool = False,
    memory: NDArray[np.float64] | None = None,
    limit: float | None = None,
    tolerance: float = TOLERANCE,
) -> NDArray[np.int64]:
    """`balance_batch` for costs that `exact_costs` has rounded, without checks of the arguments."""
    bin_of = deal(costs, bins, equal_counts=equal_counts)
    if memory is not None and limit is not None:
        if bin_loads(memory, bin_of, bins).max() > limit:
            bin_of = deal(memory, bins, equal_counts=equal_counts)
            exchange_loads(memory, bin_of, bins, target=limit, rounds=ROUNDS, equal_counts=equal_counts)
        largest = bin_loads(memory, bin_of, bins).max()
        if largest > limit:
            raise ValueError(
                f"memory_limit {limit:g} per rank is exceeded: the best assignment found of {len(costs)} samples to "
                f"{bins} ranks needs {largest:g} on one, their mean is {memory.sum() / bins:g}"
                + (" (equal_counts=True; free counts may fit)" if equal_counts else "")
                + "; raise the limit or make the batch smaller"
            )
    target = max(costs.sum() / bins, costs.max(initial=0.0)) * (1 + tolerance)
    exchange_loads(
        costs,
        bin_of,
        bins,
        target=target,
        rounds=ROUNDS,
        equal_counts=equal_counts,
        memory=memory if limit is not None else None,
        memory_limit=np.inf if limit is None else limit,
    )
    return bin_of


def exact_costs(costs: ArrayLike, name: str) -> NDArray[np.float64]:
    """The costs as multiples of one power of two, so few of its units that any sum of them is exact.

    Args:
        costs: [n].
        name: of the argument, for the message.

    Raises:
        ValueError: not one-dimensional, negative or not finite.
    """
    values = np.asarray(costs, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got the shape {list(values.shape)}")
    if len(values) == 0:
        return values
    if not (np.isfinite(values).all() and values.min() >= 0):
        worst = values[~np.isfinite(values) | (values < 0)][0]
        raise ValueError(f"{name} must be finite and at least 0, got {worst}")
    # Below 2^52 units in all: float64 holds every integer up to 2^53.
    exponent = 52 - math.frexp(float(values.max()))[1] - len(values).bit_length()
    return np.rint(np.ldexp(values, exponent))


def samples_of_ranks(rank_of: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Indices of the samples of each rank, ascending."""
    order = np.argsort(rank_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(rank_of, minlength=ranks))[:-1])


def idle_share(loads: ArrayLike) -> float:
    """Share of the ranks' time that they wait for the most loaded one: 1 - mean / max.

    Args:
        loads: [ranks].
    """
    values = np.asarray(loads, dtype=np.float64)
    return float(1 - values.mean() / values.max()) if values.max(initial=0.0) > 0 else 0.0


def checked_tolerance(tolerance: float) -> float:
    """The tolerance, a share of the mean load.

    Raises:
        ValueError: negative or not finite.
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a number >= 0, got {tolerance}")
    return tolerance


def checked_memory(memory: ArrayLike | None, limit: float | None, samples: int) -> NDArray[np.float64] | None:
    """The memory of the samples as an array, None without a limit.

    Raises:
        ValueError: one of both without the other, another shape, a negative value, or a sample that exceeds the limit.
    """
    if (memory is None) != (limit is None):
        raise ValueError("memory and memory_limit belong together: give both or neither")
    if memory is None or limit is None:
        return None
    if not limit >= 0:
        raise ValueError(f"memory_limit must be at least 0, got {limit}")
    values = np.asarray(memory, dtype=np.float64)
    if values.shape != (samples,):
        raise ValueError(f"memory must have the shape [{samples}] of costs, got {list(values.shape)}")
    if samples and not (np.isfinite(values).all() and values.min() >= 0):
        raise ValueError("memory must be finite and at least 0")
    if samples and values.max() > limit:
        raise ValueError(
            f"sample {int(values.argmax())} alone needs {values.max():g}, more than memory_limit {limit:g} per rank"
        )
    return values
