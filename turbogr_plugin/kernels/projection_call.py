"""What `uvqk_projection` and `output_projection` hand to their implementations: one record per call, checked.

The operators in modules of their names make the records, dispatch.py chooses who gets them. Every implementation module
exports

    refuses(call) -> str | None       why it cannot serve this call, None if it can; builds and imports nothing

and, of uvqk_projection,

    forward(call) -> (u, v, q, k, kept)
    backward(du, dv, dq, dk, kept, call) -> (dx, dweight, dbias, dnorm_weight, dnorm_bias)

of output_projection

    forward(call) -> Tensor           [T, D], contiguous, in the dtype of residual
    backward(grad, call) -> (dy, dweight, dbias)

where gradients of what is None are None.

Letters: T tokens, D model dim, O outputs of a projection, I its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from torch import Tensor

Recompute = Literal["norm", "projection"]
ProjectionNorm = Literal["layer", "rms"]


class UVQKProjectionCall(NamedTuple):
    """The arguments of torch.ops.turbogr.uvqk_projection, in its order."""

    x: Tensor
    """[T, D] floating point, any strides."""
    weight: Tensor
    """[O, D] floating point, maybe of another dtype than x: products are taken and returned in it."""
    bias: Tensor | None
    """[O]; None: zeros."""
    norm_weight: Tensor | None
    """[D]; None: ones."""
    norm_bias: Tensor | None
    """[D]; None: zeros."""
    widths: Sequence[int]
    """Of u, v, q and k; they add up to O."""
    norm: ProjectionNorm
    """As in gated_norm_call.py, over whole rows."""
    eps: float
    recompute: Recompute = "norm"
    """projection: `kept` is empty; norm: it has the shape [T, O] and the dtype of weight and holds what the
    implementation's own backward needs of the products."""


class OutputProjectionCall(NamedTuple):
    """The arguments of torch.ops.turbogr.output_projection, in its order."""

    y: Tensor
    """[T, I] floating point, any strides."""
    weight: Tensor
    """[D, I], dtype of y."""
    bias: Tensor | None
    """[D]; None: zeros."""
    residual: Tensor
    """[T, D] floating point, maybe of another dtype than y."""


def check_uvqk(call: UVQKProjectionCall) -> None:
    """Raises ValueError for shapes, dtypes, devices and scalars that do not fit. Reads no value of a tensor."""
    x, weight = call.x, call.weight
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"x must be [T, D] and weight [O, D], O >= 1 and D >= 1; got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    _check_floating(call)
    for name, size in (("bias", weight.shape[0]), ("norm_weight", x.shape[1]), ("norm_bias", x.shape[1])):
        _check_vector(name, getattr(call, name), size)
    widths = list(call.widths)
    if len(widths) != 4 or min(widths) < 0 or sum(widths) != weight.shape[0]:
        raise ValueError(
            f"widths must be those of u, v, q and k, together the {weight.shape[0]} rows of weight; got {widths}"
        )
    if call.norm not in get_args(ProjectionNorm):
        raise ValueError(f"norm must be one of {', '.join(get_args(ProjectionNorm))}, got {call.norm!r}")
    if not call.eps >= 0:
        raise ValueError(f"eps must be at least 0, got {call.eps}")
    if call.recompute not in get_args(Recompute):
        raise ValueError(f"recompute must be one of {', '.join(get_args(Recompute))}, got {call.recompute!r}")


def check_output(call: OutputProjectionCall) -> None:
    """Raises ValueError for shapes, dtypes and devices that do not fit. Reads no value of a tensor."""
    y, weight, residual = call.y, call.weight, call.residual
    if y.dim() != 2 or weight.dim() != 2 or y.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"y must be [T, I] and weight [D, I], D >= 1 and I >= 1; got {tuple(y.shape)} and {tuple(weight.shape)}"
        )
    if residual.shape != (y.shape[0], weight.shape[0]):
        raise ValueError(f"residual must be {[y.shape[0], weight.shape[0]]}, got {tuple(residual.shape)}")
    _check_floating(call)
    if y.dtype != weight.dtype:
        raise ValueError(f"y and weight must be of one floating-point type, got {y.dtype} and {weight.dtype}")
    _check_vector("bias", call.bias, weight.shape[0])


def _check_floating(call: UVQKProjectionCall | OutputProjectionCall) -> None:
    first = call[0]
    for name, value in zip(call._fields, call, strict=True):
        if not isinstance(value, Tensor):
            continue
        if not value.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point type, got {value.dtype}")
        if value.device != first.device:
            raise ValueError(f"{name} must be on the device of {call._fields[0]} ({first.device}), got {value.device}")


def _check_vector(name: str, parameter: Tensor | None, size: int) -> None:
    if parameter is not None and parameter.shape != (size,):
        raise ValueError(f"{name} must be of shape [{size}], got {tuple(parameter.shape)}")
