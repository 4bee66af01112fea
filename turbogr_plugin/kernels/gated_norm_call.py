"""What `gated_norm` hands to its implementations: one record per call, complete and checked.

The operator in gated_norm.py makes the record, dispatch.py chooses who gets it. Every implementation module exports

    refuses(call) -> str | None       why it cannot serve this call, None if it can; builds and imports nothing
    forward(call) -> Tensor           [T, W], contiguous, in the dtype of x
    backward(grad, call) -> (dx, dgate, dweight or None, dbias or None)

Sums are taken in float32 or wider. Which elements are dropped is what keyed_dropout.keep_mask says, to the bit.

Letters: T tokens, W width of a token (heads times value dim of a head).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Norm = Literal["layer", "rms", "group"]


class GatedNormCall(NamedTuple):
    """The arguments of torch.ops.turbogr.gated_norm, in its order."""

    x: Tensor
    """[T, W] floating point, any strides."""
    gate: Tensor
    """[T, W], dtype of x, any strides."""
    weight: Tensor | None
    """[W] floating point, maybe of another dtype than x; None: ones."""
    bias: Tensor | None
    """[W]; None: zeros."""
    norm: Norm
    """layer and group: (x - mean) / sqrt(variance + eps); rms: x / sqrt(mean square + eps)."""
    groups: int
    """Parts of a row that are normalised each for itself: 1 except for "group"; divides W."""
    eps: float
    samples: Tensor | None = None
    """[T] int64 sample ids of keyed_dropout.DropoutKey; None: nothing is dropped."""
    positions: Tensor | None = None
    """[T] int64, there where `samples` is."""
    seed: int = 0
    step: int = 0
    layer: int = 0
    p: float = 0.0
    """Probability in (0, 1); 0 where `samples` is None."""

    @property
    def threshold(self) -> int:
        """A random 32-bit word below it drops its element; in [0, 2^32]."""
        return round(self.p * (1 << 32))

    @property
    def factor(self) -> float:
        """What the elements that are kept are multiplied by."""
        return 1 / (1 - self.p)


def check_shapes(call: GatedNormCall) -> None:
    """Raises ValueError for shapes, dtypes, devices and scalars that do not fit. Reads no value of a tensor."""
    x = call.x
    if x.dim() != 2 or x.shape != call.gate.shape or x.shape[1] == 0:
        raise ValueError(f"x and gate must be [T, W], W >= 1; got {tuple(x.shape)} and {tuple(call.gate.shape)}")
    if x.dtype != call.gate.dtype or not x.is_floating_point():
        raise ValueError(f"x and gate must be of one floating-point type, got {x.dtype} and {call.gate.dtype}")
    for name, parameter in (("weight", call.weight), ("bias", call.bias)):
        if parameter is not None and (parameter.shape != x.shape[1:] or not parameter.is_floating_point()):
            raise ValueError(
                f"{name} must be floating point of shape [{x.shape[1]}], got {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}"
            )
    if call.norm not in get_args(Norm):
        raise ValueError(f"norm must be one of {', '.join(get_args(Norm))}, got {call.norm!r}")
    if call.norm != "group" and call.groups != 1:
        raise ValueError(f'groups are for norm="group" only, got {call.groups} with norm={call.norm!r}')
    if call.groups < 1 or x.shape[1] % call.groups:
        raise ValueError(f"groups must divide the width {x.shape[1]}, got {call.groups}")
    if not call.eps >= 0:
        raise ValueError(f"eps must be at least 0, got {call.eps}")
    _check_dropout(call)
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, Tensor) and value.device != x.device:
            raise ValueError(f"{name} must be on the device of x ({x.device}), got {value.device}")


def _check_dropout(call: GatedNormCall) -> None:
    if not 0 <= call.p < 1:
        raise ValueError(f"p must be in [0, 1), got {call.p}")
    if (call.samples is None) != (call.p == 0) or (call.samples is None) != (call.positions is None):
        raise ValueError("samples and positions are there if and only if p > 0")
    for name, ids in (("samples", call.samples), ("positions", call.positions)):
        if ids is not None and (ids.shape != call.x.shape[:1] or ids.dtype != torch.int64):
            raise ValueError(
                f"{name} must be int64 of shape [T] with T = {call.x.shape[0]}, got {ids.dtype} of shape "
                f"{tuple(ids.shape)}"
            )
    for name, number in (("seed", call.seed), ("step", call.step), ("layer", call.layer)):
        if call.samples is not None and not 0 <= number < 1 << 32:
            raise ValueError(f"{name} must be in [0, 2^32), got {number}")


def check_values(call: GatedNormCall) -> None:
    """Raises ValueError for sample ids or positions that do not fit the bits of a random number's counter.

    What is on a device is not read, for that would wait for it.
    """
    if call.samples is None or call.positions is None or call.x.device.type != "cpu" or call.x.shape[0] == 0:
        return
    blocks = -(-call.x.shape[1] // 4)
    for name, ids, bound in (("sample ids", call.samples, 1 << 56), ("positions", call.positions, (1 << 32) // blocks)):
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high >= bound:
            raise ValueError(f"{name} must be in [0, {bound}), got {low} to {high}")
