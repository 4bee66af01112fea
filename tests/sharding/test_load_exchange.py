from __future__ import annotations

import numpy as np
import pytest

from tests.sharding.length_draws import DRAWS
from turbogr_plugin.sharding.greedy_deal import bin_loads
from turbogr_plugin.sharding.load_exchange import SLOTS, exchange_loads


def _random_assignment(seed: int, samples: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    costs = DRAWS["lognormal"](samples, seed).astype(np.float64)
    return costs, np.random.default_rng(seed).integers(0, bins, samples)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("samples", "bins"), [(200, 20), (40, 20), (4000, 7), (30, 2), (10, 20)])
def test_the_largest_load_never_grows_and_random_assignments_become_even(samples: int, bins: int, seed: int) -> None:
    costs, bin_of = _random_assignment(seed, samples, bins)
    before = bin_loads(costs, bin_of, bins)
    target = max(before.mean(), costs.max())
    for rounds in (1, 3, 200):
        exchange_loads(costs, bin_of, bins, target=target * 1.01, rounds=rounds)
        after = bin_loads(costs, bin_of, bins)
        assert after.sum() == before.sum() and after.max() <= before.max()
        before = after
    if samples == 200:
        assert after.max() <= 1.03 * target


def test_loads_within_the_target_are_left_alone() -> None:
    costs, bin_of = _random_assignment(0, 600, 20)
    kept = bin_of.copy()
    exchange_loads(costs, bin_of, 20, target=bin_loads(costs, bin_of, 20).max(), rounds=10)
    assert np.array_equal(bin_of, kept)


def test_counts_stay_what_they_are_where_they_are_to_be_equal() -> None:
    costs, _ = _random_assignment(1, 90, 20)
    bin_of = np.arange(90) % 20
    exchange_loads(costs, bin_of, 20, target=costs.sum() / 20, rounds=50, equal_counts=True)
    counts = np.bincount(bin_of, minlength=20)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("seed", range(5))
def test_no_swap_exceeds_the_memory_limit(seed: int) -> None:
    costs, bin_of = _random_assignment(seed, 300, 20)
    memory = np.random.default_rng(seed + 100).integers(1, 100, 300).astype(np.float64)
    limit = bin_loads(memory, bin_of, 20).max()
    before = bin_loads(costs, bin_of, 20).max()
    exchange_loads(costs, bin_of, 20, target=costs.sum() / 20, rounds=50, memory=memory, memory_limit=limit)
    assert bin_loads(memory, bin_of, 20).max() <= limit and bin_loads(costs, bin_of, 20).max() < before


def test_of_bins_with_many_samples_some_take_part() -> None:
    costs = np.ones(50 * SLOTS)
    bin_of = np.zeros(50 * SLOTS, dtype=np.int64)
    exchange_loads(costs, bin_of, 2, target=costs.sum() / 2, rounds=5)
    counts = np.bincount(bin_of, minlength=2)
    assert counts.sum() == 50 * SLOTS and 0 < counts[1] <= SLOTS
