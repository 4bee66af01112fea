"""HSTU attention on the jagged layout, with relative time and position bias.

    out_i = sum over j <= i of scale * SiLU(alpha * q_i . k_j + b_t[bucket(s_i - t_j)] + b_p[i - j]) v_j

with t the times of the keys and s those of the queries, usually the same.

(HSTU, Zhai et al. 2024; TurboGR section 4.1.1.) Rows never see each other; nothing depends on the longest row of the
batch; no dense [S, S] tensor outlives one chunk of one row, forward or backward. The call is the contract: the plain
PyTorch implementation in `reference/` answers it today.

Letters: T tokens, B rows, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.offsets import check_offsets
from turbogr_plugin.kernels.reference import jagged_attention as reference


@torch.library.custom_op("turbogr::hstu_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    alpha: float,
    scale: float,
    causal: bool,
    timestamps: Tensor | None,
    query_timestamps: Tensor | None,
    time_bias: Tensor | None,
    position_bias: Tensor | None,
    host_offsets: Sequence[int] | None = None,
) -> Tensor:
    bias = (timestamps, query_timestamps, time_bias, position_bias)
    return reference.forward(reference.AttentionCall(q, k, v, offsets, alpha, scale, causal, *bias, host_offsets))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(v.shape, dtype=v.dtype)


@torch.library.custom_op("turbogr::hstu_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    alpha: float,
    scale: float,
    causal: bool,
    timestamps: Tensor | None,
    query_timestamps: Tensor | None,
    time_bias: Tensor | None,
    position_bias: Tensor | None,
    host_offsets: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias = (timestamps, query_timestamps, time_bias, position_bias)
    call = reference.AttentionCall(q, k, v, offsets, alpha, scale, causal, *bias, host_offsets)
    dq, dk, dv, dt, dp = reference.backward(grad, call)
    empty = q.new_empty(0)
    return dq, dk, dv, empty if dt is None else dt, empty.clone() if dp is None else dp


@_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = reference.AttentionCall(*arguments)

    def like(bias: Tensor | None) -> Tensor:
        return call.q.new_empty(0) if bias is None else torch.empty_like(bias)

    gradients = torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)
    return *gradients, like(call.time_bias), like(call.position_bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = reference.AttentionCall(*inputs)
    bias = (call.timestamps, call.query_timestamps, call.time_bias, call.position_bias)
    ctx.save_for_backward(call.q, call.k, call.v, call.offsets, *bias)
    ctx.scalars = (call.alpha, call.scale, call.causal)
    ctx.host_offsets = call.host_offsets


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, offsets, *bias = ctx.saved_tensors
    _, _, time_bias, position_bias = bias
    dq, dk, dv, dt, dp = _backward(grad.contiguous(), q, k, v, offsets, *ctx.scalars, *bias, ctx.host_offsets)
    return (
        *(dq, dk, dv),
        *(None,) * 6,  # offsets, the three scalars and the two times
        None if time_bias is None else dt,
        None if position_bias is None else dp,
        None,  # the layout on the host
    )


_forward.register_autograd(_autograd, setup_context=_setup)


def _check_bias(name: str, bias: Tensor | None, heads: int) -> None:
    if bias is None:
        return
    if bias.dim() not in (1, 2) or bias.shape[-1] == 0 or (bias.dim() == 2 and bias.shape[0] != heads):
        raise ValueError(f"{name} must be [N] (shared by the heads) or [{heads}, N], N >= 1; got {tuple(bias.shape)}")


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    alpha: float,
    scale: float,
    causal: bool = True,
    timestamps: Tensor | None = None,
    time_bias: Tensor | None = None,
    query_timestamps: Tensor | None = None,
    position_bias: Tensor | None = None,
    host_offsets: Sequence[int] | None = None,
) -> Tensor:
    """Pointwise SiLU attention within each row of a jagged batch.

    Args:
        q: [T, H, D], floating point.
        k: [T, H, D].
        v: [T, H, E]; E may differ from D.
        offsets: [B + 1], int32 or int64, from 0 to T.
        alpha: factor of the products, 1 in the published models.
        scale: factor of the activated scores, usually 1 / the longest sequence of the model (never of the batch).
        causal: a token sees itself and what stands before it; False: its whole row.
        timestamps: [T] int64 or int32, needed with `time_bias` (seconds in the published models).
        time_bias: [buckets] or [H, buckets], by the bucket of the time gap (see relative_bias.time_buckets).
        query_timestamps: [T] int64 or int32, the time at which each query stands; None: that of its own event. Both
            published conventions are one call away (see relative_bias.query_times).
        position_bias: [N] or [H, N], by i - j, larger gaps taking the last entry; causal only.
        host_offsets: the B + 1 numbers of `offsets`, where the caller has them on the host: the plain PyTorch
            implementation then need not wait for the device to read them.

    Returns:
        [T, H, E] in the dtype of v.

    Raises:
        ValueError: shapes, offsets or an argument that do not fit, naming what was given and what is allowed.
    """
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q and k must be [T, H, D], v [T, H, E]; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v must be of one floating-point type, got {q.dtype}, {k.dtype} and {v.dtype}")
    check_offsets(offsets, q.shape[0])
    if host_offsets is not None and (len(host_offsets) != offsets.numel() or host_offsets[-1] != q.shape[0]):
        raise ValueError(
            f"host_offsets must be the {offsets.numel()} numbers of offsets, up to {q.shape[0]}; got "
            f"{len(host_offsets)}, up to {host_offsets[-1] if host_offsets else None}"
        )
    _check_bias("time_bias", time_bias, q.shape[1])
    _check_bias("position_bias", position_bias, q.shape[1])
    if position_bias is not None and not causal:
        raise ValueError("position_bias is defined for causal attention only: pass causal=True or position_bias=None")
    if time_bias is None:
        timestamps = query_timestamps = None
    else:
        query_timestamps = timestamps if query_timestamps is None else query_timestamps
        for name, times in (("timestamps", timestamps), ("query_timestamps", query_timestamps)):
            good = times is not None and times.shape == q.shape[:1] and times.dtype in (torch.int32, torch.int64)
            if not good:
                got = None if times is None else (tuple(times.shape), times.dtype)
                raise ValueError(f"time_bias needs integer {name} [T] with T = {q.shape[0]}, got {got}")
    bias = (timestamps, query_timestamps, time_bias, position_bias)
    return _forward(q, k, v, offsets, alpha, scale, causal, *bias, host_offsets)
