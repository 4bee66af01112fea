"""norm(x) times gate, with dropout, in C++ (csrc/gated_norm.cpp): one pass over the rows in each direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu import build
from turbogr_plugin.kernels.cpu.operands import contiguous_rows, floats, missing_tool
from turbogr_plugin.kernels.gated_norm_call import GatedNormCall

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(call: GatedNormCall) -> str | None:
    """Why the C++ cannot serve this call; None: it can."""
    if call.x.dtype not in _DTYPES:
        return f"it computes in float32 and serves {', '.join(map(str, _DTYPES))}, got {call.x.dtype}"
    return missing_tool("gated_norm")


def forward(call: GatedNormCall) -> Tensor:
    """The output [T, W]."""
    result: Tensor = build.load("gated_norm").forward(*_operands(call))
    return result


def backward(grad: Tensor, call: GatedNormCall) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, gate, weight and bias (None where there is none) from that of the output [T, W]."""
    dx, dgate, sums = build.load("gated_norm").backward(contiguous_rows(grad), *_operands(call))
    dweight = None if call.weight is None else sums[0].to(call.weight.dtype, copy=True)
    dbias = None if call.bias is None else sums[1].to(call.bias.dtype, copy=True)
    return dx, dgate, dweight, dbias


def _operands(call: GatedNormCall) -> tuple[Any, ...]:
    """The arguments of the C++ functions."""
    return (
        contiguous_rows(call.x),
        contiguous_rows(call.gate),
        *(floats(call.weight), floats(call.bias)),
        *(call.norm != "rms", call.groups, call.eps),
        *(None if ids is None else ids.contiguous() for ids in (call.samples, call.positions)),
        *(call.seed, call.step, call.layer, call.threshold, call.factor),
    )
