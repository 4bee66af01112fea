"""norm, projection and SiLU in plain PyTorch: any device, any floating type."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.projection_call import UVQKProjectionCall
from turbogr_plugin.kernels.reference.norms import affine, norm_backward, normalised


def refuses(call: UVQKProjectionCall) -> str | None:
    """None: every call is served."""
    return None


def forward(call: UVQKProjectionCall) -> tuple[Tensor, ...]:
    """u, v, q and k, and the products before the activation or an empty tensor."""
    y, _ = normalised(call.x, call.norm, call.eps)
    projected = _projected(y, call)
    parts = (torch.nn.functional.silu(part).contiguous() for part in projected.split(list(call.widths), 1))
    return (*parts, projected if call.recompute == "norm" else projected.new_empty(0, 0))


def backward(
    du: Tensor, dv: Tensor, dq: Tensor, dk: Tensor, kept: Tensor, call: UVQKProjectionCall
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias, norm_weight and norm_bias (None where there is none)."""
    y, reciprocal = normalised(call.x, call.norm, call.eps)
    wide = (kept if call.recompute == "norm" else _projected(y, call)).to(y.dtype)
    sigmoid = torch.sigmoid(wide)
    # d SiLU(p) = sigmoid(p) (1 + p (1 - sigmoid(p)))
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    dprojected = torch.cat([du, dv, dq, dk], 1).to(y.dtype) * slope
    dbias = None if call.bias is None else dprojected.sum(0).to(call.bias.dtype)
    dprojected = dprojected.to(call.weight.dtype)
    normed = affine(y, call.norm_weight, call.norm_bias).to(call.weight.dtype)
    dweight = dprojected.mT @ normed
    dnormed = (dprojected @ call.weight).to(y.dtype)
    dx, dnorm_weight, dnorm_bias = norm_backward(dnormed, y, reciprocal, call.norm, call.norm_weight, call.norm_bias)
    return dx.to(call.x.dtype), dweight, dbias, dnorm_weight, dnorm_bias


def _projected(y: Tensor, call: UVQKProjectionCall) -> Tensor:
    """The products [T, O] before the activation, in the dtype of weight."""
    normed = affine(y, call.norm_weight, call.norm_bias).to(call.weight.dtype)
    bias = None if call.bias is None else call.bias.to(call.weight.dtype)
    return torch.nn.functional.linear(normed, call.weight, bias)
