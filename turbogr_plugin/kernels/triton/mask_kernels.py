"""Which pairs of tokens attend, and which tiles hold such pairs: device functions shared by the attention kernels.

Ids and distances are those of kernels/attention_mask.py. They are compared as float32 (exact up to rows of 2^24
tokens): an Ascend vector core compares floating-point numbers in one instruction, and 32-bit integers one by one.

Pairs with a position past the end of the row need no mask of their own: their q, k, v and output gradient are loaded as
zeros, so they add zero to every sum.
"""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_limits(Rows, row):
    """(start, length, first target position, contextual shift, number of contextual tokens) of a row.

    The shift is what an id lacks to its position: the contextual tokens share id 0.
    """
    start = tl.load(Rows + 4 * row)
    length = tl.load(Rows + 4 * row + 1)
    targets = tl.load(Rows + 4 * row + 2)
    contextual = tl.load(Rows + 4 * row + 3)
    return start, length, length - targets, tl.maximum(contextual - 1, 0), contextual


@triton.jit
def token_ids(positions, first_target, shift, TARGETS: tl.constexpr, CONTEXT: tl.constexpr):
    """Ids of tokens as float32, for a vector of positions."""
    ids = positions.to(tl.float32)
    if CONTEXT:
        ids = tl.maximum(ids - shift.to(tl.float32), 0.0)
    if TARGETS:
        ids = tl.minimum(ids, (first_target - shift).to(tl.float32))
    return ids


@triton.jit
def _id(position, first_target, shift):
    """The id of one token, a scalar of int32."""
    return tl.minimum(tl.maximum(position - shift, 0), first_target - shift)


@triton.jit
def allowed_pairs(
    queries,
    keys,
    first_target,
    shift,
    contextual,
    window,
    full_tail,
    CAUSAL: tl.constexpr,
    TARGETS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Which pairs of a tile are allowed: bool [queries, keys], from the positions of its rows and columns."""
    i = queries.to(tl.float32)[:, None]
    j = keys.to(tl.float32)[None, :]
    if CAUSAL and not (TARGETS or (CONTEXT or WINDOW)):
        allowed = i >= j
    else:
        last = (first_target - shift).to(tl.float32)
        query_ids = token_ids(queries, first_target, shift, TARGETS, CONTEXT)[:, None]
        key_ids = token_ids(keys, first_target, shift, TARGETS, CONTEXT)[None, :]
        distance = query_ids - key_ids
        if not CAUSAL:
            distance = tl.abs(distance)
        allowed = distance > 0.0
        if WINDOW:
            # A query of the tail has no window: a width that no distance reaches.
            width = tl.where(query_ids >= last - full_tail.to(tl.float32), 3.0e38, window.to(tl.float32))
            allowed = allowed & (distance <= width)
        if CONTEXT:
            # Keys that a contextual query sees have ids below `last`; other queries see none this way. A row without
            # contextual tokens (-1 is no id) has no such query.
            contextual_id = tl.where(contextual > 0, 0.0, -1.0e9)
            seen_below = tl.where(query_ids == contextual_id, last, -3.0e38)
            allowed = allowed | (key_ids < seen_below)
        allowed = allowed | (i == j)
    return allowed


@triton.jit
def key_tiles(
    m0,
    length,
    first_target,
    shift,
    contextual,
    window,
    full_tail,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    TARGETS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The key tiles that the query tile at position m0 needs: (first, how many, first of the diagonal ones, in all).

    A main range, and the tiles on the diagonal where it does not hold them: targets see no other target.
    """
    m1 = tl.minimum(m0 + BM, length)
    if CAUSAL:
        end = tl.minimum(m1, first_target)
    else:
        end = tl.where(m0 < first_target, length, first_target)
    begin = m0 * 0
    if WINDOW:
        last = first_target - shift
        low = _id(m0, first_target, shift) - window
        high = _id(m1 - 1, first_target, shift)
        windowed = high < last - full_tail
        begin = tl.where(windowed & (low > 0), low + shift, 0)
        if not CAUSAL:
            high = high + window
            end = tl.where(windowed & (high < last), tl.minimum(end, high + shift + 1), end)
    if CONTEXT:
        end = tl.where(m0 < contextual, tl.maximum(end, first_target), end)
    first = begin // BN
    last_tile = (end + BN - 1) // BN
    many = tl.maximum(last_tile - first, 0)
    diagonal = tl.maximum(last_tile, m0 // BN)
    total = many + tl.maximum((m1 + BN - 1) // BN - diagonal, 0)
    return first, many, diagonal, total


@triton.jit
def query_tiles(
    n0,
    length,
    first_target,
    shift,
    contextual,
    window,
    full_tail,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    TARGETS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The query tiles that the key tile at position n0 needs, as three ranges in ascending order.

    Returns (tiles from 0, first and number of the main range, first of the tail range, in all): contextual queries look
    ahead, the main range begins on the diagonal, queries of the tail look back further than the window.
    """
    n1 = tl.minimum(n0 + BN, length)
    tiles = (length + BM - 1) // BM
    begin = n0 * 0
    end = length
    if CAUSAL:
        begin = n0
        if TARGETS:
            end = tl.where(n0 < first_target, length, n1)
    tail = tiles
    if WINDOW:
        last = first_target - shift
        reach = _id(n1 - 1, first_target, shift) + window
        limit = tl.where(reach < last, reach + shift + 1, length)
        tail = tl.maximum(last - full_tail, 0) + shift
        tail = tl.where((end == length) & (tail < length), tail // BM, tiles)
        end = tl.minimum(end, tl.maximum(limit, n1))
        if not CAUSAL:
            low = _id(n0, first_target, shift) - window
            begin = tl.where(low > 0, tl.minimum(low + shift, n0), 0)
    ahead = n0 * 0
    if CONTEXT:
        ahead = tl.where(n0 < first_target, (tl.minimum(contextual, length) + BM - 1) // BM, 0)
    first = tl.maximum(begin // BM, ahead)
    stop = tl.maximum((end + BM - 1) // BM, first)
    tail = tl.maximum(tail, stop)
    return ahead, first, stop - first, tail, ahead + stop - first + tl.maximum(tiles - tail, 0)


@triton.jit
def diagonal_tiles(
    delta,
    length,
    first_target,
    shift,
    contextual,
    window,
    full_tail,
    BT: tl.constexpr,
    CAUSAL: tl.constexpr,
    TARGETS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The query tiles (first, end) whose key tile stands `delta` tiles before them, where a pair may be allowed."""
    tiles = (length + BT - 1) // BT
    first = tl.maximum(delta, 0)
    end = tl.minimum(tiles, tiles + delta)
    if CAUSAL:
        if CONTEXT:
            end = tl.where(delta < 0, tl.minimum(end, (contextual + BT - 1) // BT), end)
        else:
            end = tl.where(delta < 0, 0, end)
        if TARGETS:
            end = tl.where(delta > 0, tl.minimum(end, (first_target + BT - 1) // BT + delta), end)
    if WINDOW:
        # Ids of contextual tokens and of targets stand closer together than their positions.
        gap = (tl.abs(delta) - 1) * BT + 1 - shift - (length - first_target)
        tail = tl.maximum(first_target - shift - full_tail, 0) + shift
        if CONTEXT:
            tail = tl.where(delta < 0, 0, tail)
        first = tl.where(gap > window, tl.maximum(first, tail // BT), first)
    return first, end
