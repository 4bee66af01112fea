"""norm(x) times gate with keyed dropout in Triton: prepares a call and launches gated_norm_kernels.py.

Letters: T tokens, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.gated_norm_call import GatedNormCall
from turbogr_plugin.kernels.keyed_random import Purpose
from turbogr_plugin.kernels.triton import targets
from turbogr_plugin.kernels.triton.attention_launch import last_dim_dense
from turbogr_plugin.kernels.triton.tiles import norm_rows, widest_norm

# Programs of a backward per core: each leaves a row of weight gradients behind.
_PROGRAMS_PER_CORE = 4


def refuses(call: GatedNormCall) -> str | None:
    """Why Triton cannot serve this call: the device, a missing package, a dtype, or a group that is too wide."""
    reason = targets.refuses_device(call.x.device.type) or targets.refuses_tensors(
        call.x, call.gate, call.weight, call.bias
    )
    if reason is not None:
        return reason
    widest = widest_norm(call.x.device.type)
    if _padded_width(call) > widest:
        return f"groups of {call.x.shape[1] // call.groups} elements do not fit in a tile of {widest}"
    if call.threshold >= 1 << 32:
        return f"p = {call.p} drops every element"
    return None


def _padded_width(call: GatedNormCall) -> int:
    """Width of a tile: it begins at a multiple of four, up to three elements before its group."""
    width = call.x.shape[1] // call.groups
    before = 3 if call.groups > 1 and width % 4 else 0
    return max(16, 1 << (width + before - 1).bit_length())


def _signed(word: int) -> int:
    """The 32-bit integer with the bits of an unsigned one."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _counters(call: GatedNormCall) -> Tensor:
    """int32 [3, T]: what of the random numbers' counters is a token's own; see random_kernels.kept."""
    samples, positions = call.samples, call.positions
    assert samples is not None and positions is not None
    blocks = -(-call.x.shape[1] // 4)
    high = (samples >> 32) | (int(Purpose.DROPOUT) << 24)
    # Conversion keeps the low 32 bits.
    return torch.stack([positions * blocks, samples, high]).to(torch.int32)


def _arguments(call: GatedNormCall, target: targets.Target) -> dict[str, Any]:
    x, gate = last_dim_dense(call.x), last_dim_dense(call.gate)
    unused = x.new_zeros(1, dtype=torch.float32)
    width = _padded_width(call)
    return {
        "X": x,
        "Gate": gate,
        "Weight": unused if call.weight is None else call.weight.contiguous(),
        "Bias": unused if call.bias is None else call.bias.contiguous(),
        "Counters": unused.to(torch.int32) if call.samples is None else _counters(call),
        "tokens": x.shape[0],
        "groups": call.groups,
        "width": x.shape[1] // call.groups,
        "x_token": x.stride(0),
        "gate_token": gate.stride(0),
        "eps": float(call.eps),
        "factor": float(call.factor),
        "seed": _signed(call.seed),
        "step": _signed(call.step),
        "layer": _signed(call.layer),
        "threshold": call.threshold - (1 << 31),
        "dropped": int(call.samples is not None),
        "ROWS": norm_rows(target, width),
        "WIDTH": width,
        "CENTERED": call.norm != "rms",
        "WEIGHTED": call.weight is not None,
        "BIASED": call.bias is not None,
    }


def forward(call: GatedNormCall) -> Tensor:
    """The output [T, W]."""
    out = call.x.new_empty(call.x.shape)
    if out.numel() == 0:
        return out
    from turbogr_plugin.kernels.triton.gated_norm_kernels import forward_kernel

    target = targets.current_target(call.x.device)
    arguments = _arguments(call, target)
    pieces = -(-call.x.shape[0] // arguments["ROWS"]) * call.groups
    forward_kernel[(min(pieces, target.vector_cores) if target.ascend else pieces,)](Out=out, **arguments)
    return out


def backward(grad: Tensor, call: GatedNormCall) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, gate, weight and bias (None where there is none) from that of the output [T, W]."""
    dx, dgate = call.x.new_empty(call.x.shape), call.gate.new_empty(call.gate.shape)
    if dx.numel() == 0:
        none_or_zeros = [None if x is None else torch.zeros_like(x) for x in (call.weight, call.bias)]
        return dx, dgate, none_or_zeros[0], none_or_zeros[1]
    from turbogr_plugin.kernels.triton.gated_norm_kernels import backward_kernel

    target = targets.current_target(call.x.device)
    arguments = _arguments(call, target)
    grad = last_dim_dense(grad)
    blocks = -(-call.x.shape[0] // arguments["ROWS"])
    programs = target.vector_cores if target.ascend else target.cores * _PROGRAMS_PER_CORE
    shares = max(1, min(blocks, programs // call.groups))
    weight_sums, bias_sums = dx.new_empty(2, shares, dx.shape[1], dtype=torch.float32)
    backward_kernel[(shares * call.groups,)](
        Grad=grad,
        DX=dx,
        DGate=dgate,
        WeightSums=weight_sums,
        BiasSums=bias_sums,
        grad_token=grad.stride(0),
        **arguments,
    )
    dweight = None if call.weight is None else weight_sums.sum(0).to(call.weight.dtype)
    dbias = None if call.bias is None else bias_sums.sum(0).to(call.bias.dtype)
    return dx, dgate, dweight, dbias
