"""residual + y W^T + b in C++ (csrc/output_projection.cpp)."""

from __future__ import annotations

from torch import Tensor

from turbogr_plugin.kernels.cpu import build
from turbogr_plugin.kernels.cpu.operands import contiguous_rows, floats, missing_tool, only_float32
from turbogr_plugin.kernels.projection_call import OutputProjectionCall

_FAMILY = "output_projection"


def refuses(call: OutputProjectionCall) -> str | None:
    """Why the C++ cannot serve this call; None: it can."""
    return only_float32(y=call.y, residual=call.residual) or missing_tool(_FAMILY)


def forward(call: OutputProjectionCall) -> Tensor:
    """The output [T, D]."""
    operands = (contiguous_rows(call.y), call.weight.contiguous(), floats(call.bias), contiguous_rows(call.residual))
    result: Tensor = build.load(_FAMILY).forward(*operands)
    return result


def backward(grad: Tensor, call: OutputProjectionCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of y, weight and bias (None where there is none) from that of the output [T, D]."""
    operands = (contiguous_rows(grad), contiguous_rows(call.y), call.weight.contiguous())
    dy, dweight, dbias = build.load(_FAMILY).backward(*operands, call.bias is not None)
    return dy, dweight, None if call.bias is None else dbias.to(call.bias.dtype)
