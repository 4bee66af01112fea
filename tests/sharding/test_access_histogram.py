"""Expected unique rows against drawn samples, and the popularity of row ranges."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from turbogr_plugin.sharding.access_histogram import AccessHistogram
from turbogr_plugin.sharding.scale_prediction import kuairand_items


def _skewed(rows: int, seed: int) -> Any:
    """Counts that fall with the row number, as in a table sorted by popularity."""
    counts = np.random.default_rng(seed).zipf(1.3, rows).clip(max=10_000)
    return np.sort(counts)[::-1]


@pytest.mark.parametrize("lookups", [1, 100, 8_192, 65_536])
def test_unique_rows_are_those_of_independent_draws(lookups: int) -> None:
    counts = _skewed(20_000, seed=1)
    draws = np.random.default_rng(2).choice(20_000, (20, lookups), p=counts / counts.sum())
    drawn = np.mean([np.unique(draw).size for draw in draws])
    assert AccessHistogram.from_counts(counts).unique(lookups) == pytest.approx(drawn, rel=0.01, abs=0.01)


@pytest.mark.parametrize("cuts", [1, 2, 7, 64, 1024])
def test_ranges_hold_the_lookups_and_unique_rows_that_fall_into_them(cuts: int) -> None:
    rows, lookups = 50_000, 32_768
    counts = _skewed(rows, seed=3)
    histogram = AccessHistogram.from_counts(counts)
    boundaries = np.minimum(np.arange(cuts + 1) * -(-rows // cuts), rows)
    draws = np.random.default_rng(4).choice(rows, (20, lookups), p=counts / counts.sum())
    shares = np.histogram(draws, boundaries)[0] / draws.size
    unique = np.mean([np.histogram(np.unique(draw), boundaries)[0] for draw in draws], axis=0)
    found = histogram.unique_by_range(boundaries, lookups)
    # A boundary inside one of the ranges is interpolated: off by at most what that range holds.
    assert histogram.range_edges is not None
    slack = histogram.unique_by_range(histogram.range_edges, lookups).max()
    assert np.abs(histogram.lookup_shares(boundaries) - shares).max() < 0.01
    assert (np.abs(found - unique) < 0.02 * unique + slack).all()
    assert found.sum() == pytest.approx(histogram.unique(lookups))
    assert histogram.lookup_shares(boundaries).sum() == pytest.approx(1)


def test_uniform_popularity_has_the_most_unique_rows() -> None:
    skewed = AccessHistogram.from_counts(_skewed(5_000, seed=5))
    uniform = AccessHistogram.uniform(5_000)
    for lookups in (10, 1_000, 100_000):
        assert skewed.unique(lookups) < uniform.unique(lookups) <= min(lookups, 5_000) + 1e-9


def test_classes_and_counts_agree_and_classes_spread_evenly() -> None:
    counts = [5.0, 5.0, 1.0, 0.0]
    by_row = AccessHistogram.from_counts(counts)
    by_class = AccessHistogram.from_classes([5, 1], [2, 1], rows=4)
    assert by_class.unique(7) == pytest.approx(by_row.unique(7))
    assert by_class.lookup_shares(np.array([0, 1, 4])).tolist() == [0.25, 0.75]
    assert by_row.lookup_shares(np.array([0, 1, 4])) == pytest.approx([5 / 11, 6 / 11])


def test_ids_count_as_their_rows() -> None:
    ids = np.array([3, 3, 0])
    assert AccessHistogram.from_ids(ids, 5).unique(9) == AccessHistogram.from_counts([1, 0, 0, 2, 0]).unique(9)


@pytest.mark.parametrize(
    ("at_least", "shares"),
    [
        (1, (0.99, 0.99, 0.98, 0.93, 0.72)),
        (350, (0.95, 0.91, 0.83, 0.57, 0.12)),
        (1000, (0.79, 0.65, 0.47, 0.16, 0.02)),
    ],
)
def test_kuairand_from_a_few_numbers_has_the_unique_shares_of_the_data_set(
    at_least: int, shares: tuple[float, ...]
) -> None:
    found = [kuairand_items(at_least).unique_share(n) for n in (8_192, 16_384, 32_768, 131_072, 1_048_576)]
    assert found == pytest.approx(shares, abs=0.012)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AccessHistogram.from_counts([]), "counts must be [rows] with at least one row"),
        (lambda: AccessHistogram.from_counts([0, 0]), "at least one lookup"),
        (lambda: AccessHistogram.from_counts([1, -1]), "finite and not negative"),
        (lambda: AccessHistogram.from_ids(np.array([5]), 5), "[0, 5), got 5 to 5"),
        (lambda: AccessHistogram.from_classes([1], [1, 2]), "alike, got (1,) and (2,)"),
        (lambda: AccessHistogram.from_classes([1], [3], rows=2), "at least the 3 rows"),
    ],
)
def test_wrong_figures_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("parts", [1, 2, 8, 100])
@pytest.mark.parametrize("row_share", [1.0, 0.5, 0.25])
def test_balanced_cuts_bound_both_the_rows_and_the_lookups_of_a_range(parts: int, row_share: float) -> None:
    counts = _skewed(10_000, seed=6)
    histogram = AccessHistogram.from_counts(counts)
    cuts = histogram.balanced_boundaries(parts, row_share)
    assert (cuts[0], cuts[-1]) == (0, 10_000)
    assert (np.diff(cuts) >= 1).all()
    answered = np.add.reduceat(counts, cuts[:-1]) / counts.sum()
    hottest = counts.max() / counts.sum()
    assert np.diff(cuts).max() <= 1.05 * 10_000 / parts / row_share + 3
    if row_share < 1:
        assert answered.max() <= 1.05 / parts / (1 - row_share) + hottest
    else:
        assert np.abs(cuts - np.arange(parts + 1) * 10_000 / parts).max() <= 2


def test_every_range_keeps_a_row_where_one_row_has_nearly_all_lookups() -> None:
    for hot in (0, 4, 9):
        counts = np.ones(10)
        counts[hot] = 1e9
        cuts = AccessHistogram.from_counts(counts).balanced_boundaries(8, 0.1)
        assert (np.diff(cuts) >= 1).all()
        assert (cuts[0], cuts[-1]) == (0, 10)
