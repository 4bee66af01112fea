"""Spans of collectives of a rank, and how much of each step they cover."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch.profiler import profile

Span = tuple[float, float]
"""Begin and end in milliseconds."""
_PREFIX, _STEP = "gloo:", "## step ##"
STEP = _STEP
"""The range that begins a step."""


def of_profile(profiler: profile) -> tuple[list[tuple[str, float, float]], list[float]]:
    """(name, begin, end) of each collective of all threads, barriers left out, and the begin of each step."""
    collectives, begins = [], []
    for event in profiler.events():
        begin, end = event.time_range.start / 1e3, event.time_range.end / 1e3
        if event.name == _STEP:
            begins.append(begin)
        elif event.name.startswith(_PREFIX) and event.name != f"{_PREFIX}barrier":
            collectives.append((event.name.removeprefix(_PREFIX), begin, end))
    return collectives, sorted(begins)


def union(spans: Iterable[Span]) -> float:
    """Milliseconds that at least one span covers."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def covered(spans: Sequence[Span], bounds: Sequence[float]) -> list[float]:
    """Milliseconds that spans cover between each two bounds, which ascend."""
    return [
        union((max(begin, first), min(end, last)) for begin, end in spans if end > first and begin < last)
        for first, last in itertools.pairwise(bounds)
    ]
