"""Uniform negatives over the whole corpus, drawn by a counter-based generator keyed by the sample.

A draw depends on (seed, epoch, sample id, position, number) alone: not on the rank that holds the sample, the batch
around it, or the worker process that collates it. An item equal to the positive may be drawn: the loss leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.keyed_random import Purpose, keyed_integers, keyed_words
from turbogr_plugin.kernels.offsets import positions, row_ids

NegativeSharing = Literal["none", "sequence"]


@dataclass(kw_only=True)
class NegativesConfig:
    """How negatives are drawn."""

    count: int = 128
    "Negatives for each target."
    sharing: NegativeSharing = "none"
    "none: each target has its own. sequence: the targets of a sequence share theirs; far fewer rows are looked up."

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"negatives.count must be at least 1, got {self.count}")
        if self.sharing not in get_args(NegativeSharing):
            raise InputError(f"negatives.sharing must be one of {get_args(NegativeSharing)}, got {self.sharing!r}")


def uniform_negatives(
    config: NegativesConfig, *, num_items: int, seed: int, epoch: int, samples: Tensor, target_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Negatives of each sample of a batch, as jagged ids.

    Args:
        config: number and sharing.
        num_items: size of the corpus; ids are drawn from [0, num_items).
        seed: of the run.
        epoch: counts from 0.
        samples: [B] int64 sample ids.
        target_offsets: [B + 1] int64, jagged layout of the targets.

    Returns:
        ids [sum of lengths] int64 and lengths [B] int64: `count` ids per target in the order of the targets, or
        `count` ids per sample that has a target, where a sequence shares them.
    """
    total = int(target_offsets[-1])
    if config.sharing == "none":
        owners = samples[row_ids(target_offsets, total)]
        lanes = positions(target_offsets, total)
        lengths = target_offsets.diff() * config.count
    else:
        has_target = target_offsets.diff() > 0
        owners = samples[has_target]
        lanes = torch.zeros_like(owners)
        lengths = has_target * config.count
    blocks = torch.arange(-(-config.count // 2), device=samples.device)
    words = keyed_words(
        Purpose.NEGATIVES, seed=seed, step=epoch, samples=owners[:, None], lanes=lanes[:, None], blocks=blocks
    )
    ids = keyed_integers(words, num_items).permute(1, 2, 0).flatten(1)[:, : config.count]
    return ids.flatten(), lengths
