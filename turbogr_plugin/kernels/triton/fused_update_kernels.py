"""The update of rows whose gradients are already summed, on the device."""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from turbogr_plugin.kernels.triton.row_kernels import load_row, update_row


@triton.jit(do_not_specialize=["count", "table_rows", "seed", "step"])
def update_kernel(
    Weights,
    State0,
    State1,
    Ids,
    RowGradients,
    Rate,
    count,
    table_rows,
    width,
    weights_row,
    state0_row,
    state1_row,
    gradients_row,
    rate,
    eps,
    beta1,
    beta2,
    correction1,
    correction2,
    weight_decay,
    seed,
    step,
    OPTIMIZER: tl.constexpr,
    DECAY: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Updates the rows Ids [count] of Weights [table_rows, width] with RowGradients [count, width].

    Each program has an even share of them.
    """
    column = tl.arange(0, WIDTH)
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    own = tl.program_id(0) * share
    for place in range(own, tl.minimum(own + share, count)):
        index = tl.load(Ids + place).to(tl.int64)
        if (index >= 0) & (index < table_rows):
            inside = column < width
            update_row(
                Weights,
                State0,
                State1,
                index * weights_row,
                index * state0_row,
                index * state1_row,
                load_row(RowGradients, tl.cast(place, tl.int64) * gradients_row, column, inside),
                column,
                inside,
                width,
                index,
                Rate,
                rate,
                eps,
                beta1,
                beta2,
                correction1,
                correction2,
                weight_decay,
                seed,
                step,
                OPTIMIZER,
                DECAY,
                RATE_ON_DEVICE,
                DROPPED,
                WIDTH,
            )
