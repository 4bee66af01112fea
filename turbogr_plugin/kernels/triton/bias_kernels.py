"""Relative biases of one tile, computed on the core, and the sums of their gradients: shared device functions.

Time: `gap` is the float32 of the whole gap, from two float32 parts per time that are exact (see attention_layout.py).
The bucket of a gap is the number of borders at or below it. Only the borders between the smallest and the largest gap
of a tile's allowed pairs are walked: away from the diagonal that is one or two of them, so neither a gather (slow on
Ascend) nor a logarithm (rounded differently by each device) is needed.

Position: one entry per diagonal of the tile. CUDA gathers it from the table; on Ascend, whose cores move blocks and
gather one element at a time, the host lays the table out as ready tiles, one per tile diagonal.
"""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def time_gaps(Times, tokens, start, queries, keys, length):
    """|time of query - time of key| in float32, [queries, keys]. Times: float32 [4, T], see `attention_layout`."""
    query_there = queries < length
    key_there = keys < length
    query_high = tl.load(Times + start + queries, mask=query_there, other=0.0)
    query_low = tl.load(Times + tokens + start + queries, mask=query_there, other=0.0)
    key_high = tl.load(Times + 2 * tokens + start + keys, mask=key_there, other=0.0)
    key_low = tl.load(Times + 3 * tokens + start + keys, mask=key_there, other=0.0)
    return tl.abs((query_high[:, None] - key_high[None, :]) + (query_low[:, None] - key_low[None, :]))


@triton.jit
def bucket_range(gaps, allowed, Borders, BUCKETS: tl.constexpr, LANES: tl.constexpr):
    """The smallest and the largest bucket of a tile's allowed pairs; (BUCKETS - 1, 0) where there is none."""
    lanes = tl.arange(0, LANES)
    borders = tl.load(Borders + lanes, mask=lanes < BUCKETS - 1, other=float("inf"))
    # The largest finite number stands for "none": it is above every border that a gap can reach.
    least = tl.min(tl.min(tl.where(allowed, gaps, 3.0e38), 1), 0)
    most = tl.max(tl.max(tl.where(allowed, gaps, 0.0), 1), 0)
    first = tl.sum(tl.where(borders <= least, 1.0, 0.0), 0).to(tl.int32)
    last = tl.sum(tl.where(borders <= most, 1.0, 0.0), 0).to(tl.int32)
    return first, last


@triton.jit
def time_bias_tile(gaps, first, last, Borders, Table, BM: tl.constexpr, BN: tl.constexpr):
    """The table's entry for each gap of a tile, float32 [BM, BN]; right for the pairs whose bucket is in the range."""
    bias = tl.zeros((BM, BN), dtype=tl.float32) + tl.load(Table + first).to(tl.float32)
    for bucket in range(first, last):
        border = tl.load(Borders + bucket)
        entry = tl.load(Table + bucket + 1).to(tl.float32)
        bias = tl.where(gaps >= border, entry, bias)
    return bias


@triton.jit
def add_by_bucket(sums, values, gaps, first, last, Borders, LANES: tl.constexpr):
    """Adds a tile's values to the sum of each one's bucket: sums [LANES] plus what was added."""
    lanes = tl.arange(0, LANES)
    rest = values
    for bucket in range(first, last):
        border = tl.load(Borders + bucket)
        above = tl.where(gaps >= border, rest, 0.0)
        # Taken off by selection, not by subtraction: rest - above would leave rounding of the others behind.
        here = tl.sum(tl.sum(tl.where(gaps >= border, 0.0, rest), 1), 0)
        sums += tl.where(lanes == bucket, here, 0.0)
        rest = above
    return sums + tl.where(lanes == tl.maximum(last, first), tl.sum(tl.sum(rest, 1), 0), 0.0)


@triton.jit
def decay_tile(gaps, Decay):
    """FuXi-gamma's exponential-power decay a * exp(-r * gap^p): (weights / a, gap^p, log gap), with 0^p = 0."""
    rate = tl.load(Decay + 1).to(tl.float32)
    power = tl.load(Decay + 2).to(tl.float32)
    # Gaps are whole numbers: 1 stands in for 0 under the logarithm, and the selection puts 0^p = 0 back.
    logs = tl.log(tl.maximum(gaps, 1.0))
    powers = tl.where(gaps > 0.0, tl.exp(power * logs), 0.0)
    return tl.exp(-rate * powers), powers, logs


@triton.jit
def position_bias_tile(
    Table, offset, queries, keys, POSITIONS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILED: tl.constexpr
):
    """The table's entry for each pair's clamp(i - j, 0, POSITIONS - 1), float32 [BM, BN].

    `offset`: position of the tile's first query minus that of its first key, a multiple of the smaller tile side.
    TILED: Table is float32 [tiles, BM, BN] of `attention_layout.position_tiles`, not the table of entries.
    """
    if TILED:
        STEP: tl.constexpr = BM if BM < BN else BN
        # Tile 0 stands for all offsets at or below -BM, the last one for all from POSITIONS + BN up.
        LAST: tl.constexpr = (POSITIONS + BN) // STEP + 1 + BM // STEP
        which = tl.minimum(tl.maximum(offset // STEP + BM // STEP, 0), LAST)
        rows = tl.arange(0, BM)
        columns = tl.arange(0, BN)
        bias = tl.load(Table + which * (BM * BN) + rows[:, None] * BN + columns[None, :])
    else:
        gaps = tl.minimum(tl.maximum(queries[:, None] - keys[None, :], 0), POSITIONS - 1)
        bias = tl.load(Table + gaps).to(tl.float32)
    return bias


@triton.jit
def diagonal_sums(values, BT: tl.constexpr, LANES: tl.constexpr):
    """Sums of a [BT, BT] tile along its diagonals: float32 [LANES = 2 BT], lane d for i - j = d - BT."""
    rows = tl.arange(0, BT).to(tl.float32)
    lanes = tl.arange(0, LANES)
    diagonals = rows[:, None] - rows[None, :]
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for lane in range(1, LANES):
        here = tl.where(diagonals == (lane - BT).to(tl.float32), values, 0.0)
        sums += tl.where(lanes == lane, tl.sum(tl.sum(here, 1), 0), 0.0)
    return sums
