"""A batch's attention as chunks of queries of one row each: what the plain PyTorch attentions share.

A chunk knows its queries, the keys that they may see, which of the pairs are allowed, and which entries of the bias
tables they take; it is as small as keeps [H, n, m] within 16 MiB of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import AttentionCall, check_host_offsets
from turbogr_plugin.kernels.attention_mask import TokenIds, allowed_pairs, token_ids
from turbogr_plugin.kernels.relative_bias import bucket_numbers

CHUNK_ELEMENTS = 1 << 22  # scores of one chunk, all heads: 16 MiB in float32


@dataclass(frozen=True)
class Chunk:
    """n queries and m keys of one row, as slices of the T tokens."""

    queries: slice
    keys: slice
    hidden: Tensor
    """bool [n, m]: pairs that do not attend."""
    between: Tensor | None
    """int64 [n, m]: time of the query minus time of the key, where the call has times."""
    buckets: Tensor | None
    """int64 [n, m]: entries of `time_bias`, where there is one."""
    gaps: Tensor | None
    """int64 [n, m]: entries of `position_bias`, where there is one."""

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """Products of each query's row of x with each key's row of y: [H, n, m] from [T, H, D]."""
        return torch.matmul(x[self.queries].transpose(0, 1), y[self.keys].permute(1, 2, 0))

    def hide(self, weights: Tensor) -> Tensor:
        """`weights` [..., n, m] with zeros, written in place, where pairs do not attend."""
        return weights.masked_fill_(self.hidden, 0)


def chunks(call: AttentionCall) -> Iterator[Chunk]:
    """All chunks of a call, row after row. Reads `offsets` on the host where `host_offsets` are not given."""
    total, heads = call.q.shape[:2]
    layout = call.offsets.tolist() if call.host_offsets is None else list(call.host_offsets)
    check_host_offsets(layout, total)
    ids = token_ids(call.offsets, total, call.num_targets, call.num_contextual)
    for row, (start, end) in enumerate(pairwise(layout)):
        length = end - start
        if length == 0:
            continue
        step = max(1, CHUNK_ELEMENTS // (heads * length))
        for first in range(start, end, step):
            last = min(first + step, end)
            # Contextual tokens see what stands behind them.
            keys = last if call.causal and call.num_contextual is None else end
            yield _chunk(call, ids, row, slice(first, last), slice(start, keys))


def _chunk(call: AttentionCall, ids: TokenIds, row: int, queries: slice, keys: slice) -> Chunk:
    allowed = allowed_pairs(
        ids.ids[queries],
        ids.ids[keys],
        ids.last[row],
        None if call.num_contextual is None else call.num_contextual[row],
        first_query=queries.start,
        first_key=keys.start,
        causal=call.causal,
        window=call.window,
        full_tail=call.full_tail,
    )
    between = buckets = gaps = None
    if call.timestamps is not None and call.query_timestamps is not None:
        between = call.query_timestamps[queries, None].long() - call.timestamps[None, keys].long()
    if call.time_bias is not None:
        assert between is not None and call.time_borders is not None
        buckets = bucket_numbers(between, call.time_borders)
    if call.position_bias is not None:
        i = torch.arange(queries.start, queries.stop, device=call.q.device)
        j = torch.arange(keys.start, keys.stop, device=call.q.device)
        gaps = (i[:, None] - j[None]).clamp_(0, call.position_bias.shape[-1] - 1)
    return Chunk(queries, keys, allowed.logical_not_(), between, buckets, gaps)


def sums_like(x: Tensor) -> Tensor:
    """Zeros of the shape of x, in float32 or wider."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def add_by_entry(table: Tensor, entries: Tensor | None, values: Tensor) -> None:
    """table[..., entries] += values.

    Args:
        table: [N] or [H, N].
        entries: [n, m] int64.
        values: [H, n, m], summed over the heads where they share the table.
    """
    assert entries is not None
    if table.dim() == 1:
        table.index_add_(0, entries.flatten(), values.sum(0).flatten().to(table.dtype))
    else:
        table.index_add_(1, entries.flatten(), values.flatten(1).to(table.dtype))
