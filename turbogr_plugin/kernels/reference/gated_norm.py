"""norm(x) times gate, with dropout, in plain PyTorch: any device, any floating type.

The backward computes the norm and the mask again from x, gate and the key. Everything is in float32 or wider and is
rounded once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.gated_norm_call import GatedNormCall
from turbogr_plugin.kernels.keyed_dropout import DropoutKey, keep_mask
from turbogr_plugin.kernels.reference.norms import affine, norm_backward, normalised


def refuses(call: GatedNormCall) -> str | None:
    """None: every call is served."""
    return None


def forward(call: GatedNormCall) -> Tensor:
    """The output [T, W]."""
    y, _ = normalised(call.x, call.norm, call.eps, call.groups)
    gated = affine(y, call.weight, call.bias) * call.gate.to(y.dtype)
    return _dropped(gated, call).to(call.x.dtype)


def backward(grad: Tensor, call: GatedNormCall) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, gate, weight and bias (None where there is none) from that of the output [T, W]."""
    y, reciprocal = normalised(call.x, call.norm, call.eps, call.groups)
    kept = _dropped(grad.to(y.dtype), call)
    dgate = kept * affine(y, call.weight, call.bias)
    dx, dweight, dbias = norm_backward(kept * call.gate.to(y.dtype), y, reciprocal, call.norm, call.weight, call.bias)
    return dx.to(call.x.dtype), dgate.to(call.gate.dtype), dweight, dbias


def _dropped(values: Tensor, call: GatedNormCall) -> Tensor:
    if call.samples is None or call.positions is None:
        return values
    if values.shape[0] == 0:
        return values
    key = DropoutKey(call.seed, call.step, call.samples, call.positions)
    return torch.where(keep_mask(key, call.layer, values.shape[1], call.p), values * call.factor, 0)
