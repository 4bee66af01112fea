"""Whole epochs by a plan of steps: look-ahead for two samples per rank, and batches filled to a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.peers import Assign
from turbogr_plugin.sharding.batch_balance import idle_share, samples_of_ranks
from turbogr_plugin.sharding.step_plans import StepPlan


class PeerPlan(StepPlan):
    """The global batches of a plain shuffle, assigned to the ranks by a peer."""

    def __init__(
        self, costs: NDArray[np.float64], *, ranks: int, global_batch_size: int, seed: int, assign: Assign
    ) -> None:
        super().__init__(costs, ranks=ranks, seed=seed)
        self._global_batch_size, self._assign, self._given = global_batch_size, assign, costs

    def steps_of_epoch(self, epoch: int) -> int:
        """See the base class."""
        return -(-self.samples // self._global_batch_size)

    def samples_of_step(self, epoch: int, step: int) -> list[NDArray[np.int64]]:
        """See the base class."""
        samples = self.order_of_epoch(epoch)[step * self._global_batch_size :][: self._global_batch_size]
        of_ranks = samples_of_ranks(self._assign(self._given[samples], self.ranks), self.ranks)
        return [samples[of_rank] for of_rank in of_ranks]

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {"plan": "peer"}


@dataclass(frozen=True)
class Epoch:
    """What one epoch is like."""

    idle: float
    """Mean over all steps of 1 - mean / max over ranks."""
    spread: float
    """Largest over smallest cost of a step, the last one excluded."""
    autocorrelation: float
    """Of the mean length of successive steps."""
    steps: int
    most_samples: int
    """Of a rank in a step."""


def measure(plan: StepPlan, lengths: NDArray[np.int64], costs: NDArray[np.float64], *, epoch: int = 0) -> Epoch:
    """Walks through an epoch, which must have every sample once.

    Args:
        plan: of the steps.
        lengths: [n] tokens of the samples.
        costs: [n] cost of the samples, by which idle time is judged.
        epoch: which one.
    """
    loads, mean_lengths, counts, seen = [], [], [], []
    for step in range(plan.steps_of_epoch(epoch)):
        of_ranks = plan.samples_of_step(epoch, step)
        everything = np.concatenate(of_ranks)
        loads.append([float(costs[samples].sum()) for samples in of_ranks])
        mean_lengths.append(lengths[everything].mean())
        counts.append(max(len(samples) for samples in of_ranks))
        seen.append(everything)
    if not np.array_equal(np.sort(np.concatenate(seen)), np.arange(len(lengths))):
        raise AssertionError("an epoch must have every sample exactly once")
    of_steps = np.array(loads).sum(axis=1)[:-1]
    return Epoch(
        idle=float(np.mean([idle_share(of_step) for of_step in loads])),
        spread=float(of_steps.max() / of_steps.min()),
        autocorrelation=float(np.corrcoef(mean_lengths[:-1], mean_lengths[1:])[0, 1]),
        steps=len(loads),
        most_samples=max(counts),
    )
