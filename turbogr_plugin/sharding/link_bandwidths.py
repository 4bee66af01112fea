"""Speeds of the links of a cluster by level and kind of traffic, where TorchRec's planner asks for them.

Two levels: inside a fast domain (a host, or a pod whose hosts share the fast links) and between domains. Three kinds of
traffic, because libraries reach different shares of a link with each: over a slow link gloo's all-to-all moves one
direction at a time between some pairs of ranks, by chance, the more so the larger its messages are, while
point-to-point messages whose receives are posted first use both directions.

    time of a collective = messages x latency + bytes that one rank sends / bandwidth

All bandwidths are bytes/s of one rank in one direction. Latency is seconds per message; 0 where it is unknown.
Left out: contention between jobs, and levels above two.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import CollectiveType, GeneralizedCommsBandwidth

#: TorchRec's bandwidths are bytes per millisecond.
MILLISECONDS = 1_000.0


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """One level: what one rank sends per second with each kind of traffic."""

    all_to_all: float
    """Bytes/s of all-to-all, the traffic of sharded tables."""
    all_reduce: float
    """Bytes/s of all-reduce: bytes that a ring sends, 2 (n - 1) / n of the tensor, over its time."""
    exchange: float
    """Bytes/s of point-to-point messages with receives posted first, the traffic of the gradient exchange."""
    latency: float = 0.0
    """Seconds per message."""
    all_to_all_by_size: tuple[tuple[float, float], ...] = ()
    """(bytes that one rank sends in one all-to-all, bytes/s), sizes ascending; empty: `all_to_all` at any size."""

    def __post_init__(self) -> None:
        for name in ("all_to_all", "all_reduce", "exchange"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number of bytes/s, got {value!r}")
        if not is_number(self.latency) or not 0 <= self.latency < math.inf:
            raise ValueError(f"latency must be a number of seconds >= 0, got {self.latency!r}")
        points = self.all_to_all_by_size
        pairs = isinstance(points, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in points)
        numbers = pairs and all(is_number(figure) and 0 < figure < math.inf for pair in points for figure in pair)
        if not numbers or [size for size, _ in points] != sorted({size for size, _ in points}):
            raise ValueError(
                "all_to_all_by_size must be pairs of positive numbers, bytes ascending and bytes/s, "
                f"got {self.all_to_all_by_size!r}"
            )

    @classmethod
    def same(cls, bandwidth: float, latency: float = 0.0) -> LinkSpeeds:
        """One figure for every kind, which is all that a data sheet gives."""
        return cls(all_to_all=bandwidth, all_reduce=bandwidth, exchange=bandwidth, latency=latency)

    def all_to_all_of(self, size: float) -> float:
        """Bytes/s of all-to-alls in which one rank sends `size` bytes, between measured sizes by their logarithm."""
        if not self.all_to_all_by_size:
            return self.all_to_all
        sizes, rates = zip(*self.all_to_all_by_size, strict=True)
        return float(np.interp(math.log(max(size, 1.0)), np.log(sizes), rates))


def is_number(value: Any) -> bool:
    """Whether a value of a file can be a figure."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:  # of integers with hundreds of digits
        return False
    return True


class LinkBandwidths(GeneralizedCommsBandwidth):
    """TorchRec's hook for bandwidths, with both levels.

    Args:
        intra: inside a fast domain.
        inter: between domains.
    """

    def __init__(self, intra: LinkSpeeds, inter: LinkSpeeds) -> None:
        self.intra = intra
        self.inter = inter

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Bytes per millisecond of a collective of `world_size` ranks, `local_world_size` to a domain.

        As TorchRec's own: an all-reduce over domains uses the links of all ranks of a domain.
        """
        level = self.intra if world_size <= local_world_size else self.inter
        if collective_type == CollectiveType.ALL_REDUCE:
            return level.all_reduce / MILLISECONDS * (1 if level is self.intra else local_world_size)
        return level.all_to_all / MILLISECONDS

    @property
    def intra_host_bw(self) -> float:
        """Bytes per millisecond, for what knows one figure only."""
        return self.intra.all_to_all / MILLISECONDS

    @property
    def inter_host_bw(self) -> float:
        """Bytes per millisecond, for what knows one figure only."""
        return self.inter.all_to_all / MILLISECONDS

    def __str__(self) -> str:
        return f"LinkBandwidths: intra {self.intra}, inter {self.inter}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinkBandwidths) and (self.intra, self.inter) == (other.intra, other.inter)

    def __hash__(self) -> int:
        return hash((self.intra, self.inter))

    def as_json(self) -> dict[str, Any]:
        """Both levels as plain values."""
        return {"intra": asdict(self.intra), "inter": asdict(self.inter)}

    @classmethod
    def from_json(cls, values: Any, where: str) -> LinkBandwidths:
        """Reads what `as_json` gives.

        Args:
            values: the object of the file.
            where: names it in messages.

        Raises:
            ValueError: a level or a figure is missing, superfluous or no number.
        """
        return cls(*(_level(values, name, where) for name in ("intra", "inter")))


def link_bandwidths(found: GeneralizedCommsBandwidth) -> LinkBandwidths:
    """The bandwidths of any topology: ours as they are, TorchRec's as one figure per level and no latency."""
    if isinstance(found, LinkBandwidths):
        return found
    return LinkBandwidths(
        LinkSpeeds.same(found.intra_host_bw * MILLISECONDS), LinkSpeeds.same(found.inter_host_bw * MILLISECONDS)
    )


def _level(values: Any, name: str, where: str) -> LinkSpeeds:
    level = values.get(name) if isinstance(values, dict) else None
    names = {field.name for field in fields(LinkSpeeds)}
    optional = {"all_to_all_by_size"}
    if not isinstance(level, dict) or not names - optional <= set(level) <= names:
        raise ValueError(
            f"{where}: links.{name} must have exactly {', '.join(sorted(names - optional))} and may have "
            f"{', '.join(optional)}, got {level!r}"
        )
    try:
        by_size: Any = level.get("all_to_all_by_size", [])
        if isinstance(by_size, list):
            by_size = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in by_size)
        return LinkSpeeds(**{**level, "all_to_all_by_size": by_size})
    except ValueError as error:
        raise ValueError(f"{where}: links.{name}: {error}") from None
