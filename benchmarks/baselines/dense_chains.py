"""The dense neighbours of the attention as eager PyTorch chains, one operator of torch after the other.

Letters: T tokens, D model dim, C = heads x dim of a head, O outputs of the projection.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, *, eps: float, dropout: float) -> Tensor:
    """dropout(LayerNorm(x) * gate), all [T, C]; weight and bias [C]."""
    normed = functional.layer_norm(x, weight.shape, weight, bias, eps)
    return functional.dropout(normed * gate, dropout)


def uvqk(
    x: Tensor, projection: Tensor, norm_weight: Tensor, norm_bias: Tensor, *, widths: tuple[int, ...], eps: float
) -> tuple[Tensor, ...]:
    """u, v, q and k, the parts of SiLU(LayerNorm(x) W^T), as views of it.

    Args:
        x: [T, D].
        projection: W [O, D].
        norm_weight: [D].
        norm_bias: [D].
        widths: of the parts, together O.
        eps: of the norm.
    """
    normed = functional.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, eps)
    return functional.silu(functional.linear(normed, projection)).split(widths, dim=1)
