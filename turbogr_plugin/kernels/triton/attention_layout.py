"""What the attention kernels need beside q, k and v, made on the device without waiting for it.

Rows, pieces of work, times and position tiles are small tensors, computed by a handful of operators per call.

Letters: T tokens, B rows, H heads, N entries of a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import AttentionCall

# A time is split at 2^24, so that differences of either part are exact in float32.
_SPLIT = 1 << 24


class Work(NamedTuple):
    """Tiles of all rows, the unit that programs take one by one."""

    items: Tensor
    """int32 [bound, 2]: row and number of the tile in its row."""
    size: Tensor
    """int32 [1]: how many of them there are."""
    bound: int
    """What `size` cannot exceed: known without reading the device."""


def row_table(call: AttentionCall) -> Tensor:
    """int32 [B, 4]: start, length, number of targets and of contextual tokens of each row.

    Offsets that do not fit are cut to the batch: they make a wrong result, never a read outside of it.
    """
    offsets = call.offsets.clamp(0, call.q.shape[0]).to(torch.int32)
    starts, lengths = offsets[:-1], offsets.diff().clamp_(min=0)
    none = torch.zeros_like(starts)
    targets = none if call.num_targets is None else call.num_targets.to(torch.int32).clamp(min=0).minimum(lengths)
    contextual = none if call.num_contextual is None else call.num_contextual.to(torch.int32).clamp(min=0)
    return torch.stack([starts, lengths, targets, contextual], dim=1)


def work(rows: Tensor, tokens: int, tile: int) -> Work:
    """The tiles of `tile` tokens that the rows are cut into; a row's last one may be partly empty."""
    bound = (tokens + rows.shape[0] * (tile - 1)) // tile
    tiles = (rows[:, 1] + (tile - 1)).div(tile, rounding_mode="floor")
    ends = tiles.cumsum(0)
    numbers = torch.arange(bound, device=rows.device)
    row = torch.searchsorted(ends, numbers, right=True).clamp_(max=rows.shape[0] - 1)
    items = torch.stack([row, numbers - (ends - tiles)[row]], dim=1).to(torch.int32)
    return Work(items, ends[-1:].clamp(max=bound).to(torch.int32), bound)


def split_times(call: AttentionCall) -> Tensor:
    """float32 [4, T]: high and low part of the query times, then of the key times.

    Times count from the first event of their row. The low part is the time modulo 2^24, the high part the rest, and
    both are exact up to spans of 2^48: then high - high + (low - low) is the float32 nearest to the gap, without the
    64-bit arithmetic that vector cores lack.
    """
    keys, queries = call.timestamps, call.query_timestamps
    assert keys is not None and queries is not None
    tokens = keys.shape[0]
    offsets = call.offsets.to(torch.int64).clamp(0, tokens)
    numbers = torch.arange(tokens, device=keys.device)
    row = torch.searchsorted(offsets[1:].contiguous(), numbers, right=True).clamp_(max=offsets.numel() - 2)
    base = keys.to(torch.int64)[offsets[:-1].clamp(max=tokens - 1)][row]
    parts = []
    for times in (queries, keys):
        since = times.to(torch.int64) - base
        low = since.remainder(_SPLIT)
        parts += [(since - low).to(torch.float32), low.to(torch.float32)]
    return torch.stack(parts)


def position_tiles(table: Tensor, rows: int, columns: int) -> Tensor:
    """float32 [1 or H, tiles, rows, columns]: the biases of each tile diagonal, see `position_bias_tile`."""
    entries = table.shape[-1]
    step = min(rows, columns)
    last = (entries + columns) // step + 1 + rows // step
    offsets = torch.arange(last + 1, device=table.device) * step - rows
    i = torch.arange(rows, device=table.device)
    j = torch.arange(columns, device=table.device)
    gaps = (offsets[:, None, None] + i[:, None] - j).clamp_(0, entries - 1)
    return table.reshape(-1, entries).to(torch.float32)[:, gaps].contiguous()


def fold_positions(sums: Tensor, entries: int, tile: int) -> Tensor:
    """Sums by i - j of a table's entries, from those of the kernel's slots: [..., slots] -> [..., entries].

    Slot s is for i - j = s - 2 * tile; differences outside the table belong to its ends.
    """
    first = 2 * tile
    folded = sums[..., first : first + entries].clone()
    folded[..., 0] += sums[..., :first].sum(-1)
    folded[..., -1] += sums[..., first + entries :].sum(-1)
    return folded


def position_slots(entries: int, tile: int) -> int:
    """How many slots `fold_positions` takes."""
    return (-(-entries // tile) + 4) * tile


def padded_dim(dim: int) -> int:
    """Dims of a tile: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
