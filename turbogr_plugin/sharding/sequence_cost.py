"""What a sequence costs: linear plus quadratic in its length, in whatever unit the caller counts.

Balancing needs ratios alone, so tokens, FLOPs and seconds serve equally; `cost_calibration` measures seconds. Left out:
what a step costs however long its sequences are, which no assignment of samples can change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True)
class SequenceCost:
    """Cost of a sequence of L tokens: linear · L + quadratic · L²."""

    linear: float = 0.0
    "Of a token: projections, feed-forward parts, lookups."
    quadratic: float = 0.0
    "Of a pair of tokens: attention."

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if self.linear == self.quadratic == 0:
            raise ValueError("linear and quadratic are both 0: a cost that is 0 everywhere cannot be balanced")

    @classmethod
    def tokens(cls) -> SequenceCost:
        """The number of tokens."""
        return cls(linear=1.0)

    @classmethod
    def hstu(cls, dim: int) -> SequenceCost:
        """Forward FLOPs of an HSTU block: 5·D² weights, and QK and AV over the allowed half of the pairs."""
        return cls(linear=10.0 * dim * dim, quadratic=2.0 * dim)

    @classmethod
    def fuxi(cls, dim: int) -> SequenceCost:
        """Forward FLOPs of a FuXi block: 12·D² weights, and QK and thrice AV over the allowed half of the pairs."""
        return cls(linear=24.0 * dim * dim, quadratic=4.0 * dim)

    def of(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Cost of each sequence.

        Args:
            lengths: [n] tokens of each.

        Returns:
            [n] float64.

        Raises:
            ValueError: lengths that are not one-dimensional, or a negative one.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        if tokens.ndim != 1:
            raise ValueError(f"lengths must be one-dimensional, got the shape {list(tokens.shape)}")
        if len(tokens) and not tokens.min() >= 0:
            raise ValueError(f"lengths must be at least 0, got {tokens.min():g}")
        return tokens * self.linear + tokens * tokens * self.quadratic
