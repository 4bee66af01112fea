from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.balance.peers import greedy
from tests.sharding.length_draws import DRAWS
from turbogr_plugin.sharding.batch_balance import balance_batch, exact_costs, idle_share, samples_of_ranks
from turbogr_plugin.sharding.greedy_deal import bin_loads, deal
from turbogr_plugin.sharding.sequence_cost import SequenceCost

COST = SequenceCost.hstu(512)


def _loads(costs: np.ndarray, ranks: int, **options: Any) -> np.ndarray:
    return bin_loads(costs, balance_batch(costs, ranks, **options), ranks)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks", [2, 3])
def test_few_samples_come_close_to_the_best_of_all_assignments(ranks: int, seed: int) -> None:
    costs = COST.of(DRAWS["capped"](8, seed))
    best = min(max(bin_loads(costs, np.array(of), ranks)) for of in itertools.product(range(ranks), repeat=len(costs)))
    assert _loads(costs, ranks).max() <= 1.05 * best


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("ranks", [16, 64, 257])
def test_no_rank_has_more_than_the_greedy_assignment_gives(ranks: int, draw: str) -> None:
    for seed in range(3):
        costs = COST.of(DRAWS[draw](8 * ranks, seed))
        bound = bin_loads(costs, greedy(costs, ranks), ranks).max()
        assert _loads(costs, ranks).max() <= 1.003 * bound


@pytest.mark.parametrize("equal_counts", [False, True])
def test_ranks_of_capped_sequences_hardly_wait(equal_counts: bool) -> None:
    idle = []
    for seed in range(20):
        costs = COST.of(DRAWS["capped"](128, seed))
        idle.append(idle_share(_loads(costs, 16, equal_counts=equal_counts)))
    assert np.mean(idle) <= 0.004


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("samples", "ranks"), [(128, 16), (131, 16), (5, 8), (1, 3), (0, 4), (40, 1), (97, 13)])
def test_equal_counts_differ_by_at_most_one(samples: int, ranks: int, draw: str) -> None:
    rank_of = balance_batch(COST.of(DRAWS[draw](samples, 0)), ranks, equal_counts=True)
    counts = np.bincount(rank_of, minlength=ranks)
    assert counts.sum() == samples and counts.max() - counts.min() <= 1


def test_a_sequence_longer_than_all_others_stays_alone() -> None:
    costs = COST.of(np.array([8000, *[50] * 60]))
    rank_of = balance_batch(costs, 4)
    assert (rank_of == rank_of[0]).sum() == 1
    others = np.delete(bin_loads(costs, rank_of, 4), rank_of[0])
    assert others.max() <= others.mean() * 1.06


def test_sequences_without_tokens_are_spread_too() -> None:
    counts = np.bincount(balance_batch(np.zeros(40), 8), minlength=8)
    assert counts.tolist() == [5] * 8


@pytest.mark.parametrize("draw", DRAWS)
def test_the_memory_limit_holds_and_the_rest_is_balanced_within_it(draw: str) -> None:
    for seed in range(5):
        lengths = DRAWS[draw](256, seed)
        limit = bin_loads(lengths.astype(float), greedy(lengths, 16), 16).max()
        rank_of = balance_batch(COST.of(lengths), 16, memory=lengths, memory_limit=limit)
        assert bin_loads(lengths.astype(float), rank_of, 16).max() <= limit
        by_tokens = balance_batch(lengths, 16)
        costs = COST.of(lengths)
        assert bin_loads(costs, rank_of, 16).max() <= bin_loads(costs, by_tokens, 16).max() * 1.001


def test_a_loose_memory_limit_changes_nothing() -> None:
    lengths = DRAWS["capped"](128, 3)
    plain = balance_batch(COST.of(lengths), 16)
    limited = balance_batch(COST.of(lengths), 16, memory=lengths, memory_limit=1e9)
    assert np.array_equal(plain, limited)


def test_what_cannot_be_is_refused_with_the_numbers() -> None:
    lengths = np.array([100, 100, 100])
    costs = COST.of(lengths)
    with pytest.raises(ValueError, match="sample 0 alone needs 100, more than memory_limit 99 per rank"):
        balance_batch(costs, 2, memory=lengths, memory_limit=99)
    with pytest.raises(
        ValueError, match=r"memory_limit 150 per rank is exceeded: .* needs 200 on one, their mean is 150"
    ):
        balance_batch(costs, 2, memory=lengths, memory_limit=150)
    with pytest.raises(ValueError, match="memory and memory_limit belong together"):
        balance_batch(costs, 2, memory_limit=150)
    with pytest.raises(ValueError, match=r"memory must have the shape \[3\] of costs, got \[2\]"):
        balance_batch(costs, 2, memory=[1, 2], memory_limit=150)
    with pytest.raises(ValueError, match="costs must be finite and at least 0, got nan"):
        balance_batch([1.0, float("nan")], 2)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        balance_batch(costs, 0)


def test_rounded_costs_sum_exactly_in_every_order() -> None:
    costs = np.random.default_rng(0).random(5000) ** 9 * 1e17
    exact = exact_costs(costs, "costs")
    assert np.array_equal(exact, np.rint(exact)) and exact.sum() < 2**53
    assert exact.sum() == exact[::-1].cumsum()[-1] == sum(int(cost) for cost in exact)
    assert np.allclose(exact / exact.max(), costs / costs.max(), rtol=0, atol=1e-11)


def test_a_plan_depends_on_the_ratios_of_costs_alone() -> None:
    costs = COST.of(DRAWS["lognormal"](300, 1))
    assert np.array_equal(balance_batch(costs, 16), balance_batch(costs * 2.0**-40, 16))


def test_samples_of_ranks_are_in_their_order() -> None:
    parts = samples_of_ranks(np.array([1, 0, 1, 3]), 4)
    assert [part.tolist() for part in parts] == [[1], [0, 2], [], [3]]


def test_idle_share_is_what_waits() -> None:
    assert idle_share([1.0, 2.0, 3.0, 4.0]) == 1 - 2.5 / 4
    assert idle_share([0.0, 0.0]) == 0.0


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_dealing_gives_every_sample_once_whatever_the_costs(seed: int, equal_counts: bool) -> None:
    generator = np.random.default_rng(seed)
    samples, bins = int(generator.integers(0, 400)), int(generator.integers(1, 40))
    costs = np.floor(generator.random(samples) ** generator.integers(1, 30) * 10_000)
    bin_of = deal(costs, bins, equal_counts=equal_counts)
    assert len(bin_of) == samples and (samples == 0 or 0 <= bin_of.min() <= bin_of.max() < bins)
    if samples and not equal_counts:  # nobody has more than the least loaded bin and one sample
        loads = bin_loads(costs, bin_of, bins)
        assert loads.max() <= loads.min() + 2 * costs.max()


@pytest.mark.parametrize("limit", [float("nan"), -1.0, -float("inf")])
def test_a_memory_limit_that_is_none_is_refused(limit: float) -> None:
    for lengths in ([1, 2], []):
        with pytest.raises(ValueError, match=f"memory_limit must be at least 0, got {limit}"):
            balance_batch(COST.of(lengths), 2, memory=lengths, memory_limit=limit)


@pytest.mark.parametrize("tolerance", [float("nan"), -1.0, float("inf")])
def test_a_tolerance_that_is_none_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match=f"tolerance must be a number >= 0, got {tolerance}"):
        balance_batch([1, 2], 2, tolerance=tolerance)


@pytest.mark.parametrize("equal_counts", [False, True])
def test_swaps_never_leave_a_tight_memory_limit(equal_counts: bool) -> None:
    ranks, moved = 6, 0
    for seed in range(150):
        generator = np.random.default_rng(seed)
        memory = np.floor(generator.random(30) * 1000).astype(np.float64)
        costs = np.floor(generator.random(30) ** 3 * 10_000)  # of which memory says nothing
        dealt = deal(memory, ranks, equal_counts=equal_counts)
        limit = bin_loads(memory, dealt, ranks).max()
        rank_of = balance_batch(costs, ranks, memory=memory, memory_limit=limit, equal_counts=equal_counts)
        assert bin_loads(memory, rank_of, ranks).max() <= limit, seed
        moved += int((rank_of != dealt).sum())
    assert moved > 1000  # the limit leaves room for swaps
