"""The jagged layout: lengths, offsets, row numbers and positions.

A jagged tensor is `values [T, ...]` with `offsets [B + 1]`; row b is `values[offsets[b] : offsets[b + 1]]`. Zero rows
and rows of zero length are legal everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._guards import detect_fake_mode


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Offsets [B + 1] of rows with `lengths` [B], in the dtype of `lengths` (int32 or int64)."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def row_ids(offsets: Tensor, total: int) -> Tensor:
    """The row of each value: [total] int64. `total` is `offsets[-1]`, passed in so that no device is waited for."""
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=total)


def positions(offsets: Tensor, total: int) -> Tensor:
    """The position of each value in its row: [total] int64, counting from 0."""
    return torch.arange(total, device=offsets.device) - offsets[row_ids(offsets, total)]


def has_readable_values(tensor: Tensor) -> bool:
    """Whether the host can read the values of a tensor without waiting for a device.

    Not while a compiler traces and not where a tensor has no data (FakeTensor): there is nothing to read yet.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return detect_fake_mode(tensor) is None


def check_offsets(offsets: Tensor, total: int, *, name: str = "offsets") -> None:
    """Raises ValueError unless `offsets` describes rows of `total` values.

    Shape and dtype are always checked; the values where the host can read them (see `has_readable_values`).

    Args:
        offsets: [B + 1], int32 or int64.
        total: number of values T that the rows must add up to.
        name: the argument's name in messages.
    """
    if offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(f"{name} must be one-dimensional with B + 1 >= 1 elements, got shape {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {offsets.dtype}")
    if not has_readable_values(offsets):
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != total:
        raise ValueError(f"{name} must run from 0 to the number of values {total}, got {first} to {last}")
    if bool((offsets.diff() < 0).any()):
        row = int((offsets.diff() < 0).nonzero()[0])
        raise ValueError(f"{name} must not decrease, but {name}[{row}] = {offsets[row]} > {offsets[row + 1]}")
