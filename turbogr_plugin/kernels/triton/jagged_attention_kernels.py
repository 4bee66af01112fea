"""HSTU attention on the device: forward, and backward in three passes.

    forward   a query tile over its key tiles: out
    backward  a query tile over its key tiles: dq
              a key tile over its query tiles: dk, dv
              a tile diagonal of a row over all heads: gradients of both bias tables

Two passes instead of one with atomic additions to dq, so that sums have a fixed order. The tables' pass walks along a
tile diagonal, where the position biases of all tiles are the same: what it adds up leaves the core once per diagonal.
Each program takes every n-th piece of work, so that the grid fits the cores whatever the lengths.

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
from turbogr_plugin.kernels.triton.tile_kernels import biased_scores, load_tile, silu_slope, store_tile


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
    """Out [T, H, E], contiguous. One piece of work: one query tile of one head."""
    qd = tl.arange(0, BD)
    vd = tl.arange(0, BE)
    for work in range(tl.program_id(0), tl.load(ItemCount) * heads, tl.num_programs(0)):
        head = work % heads
        row = tl.load(Items + 2 * (work // heads))
        m0 = tl.load(Items + 2 * (work // heads) + 1) * BM
        start, length, first_target, shift, contextual = row_limits(Rows, row)
        queries = m0 + tl.arange(0, BM)
        q = load_tile(Q + head * q_head, start, queries, length, qd, q_token, D)
        out = tl.zeros((BM, BE), dtype=tl.float32)
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
            scores = biased_scores(
                q,
                k,
                alpha,
                allowed,
                m0 - n0,
                start,
                tokens,
                queries,
                keys,
                length,
                Times,
                Borders,
                TimeTable + head * time_head,
                PositionTable + head * position_head,
                BUCKETS,
                BUCKET_LANES,
                POSITIONS,
                BM,
                BN,
                TILED,
                PRECISION,
            )
            weights = tl.where(allowed, scores / (1.0 + tl.exp(-scores)), 0.0)
            out += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        # Scaled at the end: scale is often 1 / 8192, and fp16 weights times that would lose their last bits.
        store_tile(Out + head * E, out * scale, start, queries, length, vd, heads * E, E)


@triton.jit(do_not_specialize=["window", "full_tail"])
def query_gradient_kernel(
    Grad,
    Q,
    K,
    V,
    DQ,
    Rows,
    Items,
    ItemCount,
    Times,
    Borders,
    TimeTable,
    PositionTable,
    alpha,
    scale,
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
    """DQ [T, H, D], contiguous. One piece of work: one query tile of one head. Grad: that of Out."""
    qd = tl.arange(0, BD)
    vd = tl.arange(0, BE)
    for work in range(tl.program_id(0), tl.load(ItemCount) * heads, tl.num_programs(0)):
        head = work % heads
        row = tl.load(Items + 2 * (work // heads))
        m0 = tl.load(Items + 2 * (work // heads) + 1) * BM
        start, length, first_target, shift, contextual = row_limits(Rows, row)
        queries = m0 + tl.arange(0, BM)
        q = load_tile(Q + head * q_head, start, queries, length, qd, q_token, D)
        grad = load_tile(Grad + head * grad_head, start, queries, length, vd, grad_token, E)
        dq = tl.zeros((BM, BD), dtype=tl.float32)
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
            scores = biased_scores(
                q,
                k,
                alpha,
                allowed,
                m0 - n0,
                start,
                tokens,
                queries,
                keys,
                length,
                Times,
                Borders,
                TimeTable + head * time_head,
                PositionTable + head * position_head,
                BUCKETS,
                BUCKET_LANES,
                POSITIONS,
                BM,
                BN,
                TILED,
                PRECISION,
            )
            _, slope = silu_slope(scores)
            ds = tl.dot(grad, tl.trans(v), input_precision=PRECISION) * slope
            ds = tl.where(allowed, ds, 0.0)
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
        store_tile(DQ + head * D, dq * (alpha * scale), start, queries, length, qd, heads * D, D)


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
    """DK [T, H, D] and DV [T, H, E], contiguous. One piece of work: one key tile of one head."""
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
        dv = tl.zeros((BN, BE), dtype=tl.float32)
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
            scores = biased_scores(
                q,
                k,
                alpha,
                allowed,
                m0 - n0,
                start,
                tokens,
                queries,
                keys,
                length,
                Times,
                Borders,
                TimeTable + head * time_head,
                PositionTable + head * position_head,
                BUCKETS,
                BUCKET_LANES,
                POSITIONS,
                BM,
                BN,
                TILED,
                PRECISION,
            )
            weights, slope = silu_slope(scores)
            weights = tl.where(allowed, weights, 0.0)
            dv += tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
            ds = tl.dot(grad, tl.trans(v), input_precision=PRECISION) * slope
            ds = tl.where(allowed, ds, 0.0)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
        store_tile(DK + head * D, dk * (alpha * scale), start, keys, length, qd, heads * D, D)
        store_tile(DV + head * E, dv * scale, start, keys, length, vd, heads * E, E)


@triton.jit(do_not_specialize=["window", "full_tail"])
def table_gradient_kernel(
    Grad,
    Q,
    K,
    V,
    TimeSums,
    PositionSums,
    Rows,
    Items,
    ItemCount,
    Times,
    Borders,
    TimeTable,
    PositionTable,
    alpha,
    window,
    full_tail,
    tokens,
    heads,
    groups,
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
    """Sums over all pairs by table entry, each program in its own slot of TimeSums and PositionSums (zeros before).

    One piece of work: the tiles of one row whose keys stand a fixed number of tiles before their queries (or after,
    where a mask lets queries look ahead), over the heads of one group: all heads, or one where tables are per head.

    TimeSums: float32 [programs, groups, BUCKET_LANES]. PositionSums: float32 [programs, groups, slots] with entry
    i - j at i - j + 2 BT; the host folds what lies outside the table into its ends. `scale` is the host's, too.
    """
    qd = tl.arange(0, BD)
    vd = tl.arange(0, BE)
    LANES: tl.constexpr = 2 * BT
    LAST: tl.constexpr = (POSITIONS + BT - 1) // BT + 1
    SLOTS: tl.constexpr = (LAST + 3) * BT
    SIDES: tl.constexpr = 1 if CAUSAL and not CONTEXT else 2
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
            by_bucket = tl.zeros((BUCKET_LANES,), dtype=tl.float32)
            for tile in range(first, end):
                m0 = tile * BT
                n0 = (tile - delta) * BT
                queries = m0 + tl.arange(0, BT)
                keys = n0 + tl.arange(0, BT)
                allowed = allowed_pairs(
                    queries, keys, first_target, shift, contextual, window, full_tail, CAUSAL, TARGETS, CONTEXT, WINDOW
                )
                bias = tl.zeros((BT, BT), dtype=tl.float32)
                if POSITIONS > 0:
                    Table = PositionTable + group * position_head
                    bias += position_bias_tile(Table, delta * BT, queries, keys, POSITIONS, BT, BT, TILED)
                if BUCKETS > 0:
                    gaps = time_gaps(Times, tokens, start, queries, keys, length)
                    low, high = bucket_range(gaps, allowed, Borders, BUCKETS, BUCKET_LANES)
                    bias += time_bias_tile(gaps, low, high, Borders, TimeTable + group * time_head, BT, BT)
                of_heads = tl.zeros((BT, BT), dtype=tl.float32)
                for head in range(group, tl.where(groups == 1, heads, group + 1)):
                    q = load_tile(Q + head * q_head, start, queries, length, qd, q_token, D)
                    k = load_tile(K + head * k_head, start, keys, length, qd, k_token, D)
                    v = load_tile(V + head * v_head, start, keys, length, vd, v_token, E)
                    grad = load_tile(Grad + head * grad_head, start, queries, length, vd, grad_token, E)
                    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * alpha + bias
                    _, slope = silu_slope(scores)
                    of_heads += tl.dot(grad, tl.trans(v), input_precision=PRECISION) * slope
                of_heads = tl.where(allowed, of_heads, 0.0)
                by_position += of_heads
                if BUCKETS > 0:
                    by_bucket = add_by_bucket(by_bucket, of_heads, gaps, low, high, Borders, BUCKET_LANES)
            if BUCKETS > 0:
                tl.atomic_add(TimeSums + slot * BUCKET_LANES + tl.arange(0, BUCKET_LANES), by_bucket)
            if POSITIONS > 0:
                base = (tl.minimum(tl.maximum(delta, -1), LAST) + 1) * BT
                sums = diagonal_sums(by_position, BT, LANES)
                tl.atomic_add(PositionSums + slot * SLOTS + base + tl.arange(0, LANES), sums)
            if not TILED:
                # The slot is the program's own; between two of its additions to one entry all its threads meet, so
                # that the sums have a fixed order.
                tl.debug_barrier()
