"""Which samples each rank gets in each step of an epoch, for a store that all ranks read: three ways to balance them.

| plan | a step has | balanced by |
|---|---|---|
| `ReallocationPlan` | the same samples as without balance | their assignment to ranks |
| `LookaheadPlan` | samples of a window of global batches | which samples meet in a step |
| `TokenBudgetPlan` | as many samples as fill the ranks' budgets | how many each rank takes |

A plan is a function of (costs, seed, epoch, step) alone: every rank computes it for all ranks, nothing is communicated
and no sample moves. Every sample comes exactly once per epoch, in an order drawn anew for each. Planning is lazy, a
step or a window at a time, and the latest is kept. `BalancedBatchSampler` hands a plan to a DataLoader.
"""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from turbogr_plugin.backend.rank_exchange import RankExchange
from turbogr_plugin.sharding.batch_balance import (
    TOLERANCE,
    assign,
    checked_memory,
    checked_tolerance,
    exact_costs,
    samples_of_ranks,
)
from turbogr_plugin.sharding.lookahead_balance import SPREAD, WINDOW, Band, choose_band, plan_window
from turbogr_plugin.sharding.token_budget import Oversized, baseline_budget, check_budget, cut_by_budget

Integers = NDArray[np.int64]

_FOLDED = 0.05
"""Steps grow by at most this share so that an epoch does not end with a nearly empty one."""


class StepPlan(ABC):
    """The samples of every rank by epoch and step.

    Attributes:
        samples: number of samples.
        ranks: number of ranks.
        seed: of the orders.
    """

    def __init__(self, costs: ArrayLike, *, ranks: int, seed: int) -> None:
        self._costs = exact_costs(costs, "costs")
        self.samples = len(self._costs)
        if self.samples == 0:
            raise ValueError("costs is empty: there is no sample to plan")
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.ranks, self.seed = ranks, seed
        self._order: tuple[int, Integers] = (-1, np.empty(0, dtype=np.int64))  # of the latest epoch

    @abstractmethod
    def steps_of_epoch(self, epoch: int) -> int:
        """Number of steps, the same on every rank."""

    @abstractmethod
    def samples_of_step(self, epoch: int, step: int) -> list[Integers]:
        """Indices of the samples of each rank, some perhaps none.

        Args:
            epoch: from 0.
            step: within the epoch.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What two plans must share so that one can go on where the other stopped."""

    def _options(self) -> dict[str, Any]:
        """What decides besides `identity` which rank gets which sample: all ranks must share it."""
        return {}

    def check_agreement(self, exchange: RankExchange) -> None:
        """Makes sure that all ranks have this plan; a collective, for the start of a run.

        Ranks with other costs or another seed would train on some samples twice and on others never, and say nothing.

        Raises:
            ValueError: on every rank, if the plans of two ranks differ.
        """
        identity = {**self.identity(), "ranks": self.ranks, **self._options()}
        own = zlib.crc32(repr(sorted(identity.items())).encode())
        costs = zlib.crc32(self._costs.tobytes())
        of_ranks = exchange.agree(None, own, costs, doing="comparing the plans of the ranks")
        for rank, of_rank in enumerate(of_ranks):
            if of_rank != of_ranks[0]:
                what = "costs" if of_rank[0] == of_ranks[0][0] else "plan, seed, sizes or options"
                raise ValueError(f"ranks 0 and {rank} have planned with different {what}: all must plan with the same")

    def order_of_epoch(self, epoch: int) -> Integers:
        """The shuffled samples of an epoch."""
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._order = (epoch, generator.permutation(self.samples))
        return self._order[1]

    def _check(self, epoch: int, step: int) -> None:
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= step < self.steps_of_epoch(epoch):
            raise ValueError(f"step must be in [0, {self.steps_of_epoch(epoch)}) in epoch {epoch}, got {step}")


class ReallocationPlan(StepPlan):
    """The global batches of a plain shuffle, each spread over the ranks by cost (`balance_batch`)."""

    def __init__(
        self,
        costs: ArrayLike,
        *,
        ranks: int,
        global_batch_size: int,
        seed: int = 0,
        equal_counts: bool = False,
        memory: ArrayLike | None = None,
        memory_limit: float | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Args:
        costs: [n] of the samples.
        ranks: number of ranks.
        global_batch_size: samples of a step over all ranks; the last step of an epoch has what is left.
        seed: of the order.
        equal_counts: lets the numbers of samples per rank differ by at most one.
        memory: [n] what each sample takes of the memory limit.
        memory_limit: most that the samples of a rank and step may take together.
        tolerance: share of the mean load by which the largest may exceed it.
        """
        super().__init__(costs, ranks=ranks, seed=seed)
        self._global_batch_size = _batch_size(global_batch_size)
        self._equal_counts, self._tolerance = equal_counts, checked_tolerance(tolerance)
        self._memory = checked_memory(memory, memory_limit, self.samples)
        self._limit = memory_limit

    def steps_of_epoch(self, epoch: int) -> int:
        """See the base class."""
        return -(-self.samples // self._global_batch_size)

    def samples_of_step(self, epoch: int, step: int) -> list[Integers]:
        """See the base class."""
        self._check(epoch, step)
        first = step * self._global_batch_size
        samples = self.order_of_epoch(epoch)[first : first + self._global_batch_size]
        rank_of = assign(
            self._costs[samples],
            self.ranks,
            equal_counts=self._equal_counts,
            memory=None if self._memory is None else self._memory[samples],
            limit=self._limit,
            tolerance=self._tolerance,
        )
        return [samples[of_rank] for of_rank in samples_of_ranks(rank_of, self.ranks)]

    def _options(self) -> dict[str, Any]:
        return {
            "equal_counts": self._equal_counts,
            "tolerance": self._tolerance,
            "memory": None if self._memory is None else zlib.crc32(self._memory.tobytes()),
            "memory_limit": self._limit,
        }

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {
            "plan": "reallocation",
            "samples": self.samples,
            "seed": self.seed,
            "global_batch_size": self._global_batch_size,
        }


class LookaheadPlan(StepPlan):
    """Steps made of a window of global batches, so that ranks with few samples each can be balanced (`plan_window`)."""

    def __init__(
        self,
        costs: ArrayLike,
        *,
        ranks: int,
        global_batch_size: int,
        seed: int = 0,
        window: int = WINDOW,
        spread: float = SPREAD,
        memory: ArrayLike | None = None,
        memory_limit: float | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Args:
        costs: [n] of the samples.
        ranks: number of ranks.
        global_batch_size: samples of a step over all ranks on average.
        seed: of the order.
        window: most global batches that are planned together.
        spread: largest over smallest cost of a step to stay within as far as the samples allow, at least 1.
        memory: [n] what each sample takes of the memory limit.
        memory_limit: most that the samples of a rank and step may take together.
        tolerance: share of the mean load by which the largest may exceed it where all ranks can be equal.
        """
        super().__init__(costs, ranks=ranks, seed=seed)
        self._global_batch_size = _batch_size(global_batch_size)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if not spread >= 1:
            raise ValueError(f"spread must be at least 1, got {spread}")
        self._tolerance = checked_tolerance(tolerance)
        self._memory = checked_memory(memory, memory_limit, self.samples)
        self._limit = memory_limit
        steps = max(1, self.samples // global_batch_size)
        self._steps = steps if self.samples <= steps * global_batch_size * (1 + _FOLDED) else steps + 1
        self._window, self._spread = window, spread
        windows = -(-self._steps // window)
        # Windows of nearly equal numbers of steps, each with its share of the samples.
        self._first_step = np.arange(windows + 1) * self._steps // windows
        self._first_sample = self._first_step * self.samples // self._steps
        self._band = self._choose_band()
        self._latest: tuple[int, int, list[Integers]] = (-1, -1, [])  # epoch, window, samples by step and rank

    def _choose_band(self) -> Band:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, 1 << 32])))
        typical = generator.choice(self.samples, int(self._first_sample[1]), replace=False)
        return choose_band(
            self._costs[typical],
            steps=int(self._first_step[1]),
            ranks=self.ranks,
            mean=self._costs.sum() / (self._steps * self.ranks),
            spread=self._spread,
        )

    def steps_of_epoch(self, epoch: int) -> int:
        """See the base class."""
        return self._steps

    def samples_of_step(self, epoch: int, step: int) -> list[Integers]:
        """See the base class."""
        self._check(epoch, step)
        window = int(np.searchsorted(self._first_step, step, side="right")) - 1
        if self._latest[:2] != (epoch, window):
            self._latest = (epoch, window, self._plan(epoch, window))
        within = (step - int(self._first_step[window])) * self.ranks
        return self._latest[2][within : within + self.ranks]

    def _plan(self, epoch: int, window: int) -> list[Integers]:
        samples = self.order_of_epoch(epoch)[self._first_sample[window] : self._first_sample[window + 1]]
        steps = int(self._first_step[window + 1] - self._first_step[window])
        position = plan_window(
            self._costs[samples],
            steps=steps,
            ranks=self.ranks,
            generator=np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch, window]))),
            band=self._band,
            memory=None if self._memory is None else self._memory[samples],
            memory_limit=self._limit,
            tolerance=self._tolerance,
        )
        return [samples[of_rank] for of_rank in samples_of_ranks(position, steps * self.ranks)]

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {
            "plan": "lookahead",
            "costs": zlib.crc32(self._costs.tobytes()),
            "samples": self.samples,
            "seed": self.seed,
            "global_batch_size": self._global_batch_size,
            "ranks": self.ranks,
            "window": self._window,
            "spread": self._spread,
            "tolerance": self._tolerance,
            "memory": None if self._memory is None else zlib.crc32(self._memory.tobytes()),
            "memory_limit": self._limit,
        }


class TokenBudgetPlan(StepPlan):
    """Every rank takes the next samples until its budget is filled, rank after rank; the rest of an epoch is spread.

    The number of steps depends on the order and so on the epoch.
    """

    def __init__(
        self,
        costs: ArrayLike,
        *,
        ranks: int,
        batch_size: int | None = None,
        budget: float | None = None,
        seed: int = 0,
        oversized: Oversized = "alone",
    ) -> None:
        """Args:
        costs: [n] of the samples: their tokens, or what a `SequenceCost` makes of them.
        ranks: number of ranks.
        batch_size: samples of a rank in the fixed batch whose mean cost is the budget; or
        budget: of a rank and step, in the unit of `costs`.
        seed: of the order.
        oversized: what becomes of a sample above the budget: alone in its batch with a warning, or an error.
        """
        super().__init__(costs, ranks=ranks, seed=seed)
        if (batch_size is None) == (budget is None):
            raise ValueError(f"give either batch_size or budget, got batch_size={batch_size} and budget={budget}")
        given = np.asarray(costs, dtype=np.float64)
        self.budget = baseline_budget(given, batch_size) if batch_size is not None else float(budget or 0.0)
        check_budget(given, self.budget, oversized)
        self._given = given
        self._cuts: tuple[int, Integers] = (-1, np.empty(0, dtype=np.int64))  # of the latest epoch

    def _cut(self, epoch: int) -> Integers:
        if self._cuts[0] != epoch:
            self._cuts = (epoch, cut_by_budget(self._given[self.order_of_epoch(epoch)], self.budget))
        return self._cuts[1]

    def steps_of_epoch(self, epoch: int) -> int:
        """See the base class."""
        return -(-(len(self._cut(epoch)) - 1) // self.ranks)

    def samples_of_step(self, epoch: int, step: int) -> list[Integers]:
        """See the base class."""
        self._check(epoch, step)
        order, offsets = self.order_of_epoch(epoch), self._cut(epoch)[step * self.ranks :][: self.ranks + 1]
        if len(offsets) == self.ranks + 1:
            return [order[first:last] for first, last in itertools.pairwise(offsets)]
        rest = order[offsets[0] : offsets[-1]]
        rank_of = assign(self._costs[rest], self.ranks)
        return [rest[of_rank] for of_rank in samples_of_ranks(rank_of, self.ranks)]

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {
            "plan": "token_budget",
            "costs": zlib.crc32(self._costs.tobytes()),
            "samples": self.samples,
            "seed": self.seed,
            "budget": self.budget,
            "ranks": self.ranks,
        }


def _batch_size(global_batch_size: int) -> int:
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size must be at least 1, got {global_batch_size}")
    return global_batch_size
