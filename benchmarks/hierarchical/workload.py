"""What is trained: one item table, row-wise over a group, under a small dense part; ids by real popularity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from benchmarks.lookup.popularity import DATA, listed_popularity
from turbogr_plugin.sharding.scale_prediction import kuairand_items

FEATURE, TABLE = "item", "item"
SAMPLES = 8
"""Per rank and step."""


@dataclass(frozen=True)
class Workload:
    """One setting."""

    lookups: int = 8_192
    """Per rank and step."""
    exposures: int = 1_000
    """The vocabulary holds videos with at least so many."""
    dim: int = 128
    hidden: int = 256
    listed: bool = True
    """By the list of KuaiRand-27K; False: by its published shares."""

    def popularity(self) -> tuple[np.ndarray, np.ndarray]:
        """(exposures of a video, videos) of each class of the vocabulary."""
        if self.listed:
            exposures, videos = listed_popularity(DATA)
        else:
            access = kuairand_items(self.exposures)
            exposures, videos = access.counts, access.numbers
        kept = exposures >= self.exposures
        return exposures[kept], videos[kept].round().astype(np.int64)


class Items:
    """Draws ids of one rank."""

    def __init__(self, workload: Workload, seed: int) -> None:
        exposures, videos = workload.popularity()
        self._workload, self.rows = workload, int(videos.sum())
        self._weights = torch.from_numpy(exposures * videos)
        self._videos = torch.from_numpy(videos)
        self._first = torch.cat([torch.zeros(1, dtype=torch.int64), self._videos.cumsum(0)])
        # Coprime to the rows: a bijection, which spreads popular ids over the row ranges.
        self._stride = next(n for n in range(int(self.rows * 0.618), 2 * self.rows) if math.gcd(n, self.rows) == 1)
        self._generator = torch.Generator().manual_seed(seed)

    def _draw(self, count: int) -> Tensor:
        of_class = torch.multinomial(self._weights, count, replacement=True, generator=self._generator)
        fraction = torch.rand(count, generator=self._generator, dtype=torch.float64)
        place = (fraction * self._videos[of_class]).long()
        return (self._first[of_class] + place) * self._stride % self.rows

    def batches(self, count: int) -> Iterator[KeyedJaggedTensor]:
        """Batches of SAMPLES samples of one length."""
        lookups = self._workload.lookups
        for _ in range(count):
            lengths = torch.full((SAMPLES,), lookups // SAMPLES)
            yield KeyedJaggedTensor(keys=[FEATURE], values=self._draw(lookups), lengths=lengths)


class Model(nn.Module):
    """The mean square of a two-layer network's answer for each item."""

    def __init__(self, workload: Workload, rows: int) -> None:
        super().__init__()
        config = EmbeddingConfig(name=TABLE, num_embeddings=rows, embedding_dim=workload.dim, feature_names=[FEATURE])
        self.tables = EmbeddingCollection(device=torch.device("meta"), tables=[config])
        self.dense = nn.Sequential(
            nn.Linear(workload.dim, workload.hidden), nn.Tanh(), nn.Linear(workload.hidden, 1), nn.Tanh()
        )

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """[]: the loss."""
        loss: Tensor = self.dense(self.tables(ids)[FEATURE].values()).square().mean()
        return loss
