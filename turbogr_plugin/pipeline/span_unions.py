"""Arithmetic of spans of time that may overlap: their union, what others leave of it, and its length.

A union is a sorted list of (start, end) that neither overlap nor touch and are not empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

Interval: TypeAlias = tuple[float, float]
Union: TypeAlias = list[Interval]
T = TypeVar("T")


def union(intervals: Iterable[Interval]) -> Union:
    """The time that at least one of the intervals covers, in any order; those of no length cover none."""
    merged: Union = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def difference(of: Sequence[Interval], without: Sequence[Interval]) -> Union:
    """The time of the first union that the second leaves."""
    left: Union = []
    at = 0
    for start, end in of:
        while at < len(without) and without[at][1] <= start:
            at += 1
        # The last one that reaches into this interval may reach into the next, too, so `at` stays before it.
        following = at
        while following < len(without) and without[following][0] < end:
            covered_from, covered_to = without[following]
            if covered_from > start:
                left.append((start, covered_from))
            start = covered_to
            following += 1
        if start < end:
            left.append((start, end))
    return left


def within(of: Sequence[Interval], start: float, end: float) -> Union:
    """The time of a union from `start` to `end`."""
    return [(max(start, left), min(end, right)) for left, right in of if right > start and left < end]


def length(of: Iterable[Interval]) -> float:
    """Length of a union."""
    return sum(end - start for start, end in of)


def stacked(intervals: Sequence[Interval]) -> list[int]:
    """A row for each interval, in which none overlaps another: as few rows as most overlap at once.

    Args:
        intervals: sorted by start.
    """
    ends: list[float] = []
    rows = []
    for start, end in intervals:
        row = next((row for row, last in enumerate(ends) if last <= start), len(ends))
        ends[row:] = [end] if row == len(ends) else [end, *ends[row + 1 :]]
        rows.append(row)
    return rows
