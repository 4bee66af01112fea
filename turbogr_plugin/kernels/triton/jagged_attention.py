"""HSTU attention in Triton: prepares a call, chooses tiles and launches the kernels of jagged_attention_kernels.py.

Letters: T tokens, B rows, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import HSTUAttentionCall
from turbogr_plugin.kernels.triton import attention_layout as layout
from turbogr_plugin.kernels.triton import targets
from turbogr_plugin.kernels.triton.attention_launch import Launch, last_dim_dense, summed_like


def refuses(call: HSTUAttentionCall) -> str | None:
    """Why Triton cannot serve this call: the device, a missing package, a dtype or a dim."""
    reason = targets.refuses_device(call.q.device.type)
    dims = {"D": call.q.shape[2], "E": call.v.shape[2]}
    return reason or targets.refuses_tensors(call.q, call.time_bias, call.position_bias, **dims)


def forward(call: HSTUAttentionCall) -> Tensor:
    """The output [T, H, E]."""
    out = call.v.new_empty(call.v.shape)
    if out.numel() == 0:
        return out
    from turbogr_plugin.kernels.triton.jagged_attention_kernels import forward_kernel

    launch = Launch(call)
    tile = launch.tile("forward")
    work = layout.work(launch.rows, launch.tokens, tile.queries)
    forward_kernel[launch.grid(work.bound * launch.heads)](
        Out=out, scale=call.scale, BM=tile.queries, BN=tile.keys, **launch.arguments(tile, work), **launch.options
    )
    return out


def backward(grad: Tensor, call: HSTUAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the two tables (None where there is none, or none is asked for).

    Args:
        grad: of the output, [T, H, E].
        call: as it was in `forward`.
    """
    dq, dk, dv = (x.new_empty(x.shape) for x in (call.q, call.k, call.v))
    time_table = call.time_bias if call.time_gradient else None
    position_table = call.position_bias if call.position_gradient else None
    if call.v.numel() == 0:
        none_or_zeros = [None if table is None else torch.zeros_like(table) for table in (time_table, position_table)]
        return dq, dk, dv, none_or_zeros[0], none_or_zeros[1]
    from turbogr_plugin.kernels.triton import jagged_attention_kernels as kernels

    launch = Launch(call)
    grad = last_dim_dense(grad)
    given = {"Grad": grad, "grad_token": grad.stride(0), "grad_head": grad.stride(1)}

    tile = launch.tile("query_gradient")
    work = layout.work(launch.rows, launch.tokens, tile.queries)
    kernels.query_gradient_kernel[launch.grid(work.bound * launch.heads)](
        DQ=dq,
        scale=call.scale,
        BM=tile.queries,
        BN=tile.keys,
        **given,
        **launch.arguments(tile, work),
        **launch.options,
    )

    tile = launch.tile("key_value_gradient")
    work = layout.work(launch.rows, launch.tokens, tile.keys)
    kernels.key_value_gradient_kernel[launch.grid(work.bound * launch.heads)](
        DK=dk,
        DV=dv,
        scale=call.scale,
        BM=tile.queries,
        BN=tile.keys,
        **given,
        **launch.arguments(tile, work),
        **launch.options,
    )

    if time_table is None and position_table is None:
        return dq, dk, dv, None, None
    time, position = _table_gradients(launch, given, call, time_table, position_table)
    return dq, dk, dv, time, position


def _table_gradients(
    launch: Launch,
    given: dict[str, Any],
    call: HSTUAttentionCall,
    time_table: Tensor | None,
    position_table: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    from turbogr_plugin.kernels.triton.jagged_attention_kernels import table_gradient_kernel

    tile = launch.tile("table_gradient")
    work = layout.work(launch.rows, launch.tokens, tile.queries)
    per_head = any(table is not None and table.dim() == 2 for table in (call.time_bias, call.position_bias))
    groups = launch.heads if per_head else 1
    grid = launch.table_grid(work.bound * groups)
    arguments = launch.arguments(tile, work)
    positions = arguments["POSITIONS"]
    time_sums = launch.unused.new_zeros(grid[0], groups, arguments["BUCKET_LANES"])
    position_sums = launch.unused.new_zeros(grid[0], groups, layout.position_slots(positions, tile.keys))
    table_gradient_kernel[grid](
        TimeSums=time_sums,
        PositionSums=position_sums,
        groups=groups,
        BT=tile.keys,
        **given,
        **arguments,
        **launch.options,
    )
    time = position = None
    if time_table is not None:
        time = summed_like(time_table, time_sums[..., : time_table.shape[-1]] * call.scale)
    if position_table is not None:
        folded = layout.fold_positions(position_sums, positions, tile.keys)
        position = summed_like(position_table, folded * call.scale)
    return time, position
