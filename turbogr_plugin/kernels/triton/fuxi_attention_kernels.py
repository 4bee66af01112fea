"""FuXi's three attention channels on the device; passes and order of work as in jagged_attention_kernels.py.

    forward   a query tile over its key tiles: semantic, temporal and positional output at once
    backward  semantic dq as in HSTU without biases; dk and dv from all three channels;
              gradients of time table or decay, and of the position table, along the tile diagonals

Letters: BM queries and BN keys of a tile, BD and BE the padded dims.
"""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from turbogr_plugin.kernels.triton.bias_kernels import (
    add_by_bucket,
    bucket_range,
    decay_tile,
    diagonal_sums,
    position_bias_tile,
    time_bias_tile,
    time_gaps,
)
from turbogr_plugin.kernels.triton.mask_kernels import (
    allowed_pairs,
    diagonal_tiles,
    key_tiles,
    query_tiles,
    row_limits,
)
from turbogr_plugin.kernels.triton.tile_kernels import load_tile, silu_slope, store_tile


@triton.jit
def temporal_weights(
    gaps,
    allowed,
    Borders,
    TimeTable,
    BUCKETS: tl.constexpr,
    BUCKET_LANES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """w_t of each allowed pair, float32 [BM, BN]. Without buckets TimeTable holds (a, r, p) of the decay."""
    if BUCKETS > 0:
        first, last = bucket_range(gaps, allowed, Borders, BUCKETS, BUCKET_LANES)
        weights = time_bias_tile(gaps, first, last, Borders, TimeTable, BM, BN)
    else:
        decayed, _, _ = decay_tile(gaps, TimeTable)
        weights = tl.load(TimeTable).to(tl.float32) * decayed
    return tl.where(allowed, weights, 0.0)


@triton.jit(do_not_specialize=["window", "full_tail"])
def forward_kernel(
    Q,
    K,
    V,
    Out,
    Rows,
    Items,
    ItemCount,
    Times,
    Borders,
    TimeTable,
    PositionTable,
    alpha,
    scale,
    bias_scale,
    window,
    full_tail,
    tokens,
    heads,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    time_head,
    position_head,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BUCKETS: tl.constexpr,
    BUCKET_LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TARGETS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,
    TILED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Out [T, H, 3E], contiguous. One piece of work: one query tile of one head."""
    qd = tl.arange(0, BD)
    vd = tl.arange(0, BE)
    for work in range(tl.program_id(0), tl.load(ItemCount) * heads, tl.num_programs(0)):
        head = work % heads
        row = tl.load(Items + 2 * (work // heads))
        m0 = tl.load(Items + 2 * (work // heads) + 1) * BM
        start, length, first_target, shift, contextual = row_limits(Rows, row)
        queries = m0 + tl.arange(0, BM)
        q = load_tile(Q + head * q_head, start, queries, length, qd, q_token, D)
        semantic = tl.zeros((BM, BE), dtype=tl.float32)
        temporal = tl.zeros((BM, BE), dtype=tl.float32)
        positional = tl.zeros((BM, BE), dtype=tl.float32)
        first, many, diagonal, total = key_tiles(
            m0, length, first_target, shift, contextual, window, full_tail, BM, BN, CAUSAL, TARGETS, CONTEXT, WINDOW
        )
        for step in range(total):
            n0 = tl.where(step < many, first + step, diagonal + step - many) * BN
            keys = n0 + tl.arange(0, BN)
            k = load_tile(K + head * k_head, start, keys, length, qd, k_token, D)
            v = load_tile(V + head * v_head, start, keys, length, vd, v_token, E)
            allowed = allowed_pairs(
                queries, keys, first_target, shift, contextual, window, full_tail, CAUSAL, TARGETS, CONTEXT, WINDOW
            )
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * alpha
            weights = tl.where(allowed, scores / (1.0 + tl.exp(-scores)), 0.0)
            semantic += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            gaps = time_gaps(Times, tokens, start, queries, keys, length)
            Table = TimeTable + head * time_head
            weights = temporal_weights(gaps, allowed, Borders, Table, BUCKETS, BUCKET_LANES, BM, BN)
            temporal += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            Table = PositionTable + head * position_head
            weights = position_bias_tile(Table, m0 - n0, queries, keys, POSITIONS, BM, BN, TILED)
            weights = tl.where(allowed, weights, 0.0)
            positional += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        Channels = Out + head * (3 * E)
        store_tile(Channels, semantic * scale, start, queries, length, vd, heads * 3 * E, E)
        store_tile(Channels + E, temporal * bias_scale, start, queries, length, vd, heads * 3 * E, E)
        store_tile(Channels + 2 * E, positional * bias_scale, start, queries, length, vd, heads * 3 * E, E)


@triton.jit(do_not_specialize=["window", "full_tail"])
def key_value_gradient_kernel(
    Grad,
    Q,
    K,
    V,
    DK,
    DV,
    Rows,
    Items,
    ItemCount,
    Times,
    Borders,
    TimeTable,
    PositionTable,
    alpha,
    scale,
    bias_scale,
    window,
    full_tail,
    tokens,
    heads,
    grad_token,
    grad_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    time_head,
    position_head,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BUCKETS: tl.constexpr,
    BUCKET_LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TARGETS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,
    TILED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """DK [T, H, D] and DV [T, H, E], contiguous. One piece of work: one key tile of one head. Grad: that of Out."""
    qd = tl.arange(0, BD)
    vd = tl.arange(0, BE)
    for work in range(tl.program_id(0), tl.load(ItemCount) * heads, tl.num_programs(0)):
        head = work % heads
        row = tl.load(Items + 2 * (work // heads))
        n0 = tl.load(Items + 2 * (work // heads) + 1) * BN
        start, length, first_target, shift, contextual = row_limits(Rows, row)
        keys = n0 + tl.arange(0, BN)
        k = load_tile(K + head * k_head, start, keys, length, qd, k_token, D)
        v = load_tile(V + head * v_head, start, keys, length, vd, v_token, E)
        dk = tl.zeros((BN, BD), dtype=tl.float32)
        by_score = tl.zeros((BN, BE), dtype=tl.float32)
        by_bias = tl.zeros((BN, BE), dtype=tl.float32)
        ahead, first, many, tail, total = query_tiles(
            n0, length, first_target, shift, contextual, window, full_tail, BM, BN, CAUSAL, TARGETS, CONTEXT, WINDOW
        )
        for step in range(total):
            m0 = tl.where(step < ahead, step, first + step - ahead)
            m0 = tl.where(step < ahead + many, m0, tail + step - ahead - many) * BM
            queries = m0 + tl.arange(0, BM)
            q = load_tile(Q + head * q_head, start, queries, length, qd, q_token, D)
            grad = load_tile(Grad + head * grad_head, start, queries, length, vd, grad_token, E)
            allowed = allowed_pairs(
                queries, keys, first_target, shift, contextual, window, full_tail, CAUSAL, TARGETS, CONTEXT, WINDOW
            )
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * alpha
            weights, slope = silu_slope(scores)
            weights = tl.where(allowed, weights, 0.0)
            by_score += tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
            ds = tl.dot(grad, tl.trans(v), input_precision=PRECISION) * slope
            ds = tl.where(allowed, ds, 0.0)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
            gaps = time_gaps(Times, tokens, start, queries, keys, length)
            Table = TimeTable + head * time_head
            weights = temporal_weights(gaps, allowed, Borders, Table, BUCKETS, BUCKET_LANES, BM, BN)
            grad = load_tile(Grad + head * grad_head + E, start, queries, length, vd, grad_token, E)
            by_bias += tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
            Table = PositionTable + head * position_head
            weights = position_bias_tile(Table, m0 - n0, queries, keys, POSITIONS, BM, BN, TILED)
            weights = tl.where(allowed, weights, 0.0)
            grad = load_tile(Grad + head * grad_head + 2 * E, start, queries, length, vd, grad_token, E)
            by_bias += tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
        store_tile(DK + head * D, dk * (alpha * scale), start, keys, length, qd, heads * D, D)
        dv = by_score * scale + by_bias * bias_scale
        store_tile(DV + head * E, dv, start, keys, length, vd, heads * E, E)


@triton.jit(do_not_specialize=["window", "full_tail"])
def table_gradient_kernel(
    Grad,
    V,
    TimeSums,
    PositionSums,
    Rows,
    Items,
    ItemCount,
    Times,
    Borders,
    TimeTable,
    window,
    full_tail,
    tokens,
    heads,
    groups,
    grad_token,
    grad_head,
    v_token,
    v_head,
    time_head,
    E: tl.constexpr,
    BE: tl.constexpr,
    BT: tl.constexpr,
    BUCKETS: tl.constexpr,
    BUCKET_LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TARGETS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,
    TILED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over all pairs by table entry, in slots and pieces of work as in HSTU's kernel of this name.

    Without buckets lanes 0 to 2 of TimeSums take the gradients of the decay's a, r and p.
    """
    vd = tl.arange(0, BE)
    LANES: tl.constexpr = 2 * BT
    LAST: tl.constexpr = (POSITIONS + BT - 1) // BT + 1
    SLOTS: tl.constexpr = (LAST + 3) * BT
    SIDES: tl.constexpr = 2 if CONTEXT else 1
    for work in range(tl.program_id(0), tl.load(ItemCount) * groups, tl.num_programs(0)):
        group = work % groups
        row = tl.load(Items + 2 * (work // groups))
        apart = tl.load(Items + 2 * (work // groups) + 1)
        start, length, first_target, shift, contextual = row_limits(Rows, row)
        slot = tl.program_id(0) * groups + group
        for side in range(SIDES):
            delta = tl.where(side == 0, apart, -apart)
            first, end = diagonal_tiles(
                delta, length, first_target, shift, contextual, window, full_tail, BT, CAUSAL, TARGETS, CONTEXT, WINDOW
            )
            # The tile diagonal that holds i = j is done once.
            end = tl.where((side == 1) & (apart == 0), first, end)
            by_position = tl.zeros((BT, BT), dtype=tl.float32)
            by_time = tl.zeros((BUCKET_LANES,), dtype=tl.float32)
            for tile in range(first, end):
                m0 = tile * BT
                n0 = (tile - delta) * BT
                queries = m0 + tl.arange(0, BT)
                keys = n0 + tl.arange(0, BT)
                temporal = tl.zeros((BT, BT), dtype=tl.float32)
                positional = tl.zeros((BT, BT), dtype=tl.float32)
                for head in range(group, tl.where(groups == 1, heads, group + 1)):
                    v = load_tile(V + head * v_head, start, keys, length, vd, v_token, E)
                    grad = load_tile(Grad + head * grad_head + E, start, queries, length, vd, grad_token, E)
                    temporal += tl.dot(grad, tl.trans(v), input_precision=PRECISION)
                    grad = load_tile(Grad + head * grad_head + 2 * E, start, queries, length, vd, grad_token, E)
                    positional += tl.dot(grad, tl.trans(v), input_precision=PRECISION)
                allowed = allowed_pairs(
                    queries, keys, first_target, shift, contextual, window, full_tail, CAUSAL, TARGETS, CONTEXT, WINDOW
                )
                by_position += tl.where(allowed, positional, 0.0)
                temporal = tl.where(allowed, temporal, 0.0)
                gaps = time_gaps(Times, tokens, start, queries, keys, length)
                if BUCKETS > 0:
                    low, high = bucket_range(gaps, allowed, Borders, BUCKETS, BUCKET_LANES)
                    by_time = add_by_bucket(by_time, temporal, gaps, low, high, Borders, BUCKET_LANES)
                else:
                    by_time = add_decay_slopes(by_time, temporal, gaps, allowed, TimeTable + group * time_head)
            Sums = TimeSums + slot * BUCKET_LANES
            tl.atomic_add(Sums + tl.arange(0, BUCKET_LANES), by_time)
            base = (tl.minimum(tl.maximum(delta, -1), LAST) + 1) * BT
            sums = diagonal_sums(by_position, BT, LANES)
            tl.atomic_add(PositionSums + slot * SLOTS + base + tl.arange(0, LANES), sums)
            if not TILED:
                tl.debug_barrier()


@triton.jit
def add_decay_slopes(sums, values, gaps, allowed, Decay):
    """Adds the gradients of a, r and p in a * exp(-r * gap^p), lanes 0 to 2, from that of the weights (0 if hidden)."""
    lanes = tl.arange(0, sums.shape[0])
    amplitude = tl.load(Decay).to(tl.float32)
    rate = tl.load(Decay + 1).to(tl.float32)
    decayed, powers, logs = decay_tile(gaps, Decay)
    # Hidden pairs have gaps that no one asked for, whose weight may be infinite.
    by_amplitude = values * tl.where(allowed, decayed, 0.0)
    by_rate = -amplitude * by_amplitude * tl.where(allowed, powers, 0.0)
    by_power = rate * by_rate * logs
    sums += tl.where(lanes == 0, tl.sum(tl.sum(by_amplitude, 1), 0), 0.0)
    sums += tl.where(lanes == 1, tl.sum(tl.sum(by_rate, 1), 0), 0.0)
    return sums + tl.where(lanes == 2, tl.sum(tl.sum(by_power, 1), 0), 0.0)
