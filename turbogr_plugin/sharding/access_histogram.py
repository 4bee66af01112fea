"""How often the rows of a table are looked up: what the planner knows of popularity.

    unique(n) = sum over rows of 1 - (1 - p)^n         p = the row's share of all lookups, n = lookups

Two views are kept. Popularity classes (how many rows have which count) give `unique` exactly and need no row numbers,
so that published popularity figures are enough. Row ranges, where the counts came row by row, say how lookups and rows
spread over the table: a row-wise shard is a range, and the one that holds the head of a table sorted by popularity
answers most lookups.

Lookups are taken as independent draws. Repeats inside one sequence make real batches a little less unique. Left out:
drift of popularity over time, and combinations of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Ranges in which lookups are kept apart, at most: 4 to each of 1,024 ranks. Each has about the same sum of its share
#: of the rows and its share of the lookups, so that a hot head has many of them.
RANGES = 4_096
#: Within a range rows are binned by count, two bins to an octave: rows of a bin differ by 41 % at most, which makes
#: their mean overstate unique rows by less than 1 %.
_BINS, _BINS_PER_OCTAVE = 128, 2
#: How many results by number of lookups are kept: a plan asks for those of a group and of all ranks, for many cuts.
_KEPT = 4


@dataclass(frozen=True, eq=False)
class AccessHistogram:
    """Popularity of the rows of one table; made by `from_counts`, `from_ids`, `from_classes` or `uniform`."""

    rows: int
    """Rows of the table, those never looked up included."""
    counts: Floats
    """[C] lookups of a row, by popularity class."""
    numbers: Floats
    """[C] rows of each class."""
    range_edges: NDArray[np.int64] | None = None
    """[R + 1] first row of each range, and the end; None where popularity is spread evenly over rows."""
    bin_ranges: NDArray[np.int64] | None = None
    """[K] range of each bin of rows with about the same count."""
    bin_counts: Floats | None = None
    """[K] mean lookups of a row of the bin."""
    bin_numbers: Floats | None = None
    """[K] rows of the bin."""
    _unique: dict[float, float] = field(default_factory=dict, repr=False)
    _unique_of_ranges: dict[float, Floats] = field(default_factory=dict, repr=False)

    @classmethod
    def from_counts(cls, counts: Sequence[float] | NDArray[np.generic]) -> AccessHistogram:
        """Popularity of every row.

        Args:
            counts: [rows] lookups of each row, in the order of the table.

        Raises:
            ValueError: no row, a negative or infinite count, or no lookup at all.
        """
        per_row = np.asarray(counts, dtype=np.float64)
        if per_row.ndim != 1 or per_row.size == 0:
            raise ValueError(f"counts must be [rows] with at least one row, got shape {per_row.shape}")
        _check_figures("counts", per_row)
        classes, numbers = np.unique(per_row, return_counts=True)
        rows = per_row.size
        edges = _range_edges(per_row)
        ranges = np.repeat(np.arange(edges.size - 1), np.diff(edges))
        with np.errstate(divide="ignore"):
            octave = np.log2(per_row)
        bins = np.where(per_row > 0, np.clip(octave * _BINS_PER_OCTAVE + 2, 1, _BINS - 1), 0).astype(np.int64)
        slots, inverse, held = np.unique(ranges * _BINS + bins, return_inverse=True, return_counts=True)
        mean = np.bincount(inverse.reshape(-1), weights=per_row) / held
        found = cls(rows, classes, numbers.astype(np.float64), edges, slots // _BINS, mean, held.astype(np.float64))
        return _checked(found)

    @classmethod
    def from_ids(cls, ids: NDArray[np.integer], rows: int) -> AccessHistogram:
        """Popularity in a sample of lookups.

        Args:
            ids: [N] row numbers, in any order.
            rows: of the table.

        Raises:
            ValueError: an id outside the table, or no id.
        """
        if ids.size == 0 or ids.min() < 0 or ids.max() >= rows:
            found = "none" if ids.size == 0 else f"{ids.min()} to {ids.max()}"
            raise ValueError(f"ids must be at least one row number of [0, {rows}), got {found}")
        return cls.from_counts(np.bincount(ids, minlength=rows))

    @classmethod
    def from_classes(
        cls, counts: Sequence[float], numbers: Sequence[float], *, rows: int | None = None
    ) -> AccessHistogram:
        """Popularity classes without row numbers, spread evenly over the table.

        Args:
            counts: [C] lookups of a row of each class.
            numbers: [C] rows of each class.
            rows: of the table; None is the sum of `numbers`.

        Raises:
            ValueError: lengths that differ, negative or infinite figures, fewer rows than the classes have.
        """
        own, held = np.asarray(counts, dtype=np.float64), np.asarray(numbers, dtype=np.float64)
        if own.ndim != 1 or own.shape != held.shape:
            raise ValueError(f"counts and numbers must be [classes] alike, got {own.shape} and {held.shape}")
        total = round(float(held.sum())) if rows is None else rows
        if total < held.sum() - 0.5:
            raise ValueError(f"rows must be at least the {held.sum():.0f} rows of the classes, got {rows}")
        return _checked(cls(total, own, held))

    @classmethod
    def uniform(cls, rows: int) -> AccessHistogram:
        """Every row alike: of all popularities the one with the most unique rows, so that groups look dearest."""
        return cls.from_classes([1.0], [float(rows)])

    @property
    def lookups(self) -> float:
        """Lookups that were counted."""
        return float(self.counts @ self.numbers)

    @property
    def by_row(self) -> bool:
        """Whether it is known how lookups spread over the rows."""
        return self.range_edges is not None

    def unique(self, lookups: float) -> float:
        """Expected number of different rows among `lookups` lookups."""
        if lookups not in self._unique:
            _make_room(self._unique)
            self._unique[lookups] = float(self.numbers @ _share_seen(self.counts / self.lookups, lookups))
        return self._unique[lookups]

    def unique_share(self, lookups: float) -> float:
        """u of a batch: different rows over lookups; 1 for none."""
        return self.unique(lookups) / lookups if lookups else 1.0

    def lookup_shares(self, boundaries: NDArray[np.integer]) -> Floats:
        """The share of all lookups that each range of rows answers.

        Args:
            boundaries: [n + 1] rising row numbers; range i is rows boundaries[i] ... boundaries[i + 1] - 1.

        Returns:
            [n], sums to 1 where the ranges cover the table.
        """
        if not self.by_row:
            return np.diff(boundaries) / self.rows
        return self._split(boundaries, self._lookups_of_ranges()) / self.lookups

    def unique_by_range(self, boundaries: NDArray[np.integer], lookups: float) -> Floats:
        """Expected different rows of each range among `lookups` lookups of the whole table.

        Args:
            boundaries: as for `lookup_shares`.
            lookups: of the whole table.

        Returns:
            [n]; their sum over a whole table is `unique(lookups)`.
        """
        whole = self.unique(lookups)
        if self.bin_counts is None or self.bin_numbers is None or self.bin_ranges is None:
            return np.diff(boundaries) / self.rows * whole
        if lookups not in self._unique_of_ranges:
            _make_room(self._unique_of_ranges)
            seen = self.bin_numbers * _share_seen(self.bin_counts / self.lookups, lookups)
            by_range = np.bincount(self.bin_ranges, weights=seen)
            # Bins hold means of counts, which overstates a little: scaled to the exact sum.
            self._unique_of_ranges[lookups] = by_range * (whole / by_range.sum() if by_range.sum() else 0.0)
        return self._split(boundaries, self._unique_of_ranges[lookups])

    def _lookups_of_ranges(self) -> Floats:
        assert self.bin_counts is not None and self.bin_numbers is not None and self.bin_ranges is not None
        found: Floats = np.bincount(self.bin_ranges, weights=self.bin_counts * self.bin_numbers).astype(np.float64)
        return found

    def _split(self, boundaries: NDArray[np.integer], per_range: Floats) -> Floats:
        """Sums between row boundaries of a quantity given per range; within a range it is spread evenly."""
        assert self.range_edges is not None
        cumulated = np.concatenate([[0.0], np.cumsum(per_range)])
        return np.diff(np.interp(np.asarray(boundaries, dtype=np.float64), self.range_edges, cumulated))

    def balanced_boundaries(self, parts: int, row_share: float) -> NDArray[np.int64]:
        """Cuts the rows into ranges that answer about equally many lookups.

        Args:
            parts: ranges, at most as many as rows.
            row_share: how much equal numbers of rows count against equal lookups: 1 cuts evenly, and w lets no range
                have more than 1 / w times the mean rows, nor 1 / (1 - w) times the mean lookups (one hot row apart).

        Returns:
            [parts + 1] rising row numbers.
        """
        assert 0 < row_share <= 1 <= parts <= self.rows
        if self.range_edges is None:
            edges, answered = np.array([0, self.rows]), np.array([0.0, 1.0])
        else:
            edges = self.range_edges
            answered = np.concatenate([[0.0], np.cumsum(self._lookups_of_ranges())]) / self.lookups
        weight = (1 - row_share) * answered + row_share * edges / self.rows
        cuts = np.rint(np.interp(np.arange(parts + 1) / parts, weight, edges)).astype(np.int64)
        # At least one row each, from either end.
        places = np.arange(parts + 1)
        cuts = np.maximum.accumulate(np.maximum(cuts - places, 0)) + places
        found: NDArray[np.int64] = np.minimum(cuts, self.rows - parts + places)
        return found


def _make_room(kept: dict[float, Any]) -> None:
    while len(kept) >= _KEPT:
        del kept[next(iter(kept))]


def _range_edges(per_row: Floats) -> NDArray[np.int64]:
    rows, total = per_row.size, per_row.sum()
    weight = np.arange(1, rows + 1) / (2 * rows) + (np.cumsum(per_row) / (2 * total) if total > 0 else 0.0)
    cuts = np.searchsorted(weight, np.arange(1, RANGES) / RANGES) + 1
    found: NDArray[np.int64] = np.unique(np.concatenate([[0], cuts[cuts < rows], [rows]])).astype(np.int64)
    return found


def _share_seen(probability: Floats, lookups: float) -> Floats:
    """1 - (1 - p)^n without the cancellation of small p."""
    with np.errstate(divide="ignore"):
        return -np.expm1(lookups * np.log1p(-np.minimum(probability, 1.0)))


def _check_figures(name: str, values: Floats) -> None:
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"{name} must be finite and not negative, got {values.min()} to {values.max()}")


def _checked(found: AccessHistogram) -> AccessHistogram:
    for name in ("counts", "numbers"):
        _check_figures(name, getattr(found, name))
    if found.lookups <= 0:
        raise ValueError("counts must have at least one lookup, all are 0")
    return found
