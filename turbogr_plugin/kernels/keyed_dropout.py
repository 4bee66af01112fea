"""Dropout whose mask is a function of (seed, step, sample id, layer, element).

The mask is computed again in backward instead of being stored, and it is the same whatever rank holds the sample and
whatever shares its batch. Plain `torch.nn.functional.dropout` has neither property.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.keyed_random import Purpose, keyed_words

_CHUNK = 1 << 18  # elements per pass: the Philox rounds then work in the second-level cache


@dataclass(frozen=True)
class DropoutKey:
    """What the masks of one batch are drawn from.

    Attributes:
        seed: of the run.
        step: the global training step.
        samples: [T] int64, sample id of each token.
        positions: [T] int64, position of each token in its sample.
    """

    seed: int
    step: int
    samples: Tensor
    positions: Tensor


def keep_mask(key: DropoutKey, layer: int, width: int, p: float) -> Tensor:
    """Which elements survive: bool [T, width], False with probability p (rounded to a multiple of 2^-32)."""
    threshold = round(p * (1 << 32))
    blocks = -(-width // 4)
    lanes = torch.arange(blocks, device=key.samples.device)
    rows = max(1, _CHUNK // max(1, width))
    masks = []
    for samples, places in zip(key.samples.split(rows), key.positions.split(rows), strict=True):
        words = keyed_words(
            Purpose.DROPOUT,
            seed=key.seed,
            step=key.step,
            samples=samples[:, None],
            lanes=layer,
            blocks=places[:, None] * blocks + lanes,
        )
        masks.append((words >= threshold).permute(1, 2, 0).reshape(samples.numel(), blocks * 4)[:, :width])
    return torch.cat(masks)


def _drop(x: Tensor, key: DropoutKey, layer: int, p: float) -> Tensor:
    # The factor stays a Python number: in bfloat16 it would be off by up to 0.4 % for every element alike.
    return torch.where(keep_mask(key, layer, x.shape[1], p), x * (1 / (1 - p)), 0)


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: DropoutKey, layer: int, p: float) -> Tensor:
        ctx.args = (key, layer, p)
        return _drop(x, key, layer, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        key, layer, p = ctx.args
        (grad,) = grads
        return _drop(grad, key, layer, p), None, None, None


def keyed_dropout(x: Tensor, key: DropoutKey, *, layer: int, p: float) -> Tensor:
    """Zeroes each element with probability p and divides the others by 1 - p.

    Args:
        x: [T, D], floating point.
        key: seed, step, and the sample id and position of each of the T tokens.
        layer: number of this dropout in the model: each place takes its own.
        p: probability in [0, 1).

    Returns:
        [T, D], dtype of x.

    Raises:
        ValueError: p outside [0, 1), or a key for another number of tokens.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    if x.dim() != 2 or key.samples.shape != x.shape[:1] or key.positions.shape != x.shape[:1]:
        raise ValueError(
            f"x must be [T, D] with one sample id and position per token, got {tuple(x.shape)} and "
            f"{tuple(key.samples.shape)}, {tuple(key.positions.shape)}"
        )
    if p == 0 or x.numel() == 0:
        return x
    result: Tensor = _KeyedDropout.apply(x, key, layer, p)
    return result
