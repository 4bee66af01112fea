"""FuXi's attention on the jagged layout: three channels that are not added before the activation, side by side.

    semantic_i   = sum over allowed j of scale * SiLU(alpha * q_i . k_j) v_j
    temporal_i   = sum over allowed j of bias_scale * w_t(|s_i - t_j|) v_j
    positional_i = sum over allowed j of bias_scale * b_p[i - j] v_j

with t the times of the keys and s those of the queries; attention_mask.py says which j are allowed. w_t is a table over
buckets of the gap (FuXi-alpha, Ye et al. 2025) or the decay a * exp(-r * gap^p) with three learned parameters
(FuXi-gamma). One operator for all three channels reads v and the layout once.

Left out: a channel alone (hstu_attention without biases is the semantic one), and the positional channel without causal
order, which is not defined.

Letters: T tokens, B rows, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels import attention_operator
from turbogr_plugin.kernels.attention_call import FuxiAttentionCall

_FAMILY = attention_operator.AttentionFamily(
    name="fuxi_attention",
    module="fuxi_attention",
    record=FuxiAttentionCall,
    arguments=f"{attention_operator.CALL_ARGUMENTS}, float bias_scale=1.0, Tensor? time_decay=None",
    channels=3,
)
attention_operator.define(_FAMILY)


def fuxi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    alpha: float,
    scale: float,
    bias_scale: float = 1.0,
    causal: bool = True,
    num_targets: Tensor | None = None,
    num_contextual: int | Tensor | None = None,
    window: int | None = None,
    full_tail: int = 0,
    timestamps: Tensor | None = None,
    query_timestamps: Tensor | None = None,
    time_bias: Tensor | None = None,
    time_decay: Tensor | None = None,
    time_buckets: Tensor | None = None,
    position_bias: Tensor | None = None,
    host_offsets: Sequence[int] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Semantic, temporal and positional attention within each row of a jagged batch.

    Args:
        q: [T, H, D], floating point.
        k: [T, H, D].
        v: [T, H, E]; E may differ from D.
        offsets: [B + 1], int32 or int64, from 0 to T.
        alpha: factor of the products.
        scale: factor of the activated scores.
        bias_scale: factor of the temporal and the positional weights.
        causal: must be True, for the positional channel is defined for no other order.
        num_targets: as in `hstu_attention`, and so the next three.
        num_contextual: see there.
        window: see there.
        full_tail: see there.
        timestamps: [T] int64 or int32, required.
        query_timestamps: [T] int64 or int32, the time at which each query stands; None: that of its own event.
        time_bias: [N] or [H, N], weights by the bucket of the time gap. Either this or `time_decay` is required.
        time_decay: [3] or [H, 3], (a, r, p) of the weight a * exp(-r * gap^p) with the gap in the unit of the
            timestamps; a gap of 0 weighs a.
        time_buckets: [N - 1] float32, ascending borders of the buckets; None: those that HSTU published.
        position_bias: [N] or [H, N], weights by i - j in positions of the row, larger gaps taking the last entry and
            those of contextual tokens that look ahead the first. Required.
        host_offsets: the B + 1 numbers of `offsets`, where the caller has them on the host.
        implementation: "reference", "cpu" or "triton"; None: the fastest that serves the call (see dispatch.explain).

    Returns:
        [T, H, 3 * E] in the dtype of v, contiguous: for each head semantic, temporal, positional.

    Raises:
        ValueError: shapes, offsets or an argument that do not fit, naming what was given and what is allowed. What
            tensors hold is looked at on CPU only; elsewhere it would mean to wait for the device.
    """
    if isinstance(num_contextual, int):
        num_contextual = attention_operator.contextual_of_all_rows(num_contextual, offsets)
    return torch.ops.turbogr.fuxi_attention(
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
        bias_scale=bias_scale,
        time_decay=time_decay,
        implementation=implementation,
    )
