"""HSTU attention in plain PyTorch, row by row and chunk by chunk of queries.

The backward computes each chunk's scores again, so that the largest temporary is [H, chunk, row length] in both
directions. The layout is needed on the host: where a caller does not pass it there, reading it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.kernels.relative_bias import time_buckets

_CHUNK_ELEMENTS = 1 << 22  # scores of one chunk, all heads: 16 MiB in float32


class AttentionCall(NamedTuple):
    """The arguments of `kernels.jagged_attention.hstu_attention`, all given."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    alpha: float
    scale: float
    causal: bool
    timestamps: Tensor | None
    query_timestamps: Tensor | None
    time_bias: Tensor | None
    position_bias: Tensor | None
    host_offsets: Sequence[int] | None = None


def _chunks(call: AttentionCall) -> Iterator[tuple[slice, slice, int]]:
    """(query rows, key rows, first query position) of each chunk; key rows begin at position 0 of their row."""
    heads = call.q.shape[1]
    for start, end in pairwise(call.offsets.tolist() if call.host_offsets is None else call.host_offsets):
        length = end - start
        if length == 0:
            continue
        rows = max(1, _CHUNK_ELEMENTS // (heads * length))
        for first in range(0, length, rows):
            last = min(first + rows, length)
            keys = last if call.causal else length
            yield slice(start + first, start + last), slice(start, start + keys), first


def _scores(
    call: AttentionCall, rows: slice, columns: slice, first: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores of a chunk before the activation [H, n, m], and the bias entries that each pair takes."""
    scores = torch.matmul(call.q[rows].transpose(0, 1), call.k[columns].permute(1, 2, 0)) * call.alpha
    buckets = gaps = None
    if call.time_bias is not None:
        assert call.timestamps is not None and call.query_timestamps is not None
        between = call.query_timestamps[rows, None] - call.timestamps[None, columns]
        buckets = time_buckets(between, call.time_bias.shape[-1])
        scores = scores + call.time_bias.to(scores.dtype)[..., buckets]
    if call.position_bias is not None:
        i = torch.arange(first, first + scores.shape[1], device=scores.device)
        j = torch.arange(scores.shape[2], device=scores.device)
        gaps = (i[:, None] - j[None]).clamp_(0, call.position_bias.shape[-1] - 1)
        scores = scores + call.position_bias.to(scores.dtype)[..., gaps]
    return scores, buckets, gaps


def _hide_future(weights: Tensor, first: int, causal: bool) -> Tensor:
    return weights.tril_(first) if causal else weights


def forward(call: AttentionCall) -> Tensor:
    """The output [T, H, E]."""
    v = call.v
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for rows, columns, first in _chunks(call):
        scores, _, _ = _scores(call, rows, columns, first)
        weights = _hide_future(torch.nn.functional.silu(scores).mul_(call.scale), first, call.causal)
        out[rows] = torch.matmul(weights.to(v.dtype), v[columns].transpose(0, 1)).transpose(0, 1)
    return out


def _sums_like(x: Tensor) -> Tensor:
    """Zeros of the shape of x, in float32 or wider."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _add_by_entry(table: Tensor, entries: Tensor, values: Tensor) -> None:
    """table[..., entries] += values [H, n, m], summed over the heads where the table is shared by them."""
    if table.dim() == 1:
        table.index_add_(0, entries.flatten(), values.sum(0).flatten().to(table.dtype))
    else:
        table.index_add_(1, entries.flatten(), values.flatten(1).to(table.dtype))


def backward(grad: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the two tables (None where there is no table) from that of the output [T, H, E]."""
    q, k, v, time_bias, position_bias = call.q, call.k, call.v, call.time_bias, call.position_bias
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    # These are sums over many pairs or chunks: in bf16 they would stop growing after some hundred terms.
    dk, dv = _sums_like(k), _sums_like(v)
    dt = None if time_bias is None else _sums_like(time_bias)
    dp = None if position_bias is None else _sums_like(position_bias)
    for rows, columns, first in _chunks(call):
        scores, buckets, gaps = _scores(call, rows, columns, first)
        sigmoid = torch.sigmoid(scores)
        activated = scores * sigmoid
        weights = _hide_future(activated * call.scale, first, call.causal)
        grad_rows = grad[rows].transpose(0, 1)
        dv[columns] += torch.matmul(weights.to(v.dtype).mT, grad_rows).transpose(0, 1)
        # d SiLU(x) = sigmoid(x) + SiLU(x) (1 - sigmoid(x))
        slope = _hide_future((sigmoid + activated * (1 - sigmoid)).mul_(call.scale), first, call.causal)
        ds = torch.matmul(grad_rows, v[columns].permute(1, 2, 0)) * slope
        if dt is not None and buckets is not None:
            _add_by_entry(dt, buckets, ds)
        if dp is not None and gaps is not None:
            _add_by_entry(dp, gaps, ds)
        ds = ds.to(q.dtype) * call.alpha
        dq[rows] = torch.matmul(ds, k[columns].transpose(0, 1)).transpose(0, 1)
        dk[columns] += torch.matmul(ds.mT, q[rows].transpose(0, 1)).transpose(0, 1)
    return (
        dq,
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if dt is None or time_bias is None else dt.to(time_bias.dtype),
        None if dp is None or position_bias is None else dp.to(position_bias.dtype),
    )
