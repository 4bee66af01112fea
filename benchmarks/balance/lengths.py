"""Sequence lengths of all users: the real lists where they are at hand, else lists of the same quantiles.

The lists lie in ../shared/data beside the checkout. Without that folder KuaiRand-27K's clicks come from the quantiles
that the generator of data/ reproduces, and Amazon Beauty's sequences from shares of its users.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.attention.lengths import BEAUTY_LENGTHS, BEAUTY_QUANTILES, DATA, USERS
from turbogr_plugin.data import synthetic

BEAUTY_USERS = 40_226


@dataclass(frozen=True)
class Lengths:
    """Tokens of each user's sequence."""

    values: NDArray[np.int64]
    source: str
    """Where they come from, for the record."""


def clicks(cap: int, folder: Path = DATA) -> Lengths:
    """Clicks per user of KuaiRand-27K, capped."""
    path = folder / "kuairand27k_user_lengths.csv"
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            counts = np.array([int(float(row["clicks"])) for row in csv.DictReader(file)])
        source = "KuaiRand-27K, clicks per user"
    else:
        at = (np.arange(USERS) + 0.5) / USERS
        counts = np.rint(synthetic.quantile(synthetic.CLICKS, at)).astype(np.int64)
        source = "generated from the quantiles of KuaiRand-27K's clicks per user"
    return Lengths(
        np.minimum(counts, cap).astype(np.int64),
        f"{source}, capped at {cap:,} (mean {np.minimum(counts, cap).mean():,.0f})",
    )


def beauty(folder: Path = DATA) -> Lengths:
    """Events per user of Amazon Beauty."""
    path = folder / "amazon_beauty.txt"
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            counts = np.array(list(Counter(line.split()[0] for line in file).values()))
        source = "Amazon Beauty, events per user"
    else:
        at = (np.arange(BEAUTY_USERS) + 0.5) / BEAUTY_USERS
        counts = np.ceil(np.exp(np.interp(at, BEAUTY_QUANTILES, np.log(BEAUTY_LENGTHS))) - 1e-9)
        source = "generated from the quantiles of Amazon Beauty's events per user"
    return Lengths(counts.astype(np.int64), f"{source} (mean {counts.mean():.1f}, longest {counts.max():.0f})")
