"""Duplicate ids and the sums of their gradients in Triton: prepares a call and launches coalesce_rows_kernels.py.

The sort is torch's. How many ids are different decides the result's shape, for which the host waits once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.lookup_call import CoalesceCall
from turbogr_plugin.kernels.triton import row_tiles, targets
from turbogr_plugin.kernels.triton.attention_launch import last_dim_dense
from turbogr_plugin.kernels.triton.row_segments import row_segments

LARGEST_COUNT = (1 << 31) - (1 << 16)
"""Positions are 32-bit numbers in the kernels, rounded up to the number of programs; addresses are not."""


def refuses(call: CoalesceCall) -> str | None:
    """Why Triton cannot serve this call: the device, a missing package, a dtype, a size."""
    reason = targets.refuses_device(call.ids.device.type) or targets.refuses_tensors(call.grads)
    return reason or refuses_sizes(call.ids.numel(), call.grads.shape[1])


def refuses_sizes(count: int, width: int) -> str | None:
    """Why so many ids, or rows of so many columns, cannot be served; None if they can."""
    if count > LARGEST_COUNT:
        return f"{count} ids or bags are more than {LARGEST_COUNT}"
    if not 1 <= width <= row_tiles.WIDEST:
        return f"rows of {width} columns are not in [1, {row_tiles.WIDEST}]"
    return None


def coalesce(call: CoalesceCall) -> tuple[Tensor, Tensor]:
    """Different ids [U], ascending, and the sums of their gradients [U, D] float32, in the order of positions."""
    width = call.grads.shape[1]
    if call.ids.numel() == 0:
        return call.ids.new_empty(0), call.grads.new_empty(0, width, dtype=torch.float32)
    from turbogr_plugin.kernels.triton.coalesce_rows_kernels import coalesce_kernel

    segments = row_segments(call.ids)
    different = int(segments.heads[-1])
    ids = segments.numbers.index_select(0, segments.begins[:different]).to(call.ids.dtype)
    rows = call.grads.new_empty(different, width, dtype=torch.float32)
    grads = last_dim_dense(call.grads)
    target = targets.current_target(grads.device)
    tile = row_tiles.sum_tile(target, width)
    coalesce_kernel[(row_tiles.programs(target, width),)](
        Grad=grads,
        Order=segments.order,
        Begins=segments.begins,
        Heads=segments.heads,
        Out=rows,
        count=call.ids.numel(),
        width=width,
        grad_row=grads.stride(0),
        ROWS=tile.rows,
        WIDTH=tile.width,
        **row_tiles.options(target, width),
    )
    return ids, rows
