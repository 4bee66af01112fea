"""Spans of collectives of a rank, and how much of each step they cover."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.profiler import profile

from turbogr_plugin.pipeline.span_unions import Interval, length, union, within

_PREFIX = "gloo:"
STEP = "## step ##"
"""The range that begins a step."""


def of_profile(profiler: profile) -> tuple[list[tuple[str, float, float]], list[float]]:
    """(name, begin, end) of each collective of all threads, barriers left out, and the begin of each step."""
    collectives, begins = [], []
    for event in profiler.events():
        begin, end = event.time_range.start / 1e3, event.time_range.end / 1e3
        if event.name == STEP:
            begins.append(begin)
        elif event.name.startswith(_PREFIX) and event.name != f"{_PREFIX}barrier":
            collectives.append((event.name.removeprefix(_PREFIX), begin, end))
    return collectives, sorted(begins)


def covered(spans: Sequence[Interval], bounds: Sequence[float]) -> list[float]:
    """Milliseconds that spans cover between each two bounds, which ascend."""
    under_way = union(spans)
    return [length(within(under_way, first, last)) for first, last in itertools.pairwise(bounds)]
