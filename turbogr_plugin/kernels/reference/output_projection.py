"""residual + y W^T + b in plain PyTorch: any device, any floating type."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.projection_call import OutputProjectionCall


def refuses(call: OutputProjectionCall) -> str | None:
    """None: every call is served."""
    return None


def forward(call: OutputProjectionCall) -> Tensor:
    """The output [T, D]."""
    bias = None if call.bias is None else call.bias.to(call.weight.dtype)
    projected = torch.nn.functional.linear(call.y, call.weight, bias)
    return (call.residual + projected).to(call.residual.dtype).contiguous()


def backward(grad: Tensor, call: OutputProjectionCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of y, weight and bias (None where there is none) from that of the output [T, D]."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    dbias = None if call.bias is None else wide.sum(0).to(call.bias.dtype)
    narrow = grad.to(call.weight.dtype)
    return narrow @ call.weight, narrow.mT @ call.y, dbias
