"""How a run balances its samples over ranks: one keyword-only dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turbogr_plugin.errors import InputError
from turbogr_plugin.sharding.lookahead_balance import SPREAD, WINDOW
from turbogr_plugin.sharding.sequence_cost import SequenceCost
from turbogr_plugin.sharding.step_plans import LookaheadPlan, ReallocationPlan, StepPlan

Method = Literal["none", "reallocation", "lookahead"]


@dataclass(kw_only=True)
class BalanceConfig:
    """Which samples a rank gets. Batches filled to a budget have no fixed number of steps; see `TokenBudgetPlan`."""

    method: Method = "none"
    """none: every world-size-th sample. reallocation: each global batch is spread by cost, its samples stay the same.
    lookahead: a window of global batches is planned together, for few samples per rank."""
    window: int = WINDOW
    "lookahead: most global batches that are planned together."
    spread: float = SPREAD
    "lookahead: largest over smallest cost of a step to stay within."
    linear: float = 0.0
    "Cost of a token. With quadratic also 0: the forward work of a block of the model."
    quadratic: float = 0.0
    "Cost of a pair of tokens of a sequence."
    max_tokens: int = 0
    "Most tokens of a rank and step; 0 sets no limit."

    def __post_init__(self) -> None:
        if self.method not in ("none", "reallocation", "lookahead"):
            raise InputError(f"balance.method must be none, reallocation or lookahead, got {self.method!r}")
        if self.window < 1:
            raise InputError(f"balance.window must be at least 1, got {self.window}")
        for name, least in (("spread", 1), ("linear", 0), ("quadratic", 0), ("max_tokens", 0)):
            if not getattr(self, name) >= least:
                raise InputError(f"balance.{name} must be at least {least}, got {getattr(self, name)}")

    def plan(
        self, tokens: NDArray[np.int64], *, of_model: SequenceCost, ranks: int, global_batch_size: int, seed: int
    ) -> StepPlan | None:
        """The plan of the steps, None without balance.

        Args:
            tokens: [n] of the samples.
            of_model: cost of a sequence unless the configuration has one.
            ranks: number of ranks.
            global_batch_size: samples of a step over all ranks.
            seed: of the run.

        Raises:
            InputError: a sample of more than `max_tokens`.
        """
        if self.method == "none":
            return None
        if self.max_tokens and tokens.max(initial=0) > self.max_tokens:
            raise InputError(
                f"balance.max_tokens is {self.max_tokens}, but the longest sample has {tokens.max()} tokens: raise it, "
                "or lower model.max_length"
            )
        given = self.linear > 0 or self.quadratic > 0
        costs = (SequenceCost(linear=self.linear, quadratic=self.quadratic) if given else of_model).of(tokens)
        memory, limit = (tokens, float(self.max_tokens)) if self.max_tokens else (None, None)
        if self.method == "reallocation":
            return ReallocationPlan(
                costs, ranks=ranks, global_batch_size=global_batch_size, seed=seed, memory=memory, memory_limit=limit
            )
        return LookaheadPlan(
            costs,
            ranks=ranks,
            global_batch_size=global_batch_size,
            seed=seed,
            window=self.window,
            spread=self.spread,
            memory=memory,
            memory_limit=limit,
        )
