"""norm, projection and SiLU in one operator: the entry of an HSTU block.

    u, v, q, k = split(SiLU(norm(x) W^T + b))

(HSTU, Zhai et al. 2024.) The four parts are tensors of their own, as attention and gate read them; nothing is copied
on the way, nor put together again in backward. The normalised rows are computed again in backward; what it needs of the
products, a number for each, is kept or, with recompute="projection", computed again too.

Left out: keeping the normalised rows, for computing them again is a hundredth of the work; group norm.

Letters: T tokens, D model dim, O = the four widths together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels.dense_operator import DenseFamily, autocast, define
from turbogr_plugin.kernels.projection_call import ProjectionNorm, Recompute, UVQKProjectionCall, check_uvqk


def _outputs(call: UVQKProjectionCall) -> tuple[Tensor, ...]:
    tokens = call.x.shape[0]
    kept = (tokens, call.weight.shape[0]) if call.recompute == "norm" else (0, 0)
    return tuple(call.weight.new_empty(shape) for shape in (*((tokens, width) for width in call.widths), kept))


_operator = define(
    DenseFamily(
        name="uvqk_projection",
        record=UVQKProjectionCall,
        fields=UVQKProjectionCall._fields,
        arguments=(
            "Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, SymInt[] widths, str norm, "
            'float eps, str recompute="norm"'
        ),
        check_shapes=check_uvqk,
        check_values=lambda _: None,
        outputs=_outputs,
        kept=1,
        differentiable=("x", "weight", "bias", "norm_weight", "norm_bias"),
    ),
    outputs=5,
)


def uvqk_projection(
    x: Tensor,
    weight: Tensor,
    widths: Sequence[int],
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: ProjectionNorm = "layer",
    eps: float = 1e-6,
    recompute: Recompute = "norm",
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalises rows, multiplies them by a weight, activates the products and splits them.

    Args:
        x: [T, D], floating point.
        weight: [O, D]. The products are taken and returned in its dtype, which autocast sets; the norm in float32 or
            wider.
        widths: of u, v, q and k, together O.
        bias: [O]; None: zeros.
        norm_weight: [D]; None: ones.
        norm_bias: [D]; None: zeros.
        norm: layer or rms (see gated_norm).
        eps: at least 0.
        recompute: what backward computes again instead of keeping it: norm: the normalised rows; projection: the
            products, too, which saves T * O numbers for a third more arithmetic.
        implementation: reference or cpu; None: the fastest that serves the call.

    Returns:
        u, v, q and k, each [T, width] and contiguous, in the dtype of weight.

    Raises:
        ValueError: an argument that does not fit, naming what was given and what is allowed, or an `implementation`
            that does not serve the call.
    """
    weight, bias = autocast(x, weight), autocast(x, bias)
    tensors = (x, weight, bias, norm_weight, norm_bias)
    if recompute == "norm" and not (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    ):
        recompute = "projection"  # there will be no backward to keep the products for
    u, v, q, k, _ = _operator(*tensors, widths, norm, eps, recompute, implementation=implementation)
    return u, v, q, k
