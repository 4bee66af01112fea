from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

from tests.sharding.length_draws import DRAWS
from turbogr_plugin.sharding.token_budget import baseline_budget, budget_batches, check_budget, cut_by_budget


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("budget", [10_000, 25_000.0])
def test_batches_are_the_longest_that_fit(budget: float, draw: str) -> None:
    costs = DRAWS[draw](500, 0).astype(np.float64)
    offsets = cut_by_budget(costs, budget)
    assert offsets[0] == 0 and offsets[-1] == len(costs)
    for first, last in itertools.pairwise(offsets):
        filled = costs[first:last].sum()
        assert last > first and (filled <= budget or last == first + 1)
        assert last == len(costs) or filled + costs[last] > budget


def test_the_stream_is_cut_like_the_list() -> None:
    lengths = DRAWS["zipf"](300, 1).tolist()
    batches = list(budget_batches(iter(lengths), float, 5000.0))
    offsets = cut_by_budget(np.array(lengths, dtype=float), 5000.0)
    assert batches == [lengths[first:last] for first, last in itertools.pairwise(offsets)]


def test_a_sequence_above_the_budget_is_alone_with_a_warning_or_an_error_by_choice() -> None:
    lengths = [5, 4, 30, 2, 8]
    with pytest.warns(UserWarning, match=r"1 of 1 samples cost more than the budget 10, .* 30: each gets a batch"):
        assert list(budget_batches(lengths, float, 10)) == [[5, 4], [30], [2, 8]]
    with pytest.raises(ValueError, match="cost more than the budget 10"):
        list(budget_batches(lengths, float, 10, oversized="error"))
    with pytest.warns(UserWarning, match="1 of 5 samples cost more than the budget 10, the most sample 2 with 30"):
        check_budget(np.array(lengths, dtype=float), 10, "alone")
    assert cut_by_budget(np.array(lengths, dtype=float), 10).tolist() == [0, 2, 3, 5]
    with pytest.raises(ValueError, match=r'raise the budget, cap the lengths, or pass oversized="alone"'):
        check_budget(np.array(lengths, dtype=float), 10, "error")


def test_nothing_is_said_where_all_fit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_budget(np.array([1.0, 2.0]), 2, "alone")
        assert list(budget_batches([], float, 2)) == []


def test_the_budget_is_what_the_fixed_batch_has_on_average() -> None:
    assert baseline_budget(np.array([1.0, 2.0, 6.0]), 4) == 12.0
    for arguments, message in (
        ((np.ones(3), 0), "batch_size must be at least 1, got 0"),
        ((np.empty(0), 4), "costs is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            baseline_budget(*arguments)


def test_a_bad_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget must be positive, got 0"):
        list(budget_batches([1], float, 0))
    with pytest.raises(ValueError, match='oversized must be "alone" or "error", got \'cut\''):
        check_budget(np.ones(1), 1, "cut")  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [-1.0, float("nan")])
def test_a_bad_cost_of_a_sample_is_refused_when_it_comes(cost: float) -> None:
    batches = budget_batches([6.0, 6.0, cost, 1.0], float, 10)
    assert next(batches) == [6.0]
    with pytest.raises(ValueError, match=f"cost of a sample must be at least 0, got {cost}"):
        next(batches)
