"""What an attention operator hands to its implementations: one record per call, complete and checked.

The operators in jagged_attention.py and fuxi_attention.py make the record, dispatch.py chooses who gets it. Every
implementation module exports

    refuses(call) -> str | None       why it cannot serve this call, None if it can; builds and imports nothing
    forward(call) -> Tensor
    backward(grad, call) -> (dq, dk, dv, gradient of time_bias or time_decay or None, of position_bias or None)

and may rely on what `check_shapes` and `check_values` check, on shapes and dtypes everywhere, on values only on CPU.

Letters: T tokens, B rows, H heads, D query/key dim, E value dim, N entries of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_mask import check_mask, check_mask_values
from turbogr_plugin.kernels.offsets import check_offsets
from turbogr_plugin.kernels.relative_bias import check_borders


class HSTUAttentionCall(NamedTuple):
    """The arguments of torch.ops.turbogr.hstu_attention, in its order."""

    q: Tensor
    """[T, H, D] floating point, any strides."""
    k: Tensor
    """[T, H, D]."""
    v: Tensor
    """[T, H, E]."""
    offsets: Tensor
    """[B + 1] int32 or int64."""
    alpha: float
    scale: float
    causal: bool = True
    num_targets: Tensor | None = None
    """[B] int32 or int64; the mask is that of attention_mask.py."""
    num_contextual: Tensor | None = None
    """[B] int32 or int64."""
    window: int | None = None
    full_tail: int = 0
    timestamps: Tensor | None = None
    """[T] int32 or int64; there with `time_bias` or `time_decay`, else None. Gaps are taken in int64."""
    query_timestamps: Tensor | None = None
    """[T], there where `timestamps` is."""
    time_bias: Tensor | None = None
    """[N] or [H, N], floating point, maybe of another dtype than q."""
    time_borders: Tensor | None = None
    """[N - 1] float32 ascending, there where `time_bias` is: bucket = how many are <= float32(|gap|)."""
    position_bias: Tensor | None = None
    """[N] or [H, N], entry clamp(i - j, 0, N - 1); only with `causal`."""
    host_offsets: Sequence[int] | None = None
    """The numbers of `offsets`, where they are known on the host."""
    time_gradient: bool = True
    """Whether `backward` is to give the gradient of `time_bias`."""
    position_gradient: bool = True
    """Whether `backward` is to give the gradient of `position_bias`."""


class FuxiAttentionCall(NamedTuple):
    """The arguments of torch.ops.turbogr.fuxi_attention, in its order. Either `time_bias` or `time_decay` is there."""

    q: Tensor
    """[T, H, D] floating point, any strides."""
    k: Tensor
    """[T, H, D]."""
    v: Tensor
    """[T, H, E]."""
    offsets: Tensor
    """[B + 1] int32 or int64."""
    alpha: float
    scale: float
    causal: bool = True
    num_targets: Tensor | None = None
    num_contextual: Tensor | None = None
    window: int | None = None
    full_tail: int = 0
    timestamps: Tensor | None = None
    query_timestamps: Tensor | None = None
    time_bias: Tensor | None = None
    time_borders: Tensor | None = None
    position_bias: Tensor | None = None
    host_offsets: Sequence[int] | None = None
    time_gradient: bool = True
    """Whether `backward` is to give the gradient of `time_bias` or `time_decay`."""
    position_gradient: bool = True
    bias_scale: float = 1.0
    """Factor of the temporal and of the positional channel."""
    time_decay: Tensor | None = None
    """[3] or [H, 3], floating point: amplitude a, rate r and power p of a * exp(-r * gap^p), a at gap 0."""


AttentionCall: TypeAlias = HSTUAttentionCall | FuxiAttentionCall


def check_shapes(call: AttentionCall) -> None:
    """Raises ValueError for shapes, dtypes, devices and scalars that do not fit. Reads no value of a tensor."""
    q, k, v = call.q, call.k, call.v
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q and k must be [T, H, D], v [T, H, E]; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if 0 in (q.shape[1], q.shape[2], v.shape[2]):
        raise ValueError(f"H, D and E must be at least 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v must be of one floating-point type, got {q.dtype}, {k.dtype} and {v.dtype}")
    if call.offsets.dim() != 1 or call.offsets.numel() < 1 or call.offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"offsets must be int32 or int64 of shape [B + 1], got {call.offsets.dtype} of shape "
            f"{tuple(call.offsets.shape)}"
        )
    if call.offsets.numel() == 1 and q.shape[0] > 0:
        raise ValueError(f"offsets of one number describe no row, got {q.shape[0]} values")
    if call.host_offsets is not None and len(call.host_offsets) != call.offsets.numel():
        raise ValueError(
            f"host_offsets must be the {call.offsets.numel()} numbers of offsets, got {len(call.host_offsets)} numbers"
        )
    check_mask(call.offsets, call.num_targets, call.num_contextual, call.window, call.full_tail)
    _check_table("time_bias", call.time_bias, q.shape[1])
    _check_table("position_bias", call.position_bias, q.shape[1])
    if call.position_bias is not None and not call.causal:
        raise ValueError("position_bias is defined for causal attention only: pass causal=True or position_bias=None")
    _check_times(call)
    if isinstance(call, FuxiAttentionCall):
        _check_channels(call)
    _check_devices(call)


def check_values(call: AttentionCall) -> None:
    """Raises ValueError for a layout, targets or borders of buckets whose values do not fit.

    What is on a device is not read, for that would wait for it; `host_offsets` are checked everywhere.
    """
    check_offsets(call.offsets, call.q.shape[0])
    if call.host_offsets is not None:
        check_host_offsets(call.host_offsets, call.q.shape[0])
        if call.offsets.device.type == "cpu" and call.offsets.tolist() != list(call.host_offsets):
            raise ValueError(f"host_offsets must be the numbers of offsets, got {list(call.host_offsets)}")
    check_mask_values(call.offsets, call.num_targets, call.num_contextual)
    if call.time_borders is not None:
        check_borders(call.time_borders)


def check_host_offsets(host_offsets: Sequence[int], total: int) -> None:
    """Raises ValueError unless they run from 0 to `total` and never decrease."""
    if host_offsets[0] != 0 or host_offsets[-1] != total:
        raise ValueError(
            f"offsets must run from 0 to the number of values {total}, got {host_offsets[0]} to {host_offsets[-1]}"
        )
    for row, (start, end) in enumerate(pairwise(host_offsets)):
        if end < start:
            raise ValueError(f"offsets must not decrease, but offsets[{row}] = {start} > {end}")


def _check_table(name: str, table: Tensor | None, heads: int) -> None:
    if table is None:
        return
    if table.dim() not in (1, 2) or table.shape[-1] == 0 or (table.dim() == 2 and table.shape[0] != heads):
        raise ValueError(f"{name} must be [N] (shared by the heads) or [{heads}, N], N >= 1; got {tuple(table.shape)}")
    if not table.is_floating_point():
        raise ValueError(f"{name} must be of a floating-point type, got {table.dtype}")


def _check_times(call: AttentionCall) -> None:
    by_time = "time_bias"
    timed = call.time_bias is not None
    if isinstance(call, FuxiAttentionCall) and call.time_decay is not None:
        by_time, timed = "time_decay", True
    total = call.q.shape[0]
    for name, times in (("timestamps", call.timestamps), ("query_timestamps", call.query_timestamps)):
        if not timed:
            break
        if times is None or times.shape != call.q.shape[:1] or times.dtype not in (torch.int32, torch.int64):
            got = None if times is None else (tuple(times.shape), times.dtype)
            raise ValueError(f"{by_time} needs integer {name} [T] with T = {total}, got {got}")
    borders = call.time_borders
    if borders is None:
        return
    if call.time_bias is None:
        raise ValueError("time_buckets are the borders of the entries of time_bias, which is None")
    entries = call.time_bias.shape[-1]
    if tuple(borders.shape) != (entries - 1,) or borders.dtype != torch.float32:
        raise ValueError(
            f"time_buckets must be the {entries} - 1 borders of time_bias's entries in float32, got {borders.dtype} "
            f"of shape {tuple(borders.shape)}"
        )


def _check_channels(call: FuxiAttentionCall) -> None:
    if (call.time_bias is None) == (call.time_decay is None):
        both = "neither" if call.time_bias is None else "both"
        raise ValueError(f"the temporal channel needs either time_bias or time_decay, got {both}")
    if call.position_bias is None:
        raise ValueError("the positional channel needs position_bias, got None")
    decay = call.time_decay
    if decay is None:
        return
    if tuple(decay.shape) not in ((3,), (call.q.shape[1], 3)) or not decay.is_floating_point():
        raise ValueError(
            f"time_decay must be [3] (shared by the heads) or [{call.q.shape[1]}, 3], floating point; got "
            f"{decay.dtype} of shape {tuple(decay.shape)}"
        )


def _check_devices(call: AttentionCall) -> None:
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, Tensor) and value.device != call.q.device:
            raise ValueError(f"{name} must be on the device of q ({call.q.device}), got {value.device}")
