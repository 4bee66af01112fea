"""Positions of a batch sorted by the row that they name, for kernels that take one row after the other.

Everything stays on the device; how many different rows there are is known to the kernels only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ABSENT = 2**62  # sorts behind every row number


class RowSegments(NamedTuple):
    """N positions as segments, one per different row, in ascending order of rows."""

    order: Tensor
    """[N] int64: the positions, those of one row in their own order, absent ones last."""
    begins: Tensor
    """[N + 2] int64: where in `order` each segment begins; then, where the last one ends."""
    heads: Tensor
    """[N + 1] int64: how many segments begin in the first n places of `order`."""
    numbers: Tensor
    """[N] int64: the row at each place of `order`."""


def row_segments(number: Tensor, absent: Tensor | None = None) -> RowSegments:
    """Sorts and finds the segments.

    Args:
        number: [N] integers: what row each position names.
        absent: [N] bool: positions that name none; None: all do.
    """
    count = number.numel()
    key = number.to(torch.int64)
    numbers, order = (key if absent is None else key.masked_fill(absent, _ABSENT)).sort(stable=True)
    head = torch.ones(count, dtype=torch.bool, device=number.device)
    torch.ne(numbers[1:], numbers[:-1], out=head[1:])
    end: Tensor | int = count
    if absent is not None:
        head &= numbers != _ABSENT
        end = (~absent).sum()
    heads = head.new_zeros(count + 1, dtype=torch.int64)
    heads[1:] = head.cumsum(0)
    begins = torch.empty(count + 2, dtype=torch.int64, device=number.device)
    begins[:] = end
    place = torch.arange(count, device=number.device)
    # What begins no segment goes to the last element, which nothing reads.
    begins.scatter_(0, torch.where(head, heads[:-1], count + 1), place)
    return RowSegments(order, begins, heads, numbers)
