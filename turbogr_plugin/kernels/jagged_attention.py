"""HSTU attention on the jagged layout, with relative time and position bias.

    out_i = sum over allowed j of scale * SiLU(alpha * q_i . k_j + b_t[bucket(s_i - t_j)] + b_p[i - j]) v_j

with t the times of the keys and s those of the queries, usually the same; attention_mask.py says which j are allowed.

(HSTU, Zhai et al. 2024; TurboGR section 4.1.1.) Rows never see each other; nothing depends on the longest row of the
batch; no dense [S, S] tensor outlives one chunk of one row, forward or backward. The call is the contract; dispatch.py
chooses among the implementations in `triton/`, `cpu/` and `reference/`.

Left out: dropout of the scores, which the published models do not have.

Letters: T tokens, B rows, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels import attention_operator
from turbogr_plugin.kernels.attention_call import HSTUAttentionCall

_FAMILY = attention_operator.AttentionFamily(
    name="hstu_attention",
    module="jagged_attention",
    record=HSTUAttentionCall,
    arguments=attention_operator.CALL_ARGUMENTS,
    channels=1,
)
attention_operator.define(_FAMILY)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    alpha: float,
    scale: float,
    causal: bool = True,
    num_targets: Tensor | None = None,
    num_contextual: int | Tensor | None = None,
    window: int | None = None,
    full_tail: int = 0,
    timestamps: Tensor | None = None,
    query_timestamps: Tensor | None = None,
    time_bias: Tensor | None = None,
    time_buckets: Tensor | None = None,
    position_bias: Tensor | None = None,
    host_offsets: Sequence[int] | None = None,
    implementation: str | None = None,
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
        num_targets: [B] int32 or int64, how many tokens at the end of each row are targets, which see history and
            themselves but not each other; between 0 and the row's length.
        num_contextual: how many tokens at the beginning of each row, [B] or the same for all, are contextual: they see
            each other and the whole history.
        window: a token sees the last `window` tokens of history before it; None: all.
        full_tail: how many of the last tokens of history, and with them all targets, see everything before them in
            spite of the window; 0: none, and targets are held to the window.
        timestamps: [T] int64 or int32, needed with `time_bias` (seconds in the published models).
        query_timestamps: [T] int64 or int32, the time at which each query stands; None: that of its own event. Both
            published conventions are one call away (see relative_bias.query_times).
        time_bias: [N] or [H, N], by the bucket of the time gap.
        time_buckets: [N - 1] float32, ascending borders of the buckets: a gap falls into the one whose number is how
            many borders are at most |gap| in float32. None: the published ones (see relative_bias.time_buckets).
        position_bias: [N] or [H, N], by i - j in positions of the row, larger gaps taking the last entry and those of
            contextual tokens that look ahead the first; causal only.
        host_offsets: the B + 1 numbers of `offsets`, where the caller has them on the host: an implementation that
            needs them there need not wait for the device.
        implementation: "reference", "cpu" or "triton"; None: the fastest that serves the call (see dispatch.explain).

    Returns:
        [T, H, E] in the dtype of v, contiguous.

    Raises:
        ValueError: shapes, offsets or an argument that do not fit, naming what was given and what is allowed. What
            tensors hold is looked at on CPU only; elsewhere it would mean to wait for the device.
    """
    if isinstance(num_contextual, int):
        num_contextual = attention_operator.contextual_of_all_rows(num_contextual, offsets)
    return torch.ops.turbogr.hstu_attention(
        q,
        k,
        v,
        offsets,
        alpha,
        scale,
        causal,
        num_targets,
        num_contextual,
        window,
        full_tail,
        timestamps,
        query_timestamps,
        time_bias,
        time_buckets,
        position_bias,
        host_offsets,
        implementation=implementation,
    )
