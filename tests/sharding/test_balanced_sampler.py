from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.sharding.length_draws import DRAWS
from turbogr_plugin.sharding.balanced_sampler import BalancedBatchSampler
from turbogr_plugin.sharding.step_plans import LookaheadPlan, ReallocationPlan, TokenBudgetPlan

COSTS = DRAWS["capped"](130, 0)


def _plan(**changes: Any) -> LookaheadPlan:
    return LookaheadPlan(COSTS, **{"ranks": 3, "global_batch_size": 6, "window": 8, "seed": 1, **changes})


def test_the_ranks_together_have_every_sample_once() -> None:
    samplers = [BalancedBatchSampler(_plan(), rank=rank) for rank in range(3)]
    assert {len(sampler) for sampler in samplers} == {21}
    drawn = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in drawn} == {21}
    assert sorted(sample for batches in drawn for batch in batches for sample in batch) == list(range(130))


def test_it_serves_a_loader_with_workers_and_ranks_without_samples() -> None:
    sampler = BalancedBatchSampler(ReallocationPlan(COSTS[:10], ranks=4, global_batch_size=4, seed=0), rank=3)
    loader = DataLoader(
        torch.arange(10), batch_sampler=sampler, collate_fn=lambda part: torch.tensor(part, dtype=torch.int64)
    )
    first = [batch.tolist() for batch in loader]
    assert len(first) == 3 and first[-1] == []
    assert first == list(BalancedBatchSampler(sampler.plan, rank=3))


def test_epochs_follow_each_other_and_are_gone_to() -> None:
    sampler = BalancedBatchSampler(_plan(), rank=0)
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    other = BalancedBatchSampler(_plan(), rank=0)
    other.set_epoch(2)
    assert list(other) == epochs[2] != epochs[1]


@pytest.mark.parametrize("stop", [0, 1, 9, 21])
def test_a_resumed_sampler_goes_on_where_the_other_stopped(stop: int) -> None:
    whole = BalancedBatchSampler(_plan(), rank=1)
    expected = list(whole) + list(whole)
    stopped = BalancedBatchSampler(_plan(), rank=1)
    batches = iter(stopped)
    for _ in range(stop):
        next(batches)
    resumed = BalancedBatchSampler(_plan(), rank=1)
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_epoch(0)  # as a loop over epochs does
    assert [*resumed, *resumed] == expected[stop:]


def test_the_training_loop_may_tell_the_position() -> None:
    sampler = BalancedBatchSampler(_plan(), rank=1)
    expected = list(sampler)
    resumed = BalancedBatchSampler(_plan(), rank=1)
    resumed.load_state_dict(sampler.state_dict(epoch=0, step=5))
    assert list(resumed) == expected[5:]
    with pytest.raises(ValueError, match="epoch and step belong together"):
        sampler.state_dict(step=5)


def test_the_position_of_another_plan_is_refused() -> None:
    state = BalancedBatchSampler(_plan(), rank=0).state_dict()
    for plan, message in (
        (_plan(seed=2), "seed 1, now 2"),
        (_plan(ranks=2), "ranks 3, now 2"),
        (LookaheadPlan(COSTS + 1, ranks=3, global_batch_size=6, window=8, seed=1), r"costs \d+, now \d+"),
        (TokenBudgetPlan(COSTS, ranks=3, batch_size=9, seed=1), "plan 'lookahead', now 'token_budget'"),
    ):
        with pytest.raises(ValueError, match=f"state is of another plan: .*{message}"):
            BalancedBatchSampler(plan, rank=0).load_state_dict(state)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        BalancedBatchSampler(_plan(), rank=0).load_state_dict({**state, "epoch": -1})
    with pytest.raises(ValueError, match=r"step must be in \[0, 21\] in epoch 0, got 23"):
        BalancedBatchSampler(_plan(), rank=0).load_state_dict({**state, "step": 23})


def test_reallocation_goes_on_with_another_number_of_ranks() -> None:
    plans = [ReallocationPlan(COSTS, ranks=ranks, global_batch_size=12, seed=0) for ranks in (2, 4)]
    before = BalancedBatchSampler(plans[0], rank=0)
    next(iter(before))
    after = [BalancedBatchSampler(plans[1], rank=rank) for rank in range(4)]
    for sampler in after:
        sampler.load_state_dict(before.state_dict())
    rest = [sample for sampler in after for batch in sampler for sample in batch]
    assert sorted(rest) == sorted(
        np.concatenate([np.concatenate(plans[0].samples_of_step(0, s)) for s in range(1, 11)])
    )


def test_a_rank_outside_the_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 3\), got 3"):
        BalancedBatchSampler(_plan(), rank=3)


def test_the_position_of_a_plan_with_other_options_is_refused() -> None:
    options: dict[str, Any] = {"memory": COSTS, "memory_limit": 20_000.0}
    state = BalancedBatchSampler(_plan(**options), rank=0).state_dict()
    BalancedBatchSampler(_plan(**options), rank=0).load_state_dict(state)
    for changes, message in (
        ({"memory_limit": 20_001.0}, r"memory_limit 20000\.0, now 20001\.0"),
        ({"memory": COSTS + (np.arange(len(COSTS)) == 5)}, r"memory \d+, now \d+"),
        ({"memory": None, "memory_limit": None}, r"memory \d+, now None; memory_limit 20000\.0, now None"),
        ({"tolerance": 0.01}, r"tolerance 0\.0015, now 0\.01"),
    ):
        with pytest.raises(ValueError, match=f"state is of another plan: {message}$"):
            BalancedBatchSampler(_plan(**{**options, **changes}), rank=0).load_state_dict(state)
