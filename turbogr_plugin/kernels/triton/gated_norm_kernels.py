"""norm(x) times gate with keyed dropout on the device: one pass forward, one backward, nothing kept between them.

A tile holds some tokens of one group (the whole width for LayerNorm and RMSNorm). It begins at a multiple of four
elements of the token, because random words come in fours; elements of the group before are masked.
"""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from turbogr_plugin.kernels.triton.random_kernels import kept


@triton.jit
def normalised(x, there, width, eps, CENTERED: tl.constexpr):
    """(x - mean) / sqrt(variance + eps), or x / sqrt(mean square + eps), and 1 / the root."""
    if CENTERED:
        mean = tl.sum(x, 1) / width
        x = tl.where(there, x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    return x * inverse[:, None], inverse


@triton.jit(do_not_specialize=["seed", "step", "layer", "threshold"])
def forward_kernel(
    X,
    Gate,
    Weight,
    Bias,
    Out,
    Counters,
    tokens,
    groups,
    width,
    x_token,
    gate_token,
    eps,
    factor,
    seed,
    step,
    layer,
    threshold,
    dropped,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Out [T, groups * width], contiguous. One piece of work: ROWS tokens of one group."""
    total = (tokens + ROWS - 1) // ROWS * groups
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        first = work // groups * ROWS
        row = tl.arange(0, ROWS)
        token = first + row
        begin = work % groups * width
        aligned = begin // 4 * 4
        column = aligned + tl.arange(0, WIDTH)
        inside = (column >= begin) & (column < begin + width)
        there = (token < tokens)[:, None] & inside[None, :]
        x = tl.load(
            X + first.to(tl.int64) * x_token + row[:, None] * x_token + column[None, :], mask=there, other=0.0
        ).to(tl.float32)
        gate = tl.load(
            Gate + first.to(tl.int64) * gate_token + row[:, None] * gate_token + column[None, :], mask=there, other=0.0
        )
        y, _ = normalised(x, there, width, eps, CENTERED)
        if WEIGHTED:
            y = y * tl.load(Weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if BIASED:
            y = y + tl.load(Bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = y * gate.to(tl.float32)
        keep = kept(Counters, tokens, token, aligned // 4, seed, step, layer, threshold, dropped, ROWS, WIDTH)
        y = tl.where(keep > 0.5, y * factor, 0.0)
        where = Out + first.to(tl.int64) * (groups * width) + row[:, None] * (groups * width) + column[None, :]
        tl.store(where, y.to(Out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["seed", "step", "layer", "threshold"])
def backward_kernel(
    Grad,
    X,
    Gate,
    Weight,
    Bias,
    DX,
    DGate,
    WeightSums,
    BiasSums,
    Counters,
    tokens,
    groups,
    width,
    grad_token,
    x_token,
    gate_token,
    eps,
    factor,
    seed,
    step,
    layer,
    threshold,
    dropped,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """DX and DGate [T, groups * width], contiguous; WeightSums and BiasSums float32 [programs / groups, width of all].

    A program keeps to one group, and the gradients of its weights stay on the core until its last token.
    """
    group = tl.program_id(0) % groups
    share = tl.program_id(0) // groups
    begin = group * width
    aligned = begin // 4 * 4
    column = aligned + tl.arange(0, WIDTH)
    inside = (column >= begin) & (column < begin + width)
    weight_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    bias_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    for block in range(share, (tokens + ROWS - 1) // ROWS, tl.num_programs(0) // groups):
        first = block * ROWS
        row = tl.arange(0, ROWS)
        token = first + row
        there = (token < tokens)[:, None] & inside[None, :]
        x = tl.load(
            X + first.to(tl.int64) * x_token + row[:, None] * x_token + column[None, :], mask=there, other=0.0
        ).to(tl.float32)
        gate = tl.load(
            Gate + first.to(tl.int64) * gate_token + row[:, None] * gate_token + column[None, :], mask=there, other=0.0
        )
        grad = tl.load(
            Grad + first.to(tl.int64) * grad_token + row[:, None] * grad_token + column[None, :], mask=there, other=0.0
        )
        keep = kept(Counters, tokens, token, aligned // 4, seed, step, layer, threshold, dropped, ROWS, WIDTH)
        grad = tl.where(keep > 0.5, grad.to(tl.float32) * factor, 0.0)
        normed, inverse = normalised(x, there, width, eps, CENTERED)
        y = normed
        dy = grad * gate.to(tl.float32)
        dnormed = dy
        if WEIGHTED:
            weight = tl.load(Weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            y = y * weight
            dnormed = dy * weight
        if BIASED:
            y = y + tl.load(Bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        weight_sum += tl.sum(dy * normed, 0)
        bias_sum += tl.sum(dy, 0)
        dx = dnormed - normed * (tl.sum(dnormed * normed, 1) / width)[:, None]
        if CENTERED:
            dx = dx - (tl.sum(dnormed, 1) / width)[:, None]
        offsets = row[:, None] * (groups * width) + column[None, :]
        begin_of_block = first.to(tl.int64) * (groups * width)
        tl.store(DX + begin_of_block + offsets, (dx * inverse[:, None]).to(DX.dtype.element_ty), mask=there)
        tl.store(DGate + begin_of_block + offsets, (grad * y).to(DGate.dtype.element_ty), mask=there)
    sums = share * (groups * width) + column
    tl.store(WeightSums + sums, weight_sum, mask=inside)
    tl.store(BiasSums + sums, bias_sum, mask=inside)
