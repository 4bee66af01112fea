"""Duplicate ids of a batch, without waiting for the device: which gradients belong to one row, and their sum.

An optimizer that is fused into the backward pass must see every touched row once, with the sum of all its gradients.
The number of different rows is known to the device only; waiting for it would stall the step. The result therefore has
N places for N ids, and the places behind the last different row repeat it. `coalesce_rows` waits and returns as many
rows as there are.

Source: the sort and segment scheme of fbgemm's transpose_embedding_input (fbgemm_gpu 1.8.0,
src/split_embeddings_utils/transpose_embedding_input.cu), without its host-side counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ABSENT = 2**62  # sorts behind every row number


@dataclass(frozen=True)
class RowGroups:
    """N ids grouped by row."""

    order: Tensor
    """[N] int64: positions sorted by row, positions of one row in their own order."""
    segment: Tensor
    """[N] int64: place of the row that the id at `order[i]` names."""
    representative: Tensor
    """[N] int64: for each place one position that names its row; behind the last row that of the last row."""
    place: Tensor
    """[N] int64: 0, 1, ..., number of rows - 1, and then number of rows - 1 for all others."""
    any_row: Tensor
    """[] bool: whether there is a row at all."""


def group_rows(row: Tensor, absent: Tensor) -> RowGroups:
    """Groups ids by row.

    Args:
        row: [N] int64, N > 0: number of the row over all tables.
        absent: [N] bool: ids to be left out; they come behind all others.
    """
    count = row.numel()
    ordered, order = row.masked_fill(absent, _ABSENT).sort(stable=True)
    head = torch.cat([torch.ones_like(absent[:1]), ordered[1:] != ordered[:-1]])
    segment = head.to(torch.int64).cumsum(0) - 1
    rows = (head & (ordered < _ABSENT)).to(torch.int64).sum()
    place = torch.minimum(torch.arange(count, device=row.device), rows - 1).clamp(min=0)
    representative = order.index_select(0, torch.searchsorted(segment, place))
    return RowGroups(order, segment, representative, place, rows > 0)


def sum_groups(groups: RowGroups, gradients: Tensor) -> Tensor:
    """Sums the gradients of each row, in the order of the positions.

    The order is that of the additions wherever index_add works through its index in order, as on the CPU. A chip that
    adds with atomics keeps it under torch.use_deterministic_algorithms(True) only.

    Args:
        groups: what `group_rows` returned.
        gradients: [N, D] float32 or float64, sorted: row i belongs to the id at `groups.order[i]`.

    Returns:
        [N, D] by place.
    """
    sums = torch.zeros_like(gradients).index_add_(0, groups.segment, gradients)
    return sums.index_select(0, groups.place)
