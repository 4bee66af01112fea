"""HSTU attention in plain PyTorch, row by row and chunk by chunk of queries.

The backward computes each chunk's scores again, so that the largest temporary is [H, chunk, row length] in both
directions. Row lengths are read on the host: this is the oracle and the fallback, not the fast path.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from turbogr_plugin.kernels.relative_bias import time_buckets

_CHUNK_ELEMENTS = 1 << 22  # scores of one chunk, all heads: 16 MiB in float32


def _chunks(offsets: Tensor, heads: int, causal: bool) -> Iterator[tuple[slice, slice, int, int]]:
    """(query rows, key rows, first query position, number of keys) of each chunk."""
    bounds = offsets.tolist()
    for start, end in pairwise(bounds):
        length = end - start
        if length == 0:
            continue
        rows = max(1, _CHUNK_ELEMENTS // (heads * length))
        for first in range(0, length, rows):
            last = min(first + rows, length)
            keys = last if causal else length
            yield slice(start + first, start + last), slice(start, start + keys), first, keys


def _scores(
    q: Tensor,
    k: Tensor,
    chunk: tuple[slice, slice, int, int],
    alpha: float,
    timestamps: Tensor | None,
    query_timestamps: Tensor | None,
    time_bias: Tensor | None,
    position_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores before the activation [H, n, m], and the bias entries that each pair takes."""
    rows, columns, first, keys = chunk
    scores = torch.matmul(q[rows].transpose(0, 1), k[columns].permute(1, 2, 0)) * alpha
    buckets = gaps = None
    if time_bias is not None:
        assert timestamps is not None and query_timestamps is not None
        buckets = time_buckets(query_timestamps[rows, None] - timestamps[None, columns], time_bias.shape[-1])
        scores = scores + time_bias.to(scores.dtype)[..., buckets]
    if position_bias is not None:
        i = torch.arange(first, first + scores.shape[1], device=q.device)
        j = torch.arange(keys, device=q.device)
        gaps = (i[:, None] - j[None]).clamp_(0, position_bias.shape[-1] - 1)
        scores = scores + position_bias.to(scores.dtype)[..., gaps]
    return scores, buckets, gaps


def _hide_future(weights: Tensor, first: int, causal: bool) -> Tensor:
    return weights.tril_(first) if causal else weights


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    alpha: float,
    scale: float,
    causal: bool,
    timestamps: Tensor | None,
    query_timestamps: Tensor | None,
    time_bias: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:
    """out [T, H, E]; arguments as in `kernels.jagged_attention.hstu_attention`."""
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for chunk in _chunks(offsets, q.shape[1], causal):
        rows, columns, first, _ = chunk
        scores, _, _ = _scores(q, k, chunk, alpha, timestamps, query_timestamps, time_bias, position_bias)
        weights = _hide_future(torch.nn.functional.silu(scores).mul_(scale), first, causal)
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


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    alpha: float,
    scale: float,
    causal: bool,
    timestamps: Tensor | None,
    query_timestamps: Tensor | None,
    time_bias: Tensor | None,
    position_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the two tables (None where there is no table)."""
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    # These are sums over many pairs or chunks: in bf16 they would stop growing after some hundred terms.
    dk, dv = _sums_like(k), _sums_like(v)
    dt = None if time_bias is None else _sums_like(time_bias)
    dp = None if position_bias is None else _sums_like(position_bias)
    for chunk in _chunks(offsets, q.shape[1], causal):
        rows, columns, first, _ = chunk
        scores, buckets, gaps = _scores(q, k, chunk, alpha, timestamps, query_timestamps, time_bias, position_bias)
        sigmoid = torch.sigmoid(scores)
        activated = scores * sigmoid
        weights = _hide_future(activated * scale, first, causal)
        grad_rows = grad[rows].transpose(0, 1)
        dv[columns] += torch.matmul(weights.to(v.dtype).mT, grad_rows).transpose(0, 1)
        # d SiLU(x) = sigmoid(x) + SiLU(x) (1 - sigmoid(x))
        slope = _hide_future((sigmoid + activated * (1 - sigmoid)).mul_(scale), first, causal)
        ds = torch.matmul(grad_rows, v[columns].permute(1, 2, 0)) * slope
        if dt is not None and buckets is not None:
            _add_by_entry(dt, buckets, ds)
        if dp is not None and gaps is not None:
            _add_by_entry(dp, gaps, ds)
        ds = ds.to(q.dtype) * alpha
        dq[rows] = torch.matmul(ds, k[columns].transpose(0, 1)).transpose(0, 1)
        dk[columns] += torch.matmul(ds.mT, q[rows].transpose(0, 1)).transpose(0, 1)
    return (
        dq,
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if dt is None or time_bias is None else dt.to(time_bias.dtype),
        None if dp is None or position_bias is None else dp.to(position_bias.dtype),
    )
