"""Sequence lengths of several kinds, for the tests of balance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def capped(count: int, seed: int) -> NDArray[np.int64]:
    """Like KuaiRand's clicks: close to half of the sequences at the cap."""
    drawn = np.exp(np.random.default_rng(seed).normal(8.2, 0.75, count))
    return np.clip(drawn.astype(np.int64), 10, 4096)


def zipf(count: int, seed: int) -> NDArray[np.int64]:
    """Many short ones and a few very long ones."""
    return np.minimum(np.random.default_rng(seed).zipf(1.2, count), 4096)


def lognormal(count: int, seed: int) -> NDArray[np.int64]:
    """A long tail without a cap."""
    return np.exp(np.random.default_rng(seed).normal(6.5, 0.8, count)).astype(np.int64) + 1


DRAWS = {"capped": capped, "zipf": zipf, "lognormal": lognormal}
