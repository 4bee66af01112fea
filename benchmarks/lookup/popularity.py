"""Ids of a batch by the real popularity of videos, padded as the paper counts them, and without the padding.

The list of KuaiRand-27K lies in ../shared/data beside the checkout; without it the published shares of videos with at
least so many exposures stand in.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turbogr_plugin.data import synthetic

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
_LIST = "kuairand27k_item_popularity.csv"
PADDING = 0
"""The id that fills padded rows; no real id has it."""


@dataclass(frozen=True)
class Ids:
    """One batch of F features, each with a table of its own."""

    padded: Tensor
    """[F * B * L] int64: PADDING behind the ids of each row of the batch."""
    padded_offsets: Tensor
    """[F * B + 1]."""
    jagged: Tensor
    """[N] int64: the ids alone."""
    jagged_offsets: Tensor
    """[F * B + 1]."""
    source: str
    """Where the popularity comes from, for the record."""

    @property
    def padding(self) -> int:
        """Number of positions that hold no id."""
        return self.padded.numel() - self.jagged.numel()

    def by_feature(self, features: int) -> list[Tensor]:
        """The ids of each feature."""
        batch = (self.jagged_offsets.numel() - 1) // features
        return list(self.jagged.tensor_split(self.jagged_offsets[batch:-1:batch]))


def listed_popularity(folder: Path = DATA) -> tuple[np.ndarray, np.ndarray]:
    """(exposures of a video, videos with so many) of KuaiRand-27K, each [classes] float64.

    Raises:
        FileNotFoundError: the list is not in `folder`.
    """
    with (folder / _LIST).open(encoding="utf-8") as file:
        listed = [(int(row["exposure_per_video"]), int(row["video_count"])) for row in csv.DictReader(file)]
    exposures, videos = (np.array(column, dtype=np.float64) for column in zip(*listed, strict=True))
    return exposures, videos


def popularity(rows: int, rng: np.random.Generator, folder: Path = DATA) -> tuple[np.ndarray, str]:
    """Exposures of `rows` videos drawn from KuaiRand-27K, and where they come from."""
    if (folder / _LIST).is_file():
        exposures, videos = listed_popularity(folder)
        return rng.choice(exposures, rows, p=videos / videos.sum()), "KuaiRand-27K, exposures per video"
    shares = np.array(synthetic.ITEMS_AT_LEAST)
    drawn = np.exp(np.interp(-rng.uniform(shares[-1], 1.0, rows), -shares, np.log(synthetic.POPULARITY)))
    return np.floor(drawn), "drawn from the published shares of KuaiRand-27K's exposures per video"


def draw(features: int, batch: int, length: int, padding: int, rows: int, seed: int) -> Ids:
    """A batch of `features` x `batch` rows of at most `length` ids, of which `padding` positions are empty.

    Lengths are uniform; ids are drawn in proportion to the popularity of the rows of each table.
    """
    rng = np.random.default_rng(seed)
    lengths = _lengths(features * batch, length, features * batch * length - padding, rng)
    padded = np.full((features, batch, length), PADDING, dtype=np.int64)
    held = np.arange(length) < lengths.reshape(features, batch, 1)
    source = ""
    for feature in range(features):
        exposures, source = popularity(rows - 1, rng)
        cumulated = np.cumsum(exposures)
        drawn = rng.uniform(0, cumulated[-1], int(held[feature].sum()))
        padded[feature][held[feature]] = 1 + np.searchsorted(cumulated, drawn, side="right").clip(max=rows - 2)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Ids(
        torch.from_numpy(padded.reshape(-1)),
        torch.arange(features * batch + 1) * length,
        torch.from_numpy(padded[held]),
        torch.from_numpy(offsets),
        source,
    )


def _lengths(count: int, most: int, total: int, rng: np.random.Generator) -> np.ndarray:
    """`count` lengths of at most `most` whose sum is `total`."""
    lengths = rng.integers(0, most + 1, count)
    while (missing := total - int(lengths.sum())) != 0:
        chosen = rng.integers(0, count, min(abs(missing), count))
        np.add.at(lengths, chosen, np.sign(missing))
        lengths = lengths.clip(0, most)
    return lengths
