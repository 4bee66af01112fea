"""HSTU attention in plain PyTorch, row by row and chunk by chunk of queries.

The backward computes each chunk's scores again, so that the largest temporary is [H, chunk, row length] in both
directions. The layout is needed on the host: where a caller does not pass it there, reading it waits for the device.
Nothing else does, targets and contextual tokens included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import HSTUAttentionCall
from turbogr_plugin.kernels.reference.attention_chunks import Chunk, add_by_entry, chunks, sums_like


def refuses(call: HSTUAttentionCall) -> str | None:
    """Nothing is refused."""
    return None


def _scores(call: HSTUAttentionCall, chunk: Chunk) -> Tensor:
    """Scores of a chunk before the activation [H, n, m]."""
    scores = chunk.products(call.q, call.k).mul_(call.alpha)
    for table, entries in ((call.time_bias, chunk.buckets), (call.position_bias, chunk.gaps)):
        if table is not None:
            scores = scores + table.to(scores.dtype)[..., entries]
    return scores


def forward(call: HSTUAttentionCall) -> Tensor:
    """The output [T, H, E]."""
    v = call.v
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for chunk in chunks(call):
        weights = chunk.hide(torch.nn.functional.silu(_scores(call, chunk)).mul_(call.scale))
        out[chunk.queries] = torch.matmul(weights, v[chunk.keys].transpose(0, 1)).transpose(0, 1)
    return out


def backward(grad: Tensor, call: HSTUAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the two tables (None where there is none or it is not asked for).

    Args:
        grad: of the output, [T, H, E].
        call: as it was in `forward`.
    """
    q, k, v = call.q, call.k, call.v
    time_bias = call.time_bias if call.time_gradient else None
    position_bias = call.position_bias if call.position_gradient else None
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    # These are sums over many pairs or chunks: in bf16 they would stop growing after some hundred terms.
    dk, dv = sums_like(k), sums_like(v)
    dt, dp = (None if table is None else sums_like(table) for table in (time_bias, position_bias))
    for chunk in chunks(call):
        rows, columns = chunk.queries, chunk.keys
        scores = _scores(call, chunk)
        sigmoid = torch.sigmoid(scores)
        activated = scores * sigmoid
        grad_rows = grad[rows].transpose(0, 1)
        weights = chunk.hide(activated * call.scale)
        dv[columns] += torch.matmul(weights.mT, grad_rows).transpose(0, 1)
        # d SiLU(x) = sigmoid(x) + SiLU(x) (1 - sigmoid(x))
        slope = chunk.hide((sigmoid + activated * (1 - sigmoid)).mul_(call.scale))
        ds = torch.matmul(grad_rows, v[columns].permute(1, 2, 0)) * slope
        if dt is not None:
            add_by_entry(dt, chunk.buckets, ds)
        if dp is not None:
            add_by_entry(dp, chunk.gaps, ds)
        ds = ds * call.alpha
        dq[rows] = torch.matmul(ds, k[columns].transpose(0, 1)).transpose(0, 1)
        dk[columns] += torch.matmul(ds.mT, q[rows].transpose(0, 1)).transpose(0, 1)
    return (
        dq,
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if dt is None or time_bias is None else dt.to(time_bias.dtype),
        None if dp is None or position_bias is None else dp.to(position_bias.dtype),
    )
