"""Sums of the gradients of each id on the device, in the order of their positions."""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from turbogr_plugin.kernels.triton.row_kernels import load_row


@triton.jit(do_not_specialize=["count"])
def coalesce_kernel(
    Grad,
    Order,
    Begins,
    Heads,
    Out,
    count,
    width,
    grad_row,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Out [different ids, width] float32; see `RowSegments` for Order, Begins and Heads.

    A program takes the ids that begin in its even share of the `count` positions.
    """
    column = tl.arange(0, WIDTH)
    inside = column < width
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.load(Heads + tl.minimum(tl.program_id(0) * share, count))
    last = tl.load(Heads + tl.minimum((tl.program_id(0) + 1) * share, count))
    for segment in range(first, last):
        end = tl.load(Begins + segment + 1)
        total = tl.zeros((WIDTH,), dtype=tl.float32)
        for ahead in range(tl.load(Begins + segment), end, ROWS):
            for row in tl.static_range(ROWS):
                position = tl.load(Order + tl.minimum(ahead + row, end - 1)).to(tl.int64)
                total += load_row(Grad, position * grad_row, column, inside & (ahead + row < end))
        tl.store(Out + tl.cast(segment, tl.int64) * width + column, total, mask=inside)
