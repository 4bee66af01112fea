"""norm, projection and SiLU in C++ (csrc/uvqk_projection.cpp): no [T, O] tensor is written but what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu import build
from turbogr_plugin.kernels.cpu.operands import contiguous_rows, floats, missing_tool, only_float32
from turbogr_plugin.kernels.projection_call import UVQKProjectionCall

_FAMILY = "uvqk_projection"


def refuses(call: UVQKProjectionCall) -> str | None:
    """Why the C++ cannot serve this call; None: it can."""
    return only_float32(x=call.x, weight=call.weight) or missing_tool(_FAMILY)


def forward(call: UVQKProjectionCall) -> tuple[Tensor, ...]:
    """u, v, q and k, and the slopes of the activation or an empty tensor."""
    parameters = (call.weight.contiguous(), *map(floats, (call.bias, call.norm_weight, call.norm_bias)))
    arguments = (contiguous_rows(call.x), *parameters, list(call.widths), call.norm != "rms", call.eps)
    return tuple(build.load(_FAMILY).forward(*arguments, call.recompute == "norm"))


def backward(
    du: Tensor, dv: Tensor, dq: Tensor, dk: Tensor, kept: Tensor, call: UVQKProjectionCall
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias, norm_weight and norm_bias (None where there is none)."""
    grads = [grad.contiguous() for grad in (du, dv, dq, dk)]
    slopes = kept.contiguous() if call.recompute == "norm" else None
    parameters = (call.weight.contiguous(), *map(floats, (call.bias, call.norm_weight, call.norm_bias)))
    arguments = (contiguous_rows(call.x), *parameters, list(call.widths), call.norm != "rms", call.eps)
    dx, dweight, dbias, dnorm = build.load(_FAMILY).backward(grads, slopes, *arguments)
    return (
        dx,
        dweight,
        _like(dbias, call.bias),
        _like(dnorm[0], call.norm_weight),
        _like(dnorm[1], call.norm_bias),
    )


def _like(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """The gradient of a parameter as a tensor of its own, in the parameter's dtype."""
    if parameter is None:
        return None
    return gradient.to(parameter.dtype, copy=True, memory_format=torch.contiguous_format)
