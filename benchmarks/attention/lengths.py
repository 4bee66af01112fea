"""Row lengths of the benchmark's batches: drawn from the real lists where they are at hand, else from their quantiles.

The lists lie in ../shared/data beside the checkout. Without that folder KuaiRand-27K's clicks come from the quantiles
that the generator of data/ reproduces, and Amazon Beauty's sequences from the shares below.
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turbogr_plugin.data import synthetic

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
USERS = 27_285

BEAUTY_QUANTILES = (0.0, 0.319, 0.508, 0.629, 0.709, 0.767, 0.81, 0.87, 0.905, 0.954, 0.99, 0.999, 1.0)
BEAUTY_LENGTHS = (5, 5, 6, 7, 8, 9, 10, 12, 14, 20, 41, 106, 293)
"""Shares of Amazon Beauty's 40,226 users, at least five events each, with at most so many events (mean 8.8)."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows of one batch."""

    values: tuple[int, ...]
    source: str
    """Where they come from, for the record."""


def kuairand(batch: int, *, cap: int, seed: int, folder: Path = DATA) -> Lengths:
    """`batch` lengths, drawn from the clicks per user of KuaiRand-27K and capped."""
    path = folder / "kuairand27k_user_lengths.csv"
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            clicks = [int(float(row["clicks"])) for row in csv.DictReader(file)]
        source = "KuaiRand-27K, clicks per user"
    else:
        at = (np.arange(USERS) + 0.5) / USERS
        clicks = np.rint(synthetic.quantile(synthetic.CLICKS, at)).astype(int).tolist()
        source = "generated from the quantiles of KuaiRand-27K's clicks per user"
    drawn = random.Random(seed).choices(clicks, k=batch)
    return Lengths(tuple(min(clicks, cap) for clicks in drawn), f"{source}, capped at {cap}, seed {seed}")


def beauty(batch: int, *, seed: int, folder: Path = DATA) -> Lengths:
    """`batch` lengths, drawn from the events per user of Amazon Beauty."""
    path = folder / "amazon_beauty.txt"
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            events = list(Counter(line.split()[0] for line in file).values())
        source = "Amazon Beauty, events per user"
    else:
        at = (np.arange(USERS) + 0.5) / USERS
        logarithms = np.interp(at, BEAUTY_QUANTILES, np.log(BEAUTY_LENGTHS))
        events = np.ceil(np.exp(logarithms) - 1e-9).astype(int).tolist()
        source = "generated from the quantiles of Amazon Beauty's events per user"
    return Lengths(tuple(random.Random(seed).choices(events, k=batch)), f"{source}, seed {seed}")
