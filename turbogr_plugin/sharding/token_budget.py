"""Token-aware batch scaling: a batch is filled to a budget of tokens or cost, not to a number of samples.

The paper's section 4.1.3, for short sequences and large batches: the budget is what the fixed batch has on average, so
the work of a step stays what it was while ranks become alike. Samples are taken in their order and none is held back.
A sequence above the budget gets a batch of its own, with a warning, or is an error by choice; it is never cut.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Sample = TypeVar("Sample")

Oversized = Literal["alone", "error"]
"""What becomes of a sequence above the budget."""


def baseline_budget(costs: NDArray[np.float64], batch_size: int) -> float:
    """What a fixed batch has on average.

    Args:
        costs: [n] of all samples.
        batch_size: samples of a rank's batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if len(costs) == 0:
        raise ValueError("costs is empty: without samples there is no baseline for the budget")
    return math.fsum(costs) / len(costs) * batch_size  # rounded once: the same on every machine


def cut_by_budget(costs: NDArray[np.float64], budget: float) -> NDArray[np.int64]:
    """Cuts samples, in their order, into the longest batches that stay within the budget.

    Args:
        costs: [n] at least 0.
        budget: of a batch.

    Returns:
        [batches + 1] int64: batch i has the samples [offset i, offset i + 1), at least one.
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    offsets = [0]
    while offsets[-1] < len(costs):
        fits = int(np.searchsorted(total, total[offsets[-1]] + budget, side="right")) - 1
        offsets.append(max(fits, offsets[-1] + 1))
    return np.array(offsets, dtype=np.int64)


def check_budget(costs: NDArray[np.float64], budget: float, oversized: Oversized) -> None:
    """Warns of sequences above the budget, or refuses them.

    Raises:
        ValueError: a budget that is not positive, an unknown choice, or with "error" a sequence above the budget.
    """
    if not budget > 0:
        raise ValueError(f"budget must be positive, got {budget}")
    if oversized not in ("alone", "error"):
        raise ValueError(f'oversized must be "alone" or "error", got {oversized!r}')
    above = np.flatnonzero(costs > budget)
    if len(above) == 0:
        return
    largest = int(costs.argmax())
    found = f"{len(above)} of {len(costs)} samples cost more than the budget {budget:g}, the most sample {largest}"
    message = f"{found} with {costs[largest]:g}"
    if oversized == "error":
        raise ValueError(f'{message}: raise the budget, cap the lengths, or pass oversized="alone"')
    warnings.warn(f"{message}: each gets a batch of its own", stacklevel=3)


def budget_batches(
    samples: Iterable[Sample], cost: Callable[[Sample], float], budget: float, *, oversized: Oversized = "alone"
) -> Iterator[list[Sample]]:
    """Batches of a stream within the budget, for a rank that reads its own files.

    Ranks may end after different numbers of batches; `BalancedBatches` lets all of them go on together.

    Args:
        samples: the stream.
        cost: of a sample.
        budget: of a batch.
        oversized: what becomes of a sample above the budget: a batch of its own with a warning, or an error.

    Raises:
        ValueError: as `check_budget`, for a sample above the budget when it comes.
    """
    check_budget(np.empty(0), budget, oversized)
    batch: list[Sample] = []
    filled = 0.0
    for sample in samples:
        of_sample = cost(sample)
        if not of_sample >= 0:
            raise ValueError(f"cost of a sample must be at least 0, got {of_sample}")
        if of_sample > budget:
            check_budget(np.array([of_sample]), budget, oversized)
        if batch and filled + of_sample > budget:
            yield batch
            batch, filled = [], 0.0
        batch.append(sample)
        filled += of_sample
    if batch:
        yield batch
