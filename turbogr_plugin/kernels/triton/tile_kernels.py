"""Tiles of a jagged row in and out, and the scores of one: device functions shared by the attention kernels."""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from turbogr_plugin.kernels.triton.bias_kernels import (
    bucket_range,
    position_bias_tile,
    time_bias_tile,
    time_gaps,
)


@triton.jit
def load_tile(X, start, tokens, length, dims, stride, WIDTH: tl.constexpr):
    """[tokens, dims] of a row that begins at `start`, zeros past its end and past WIDTH."""
    there = (tokens < length)[:, None] & (dims < WIDTH)[None, :]
    return tl.load(X + start.to(tl.int64) * stride + tokens[:, None] * stride + dims[None, :], mask=there, other=0.0)


@triton.jit
def store_tile(X, values, start, tokens, length, dims, stride, WIDTH: tl.constexpr):
    """The reverse of `load_tile`."""
    there = (tokens < length)[:, None] & (dims < WIDTH)[None, :]
    where = X + start.to(tl.int64) * stride + tokens[:, None] * stride + dims[None, :]
    tl.store(where, values.to(X.dtype.element_ty), mask=there)


@triton.jit
def biased_scores(
    q,
    k,
    alpha,
    allowed,
    offset,
    start,
    tokens,
    queries,
    keys,
    length,
    Times,
    Borders,
    TimeTable,
    PositionTable,
    BUCKETS: tl.constexpr,
    BUCKET_LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """alpha * q k^T plus the biases, float32 [BM, BN]."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * alpha
    if BUCKETS > 0:
        gaps = time_gaps(Times, tokens, start, queries, keys, length)
        first, last = bucket_range(gaps, allowed, Borders, BUCKETS, BUCKET_LANES)
        scores += time_bias_tile(gaps, first, last, Borders, TimeTable, BM, BN)
    if POSITIONS > 0:
        scores += position_bias_tile(PositionTable, offset, queries, keys, POSITIONS, BM, BN, TILED)
    return scores


@triton.jit
def silu_slope(scores):
    """(SiLU, its derivative) of scores."""
    sigmoid = 1.0 / (1.0 + tl.exp(-scores))
    return scores * sigmoid, sigmoid * (1.0 + scores * (1.0 - sigmoid))
