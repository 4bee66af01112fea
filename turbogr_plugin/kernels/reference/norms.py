"""LayerNorm, RMSNorm and group norm of rows [T, W] with their gradients: what the dense operators have in common.

Letters: T tokens, W width, G groups of W / G neighbouring elements that are normalised each for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.gated_norm_call import Norm


def normalised(x: Tensor, norm: Norm, eps: float, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Rows before weight and bias.

    Args:
        x: [T, W], floating point.
        norm: layer and group take the mean off, rms does not.
        eps: added to the variance (rms: to the mean square).
        groups: G, divides W.

    Returns:
        [T, W] and 1 / sqrt(variance + eps) [T, G], both in float32 or wider.
    """
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (groups, x.shape[1] // groups))
    if norm != "rms":
        rows = rows - rows.mean(2, keepdim=True)
    reciprocal = (rows.square().mean(2, keepdim=True) + eps).rsqrt()
    return (rows * reciprocal).flatten(1), reciprocal.squeeze(2)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y * weight + bias in the dtype of y [T, W]; weight and bias [W], None: one and zero."""
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def norm_backward(
    grad: Tensor, y: Tensor, reciprocal: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of affine(normalised(x), weight, bias).

    Args:
        grad: [T, W], of the result, in the dtype of y.
        y: [T, W], as `normalised` returned it.
        reciprocal: [T, G], the same.
        norm: of that call.
        weight: [W] or None.
        bias: [W] or None.

    Returns:
        That of x [T, W] in the dtype of y, and those of weight and bias in their own, None where there is none.
    """
    dweight = None if weight is None else (grad * y).sum(0).to(weight.dtype)
    dbias = None if bias is None else grad.sum(0).to(bias.dtype)
    if weight is not None:
        grad = grad * weight.to(grad.dtype)
    groups = reciprocal.shape[1]
    shape = (groups, y.shape[1] // groups)
    rows, grads = y.unflatten(1, shape), grad.unflatten(1, shape)
    along = rows * (grads * rows).mean(2, keepdim=True)
    if norm != "rms":
        along = along + grads.mean(2, keepdim=True)
    return ((grads - along) * reciprocal[:, :, None]).flatten(1), dweight, dbias
