"""FuXi's three attention channels in plain PyTorch, chunk by chunk as in jagged_attention.py.

Letters: T tokens, H heads, E value dim; a chunk of n queries and m keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import FuxiAttentionCall
from turbogr_plugin.kernels.reference.attention_chunks import Chunk, add_by_entry, chunks, sums_like


def refuses(call: FuxiAttentionCall) -> str | None:
    """Nothing is refused."""
    return None


class _Decay(NamedTuple):
    """Parts of a * exp(-r * gap^p) of a chunk, each [n, m] or, with parameters per head, [H, n, m]."""

    amplitude: Tensor
    rate: Tensor
    power_of_gap: Tensor
    log_of_gap: Tensor
    exponential: Tensor


def _decay(call: FuxiAttentionCall, chunk: Chunk) -> _Decay:
    assert call.time_decay is not None and chunk.between is not None
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    amplitude, rate, power = (x[..., None, None] for x in call.time_decay.to(dtype).unbind(-1))
    gap = chunk.between.abs().to(dtype)
    # At gap 0 the weight is `a` whatever the power, and has no slope in the rate and the power.
    log = gap.clamp(min=1).log()
    raised = torch.exp(power * log).masked_fill(gap == 0, 0)
    return _Decay(amplitude, rate, raised, log, torch.exp(-rate * raised))


def _time_weights(call: FuxiAttentionCall, chunk: Chunk) -> Tensor:
    """[n, m], or [H, n, m] where heads have their own."""
    if call.time_decay is None:
        assert call.time_bias is not None
        return call.time_bias.to(call.q.dtype)[..., chunk.buckets]
    decay = _decay(call, chunk)
    return (decay.amplitude * decay.exponential).to(call.q.dtype)


def _position_weights(call: FuxiAttentionCall, chunk: Chunk) -> Tensor:
    assert call.position_bias is not None
    return call.position_bias.to(call.q.dtype)[..., chunk.gaps]


def forward(call: FuxiAttentionCall) -> Tensor:
    """The output [T, H, 3E]: semantic, temporal, positional."""
    v = call.v
    tokens, heads, dim = v.shape
    out = v.new_zeros(tokens, heads, 3 * dim)
    for chunk in chunks(call):
        semantic = torch.nn.functional.silu(chunk.products(call.q, call.k).mul_(call.alpha)).mul_(call.scale)
        temporal = _time_weights(call, chunk) * call.bias_scale
        positional = _position_weights(call, chunk) * call.bias_scale
        values = v[chunk.keys].transpose(0, 1)
        channels = [torch.matmul(chunk.hide(weights), values) for weights in (semantic, temporal, positional)]
        out[chunk.queries] = torch.cat(channels, dim=2).transpose(0, 1)
    return out


def backward(grad: Tensor, call: FuxiAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, of `time_bias` or `time_decay`, and of `position_bias`; None where it is not asked for.

    Args:
        grad: of the output, [T, H, 3E].
        call: as it was in `forward`.
    """
    q, k, v = call.q, call.k, call.v
    time_table = (call.time_bias if call.time_decay is None else call.time_decay) if call.time_gradient else None
    position_bias = call.position_bias if call.position_gradient else None
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk, dv = sums_like(k), sums_like(v)
    dt, dp = (None if table is None else sums_like(table) for table in (time_table, position_bias))
    for chunk in chunks(call):
        rows, columns = chunk.queries, chunk.keys
        semantic, temporal, positional = (x.transpose(0, 1) for x in grad[rows].chunk(3, dim=2))
        values = v[columns].permute(1, 2, 0)
        scores = chunk.products(q, k).mul_(call.alpha)
        sigmoid = torch.sigmoid(scores)
        activated = scores * sigmoid
        weights = chunk.hide(activated * call.scale)
        by_value = torch.matmul(weights.mT, semantic)
        for table, channel in ((_time_weights, temporal), (_position_weights, positional)):
            by_value += torch.matmul(chunk.hide(table(call, chunk) * call.bias_scale).mT, channel)
        dv[columns] += by_value.transpose(0, 1)
        if dt is not None:
            _add_time(dt, call, chunk, chunk.hide(torch.matmul(temporal, values) * call.bias_scale))
        if dp is not None:
            add_by_entry(dp, chunk.gaps, chunk.hide(torch.matmul(positional, values) * call.bias_scale))
        # d SiLU(x) = sigmoid(x) + SiLU(x) (1 - sigmoid(x))
        slope = chunk.hide((sigmoid + activated * (1 - sigmoid)).mul_(call.scale * call.alpha))
        ds = torch.matmul(semantic, values) * slope
        dq[rows] = torch.matmul(ds, k[columns].transpose(0, 1)).transpose(0, 1)
        dk[columns] += torch.matmul(ds.mT, q[rows].transpose(0, 1)).transpose(0, 1)
    return (
        dq,
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if dt is None or time_table is None else dt.to(time_table.dtype),
        None if dp is None or position_bias is None else dp.to(position_bias.dtype),
    )


def _add_time(total: Tensor, call: FuxiAttentionCall, chunk: Chunk, dw: Tensor) -> None:
    """Adds to the gradient of the table, or of (a, r, p), that of the temporal weights [H, n, m]."""
    if call.time_decay is None:
        add_by_entry(total, chunk.buckets, dw)
        return
    amplitude, rate, raised, log, exponential = _decay(call, chunk)
    dw = dw.to(exponential.dtype)
    by_rate = -amplitude * raised * exponential
    slopes = (exponential, by_rate, by_rate * rate * log)
    by_head = torch.stack([(dw * slope).sum((1, 2)) for slope in slopes], dim=-1)  # [H, 3]
    total += by_head if total.dim() == 2 else by_head.sum(0)
