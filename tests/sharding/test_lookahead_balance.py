from __future__ import annotations

import numpy as np
import pytest

from tests.sharding.length_draws import DRAWS
from turbogr_plugin.sharding.batch_balance import balance_batch, exact_costs
from turbogr_plugin.sharding.greedy_deal import bin_loads
from turbogr_plugin.sharding.lookahead_balance import _fair_order, _steps_of_neighbours, choose_band, plan_window
from turbogr_plugin.sharding.sequence_cost import SequenceCost

COST = SequenceCost.hstu(512)
NO_BAND = (0.0, float("inf"))


def _loads(costs: np.ndarray, steps: int, ranks: int, band: tuple[float, float], seed: int = 0) -> np.ndarray:
    """[steps, ranks]"""
    generator = np.random.default_rng(seed)
    position = plan_window(costs, steps=steps, ranks=ranks, generator=generator, band=band)
    assert len(position) == len(costs) and 0 <= position.min() <= position.max() < steps * ranks
    return bin_loads(costs, position, steps * ranks).reshape(steps, ranks)


def _idle(loads: np.ndarray) -> float:
    return float((1 - loads.mean(axis=1) / loads.max(axis=1)).mean())


def _spread(loads: np.ndarray) -> float:
    return float(loads.sum(axis=1).max() / loads.sum(axis=1).min())


@pytest.mark.parametrize("ranks", [8, 9, 32])
def test_steps_of_neighbours_stay_within_the_band_and_use_every_bin_once(ranks: int) -> None:
    steps = 24
    loads = np.random.default_rng(0).permutation(np.linspace(1000, 2000, steps * ranks))
    for low, high in ((1120, 1780), (1000, 1600), (1300, 2000), (0, 5000)):
        rows = _steps_of_neighbours(loads, steps, ranks, (low, high))
        assert np.array_equal(np.sort(rows, axis=None), np.arange(steps * ranks))
        means = loads[rows].mean(axis=1)
        assert low * 0.999 <= means.min() and means.max() <= high
        idle = float((1 - means / loads[rows].max(axis=1)).mean())
        assert idle <= {1120: 0.07, 1000: 0.12, 1300: 0.13, 0: 0.02}[low]


def test_the_cheapest_steps_share_their_bins_evenly() -> None:
    loads = np.linspace(1000, 2000, 20 * 8)
    of_ranks = loads[_steps_of_neighbours(loads, 20, 8, (1120, 5000))]
    means = np.sort(of_ranks.mean(axis=1))
    alike = means[means < means[0] * 1.001]
    assert len(alike) == 5 and alike[0] > 1119 * 0.999 and np.diff(means[len(alike) - 1 :]).min() > 20


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_two_samples_per_rank_hardly_wait_and_steps_stay_within_the_band(ranks: int) -> None:
    steps = 32
    costs = exact_costs(COST.of(DRAWS["capped"](2 * ranks * steps, 0)), "costs")
    mean = costs.sum() / (steps * ranks)
    band = choose_band(costs, steps=steps, ranks=ranks, mean=mean, spread=1.66)
    loads = _loads(costs, steps, ranks, band)
    single = []
    for batch in costs.reshape(steps, 2 * ranks):
        single.append(bin_loads(batch, balance_batch(batch, ranks), ranks))
    assert _spread(loads) <= 1.67
    assert _idle(loads) <= 0.035 < 0.1 < _idle(np.stack(single))


def test_a_wider_band_waits_less() -> None:
    costs = exact_costs(COST.of(DRAWS["capped"](2 * 16 * 32, 1)), "costs")
    mean = costs.sum() / (32 * 16)
    found = []
    for spread in (1.3, 1.6, 2.0, 4.0):
        band = choose_band(costs, steps=32, ranks=16, mean=mean, spread=spread)
        assert band[1] == pytest.approx(spread * band[0])
        found.append(_loads(costs, 32, 16, band))
    idle = [_idle(loads) for loads in found]
    assert idle == sorted(idle, reverse=True) and idle[-1] < 0.015
    assert all(_spread(loads) <= spread + 0.02 for loads, spread in zip(found, (1.3, 1.6, 2.0, 4.0), strict=True))


def test_where_there_are_many_samples_per_rank_all_steps_become_alike() -> None:
    costs = exact_costs(COST.of(DRAWS["capped"](8 * 16 * 10, 2)), "costs")
    loads = _loads(costs, 10, 16, NO_BAND)
    assert _idle(loads) <= 0.002 and _spread(loads) <= 1.06


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("samples", "steps", "ranks"), [(1, 3, 4), (7, 2, 4), (64, 1, 16), (100, 7, 3), (40, 5, 1)])
def test_any_window_is_planned(samples: int, steps: int, ranks: int, draw: str) -> None:
    costs = exact_costs(COST.of(DRAWS[draw](samples, 0)), "costs")
    mean = costs.sum() / (steps * ranks)
    for spread in (1.0, 1.66, 10.0):
        band = choose_band(costs, steps=steps, ranks=ranks, mean=mean, spread=spread)
        assert _loads(costs, steps, ranks, band).sum() == costs.sum()


def test_one_seed_gives_one_plan_and_another_seed_another() -> None:
    costs = exact_costs(COST.of(DRAWS["capped"](256, 3)), "costs")
    plans = [_loads(costs, 8, 16, NO_BAND, seed).tobytes() for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


def test_no_rank_and_no_place_in_the_window_is_favoured() -> None:
    costs = exact_costs(COST.of(DRAWS["capped"](2 * 8 * 8, 4)), "costs")
    loads = np.stack([_loads(costs, 8, 8, NO_BAND, seed) for seed in range(400)])
    assert np.abs(loads.mean(axis=(0, 1)) / loads.mean() - 1).max() < 0.03
    assert np.abs(loads.mean(axis=(0, 2)) / loads.mean() - 1).max() < 0.06


def test_successive_steps_are_not_alike() -> None:
    steps, ranks = 32, 16
    correlations = []
    for seed in range(20):
        costs = exact_costs(COST.of(DRAWS["capped"](2 * ranks * steps, seed)), "costs")
        along = _loads(costs, steps, ranks, NO_BAND, seed).sum(axis=1)
        correlations.append(np.corrcoef(along[1:], along[:-1])[0, 1])
    assert abs(np.mean(correlations)) < 0.1


def test_the_memory_limit_holds_in_every_step() -> None:
    lengths = DRAWS["capped"](2 * 16 * 8, 5)
    costs = exact_costs(COST.of(lengths), "costs")
    limit = 4096 + 3000
    position = plan_window(
        costs,
        steps=8,
        ranks=16,
        generator=np.random.default_rng(0),
        band=NO_BAND,
        memory=lengths.astype(float),
        memory_limit=limit,
    )
    assert bin_loads(lengths.astype(float), position, 8 * 16).max() <= limit
    with pytest.raises(ValueError, match="memory_limit 4096 per rank is exceeded"):
        plan_window(
            costs,
            steps=8,
            ranks=16,
            generator=np.random.default_rng(0),
            band=NO_BAND,
            memory=lengths.astype(float),
            memory_limit=4096,
        )


def test_of_several_orders_that_with_the_least_correlation_of_steps_is_taken() -> None:
    found = []
    for seed in range(40):
        mean_costs = np.sort(COST.of(DRAWS["capped"](32, seed)))
        order = _fair_order(mean_costs, np.random.default_rng(seed))
        assert np.array_equal(np.sort(order), np.arange(32))
        along = mean_costs[order]
        found.append(np.corrcoef(along[1:], along[:-1])[0, 1])
    # One random order has a deviation of 0.18; the best of 16 hardly any, on either side.
    assert np.mean(np.abs(found)) < 0.05 and np.max(np.abs(found)) < 0.2


def test_every_rank_gets_the_dearest_part_of_a_step_as_often() -> None:
    costs = exact_costs(COST.of(DRAWS["capped"](2 * 8 * 8, 4)), "costs")
    dearest = np.concatenate([_loads(costs, 8, 8, NO_BAND, seed).argmax(axis=1) for seed in range(200)])
    # 1,600 steps on 8 ranks: 200 each with a deviation of 13.
    assert np.abs(np.bincount(dearest, minlength=8) - 200).max() < 60
