"""FuXi's three attention channels in Triton: prepares a call and launches the kernels of fuxi_attention_kernels.py.

The gradient of q comes from the semantic channel alone: it is that of HSTU attention without biases.

Letters: T tokens, B rows, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import FuxiAttentionCall
from turbogr_plugin.kernels.triton import attention_layout as layout
from turbogr_plugin.kernels.triton import targets
from turbogr_plugin.kernels.triton.attention_launch import Launch, last_dim_dense, per_head_stride, summed_like

_UNBIASED = {"BUCKETS": 0, "POSITIONS": 0}


def refuses(call: FuxiAttentionCall) -> str | None:
    """Why Triton cannot serve this call: the device, a missing package, a dtype or a dim."""
    reason = targets.refuses_device(call.q.device.type)
    tables = (call.time_bias, call.time_decay, call.position_bias)
    return reason or targets.refuses_tensors(call.q, *tables, D=call.q.shape[2], E=call.v.shape[2])


def _time_table(call: FuxiAttentionCall) -> Tensor:
    """The table of buckets, or the parameters of the decay."""
    table = call.time_bias if call.time_decay is None else call.time_decay
    assert table is not None
    return table.contiguous()


def _temporal(call: FuxiAttentionCall) -> dict[str, Any]:
    table = _time_table(call)
    return {"TimeTable": table, "time_head": per_head_stride(table)}


def forward(call: FuxiAttentionCall) -> Tensor:
    """The output [T, H, 3E]: semantic, temporal, positional."""
    tokens, heads, dim = call.v.shape
    out = call.v.new_empty(tokens, heads, 3 * dim)
    if out.numel() == 0:
        return out
    from turbogr_plugin.kernels.triton.fuxi_attention_kernels import forward_kernel

    launch = Launch(call)
    tile = launch.tile("fuxi_forward")
    work = layout.work(launch.rows, tokens, tile.queries)
    arguments = launch.arguments(tile, work) | _temporal(call)
    forward_kernel[launch.grid(work.bound * heads)](
        Out=out,
        scale=call.scale,
        bias_scale=call.bias_scale,
        BM=tile.queries,
        BN=tile.keys,
        **arguments,
        **launch.options,
    )
    return out


def backward(grad: Tensor, call: FuxiAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, of `time_bias` or `time_decay`, and of `position_bias`; None where it is not asked for.

    Args:
        grad: of the output, [T, H, 3E].
        call: as it was in `forward`.
    """
    dq, dk, dv = (x.new_empty(x.shape) for x in (call.q, call.k, call.v))
    wanted = call.time_gradient or call.position_gradient
    if call.v.numel() == 0:
        tables = (_time_table(call) if call.time_gradient else None, call.position_bias)
        dt, dp = (None if table is None else torch.zeros_like(table) for table in tables)
        return dq, dk, dv, dt, dp if call.position_gradient else None
    from turbogr_plugin.kernels.triton.fuxi_attention_kernels import key_value_gradient_kernel
    from turbogr_plugin.kernels.triton.jagged_attention_kernels import query_gradient_kernel

    launch = Launch(call)
    grad = last_dim_dense(grad)
    given = {"Grad": grad, "grad_token": grad.stride(0), "grad_head": grad.stride(1)}

    tile = launch.tile("query_gradient")
    work = layout.work(launch.rows, launch.tokens, tile.queries)
    arguments = launch.arguments(tile, work) | _UNBIASED
    query_gradient_kernel[launch.grid(work.bound * launch.heads)](
        DQ=dq, scale=call.scale, BM=tile.queries, BN=tile.keys, **given, **arguments, **launch.options
    )

    tile = launch.tile("fuxi_key_value_gradient")
    work = layout.work(launch.rows, launch.tokens, tile.keys)
    arguments = launch.arguments(tile, work) | _temporal(call)
    scales = {"scale": call.scale, "bias_scale": call.bias_scale}
    key_value_gradient_kernel[launch.grid(work.bound * launch.heads)](
        DK=dk, DV=dv, BM=tile.queries, BN=tile.keys, **scales, **given, **arguments, **launch.options
    )
    time, position = _table_gradients(launch, given, call) if wanted else (None, None)
    return dq, dk, dv, time if call.time_gradient else None, position if call.position_gradient else None


def _table_gradients(launch: Launch, given: dict[str, Any], call: FuxiAttentionCall) -> tuple[Tensor, Tensor]:
    from turbogr_plugin.kernels.triton.fuxi_attention_kernels import table_gradient_kernel

    table, position_table = _time_table(call), call.position_bias
    assert position_table is not None
    tile = launch.tile("fuxi_table_gradient")
    work = layout.work(launch.rows, launch.tokens, tile.queries)
    groups = launch.heads if table.dim() == 2 or position_table.dim() == 2 else 1
    grid = launch.table_grid(work.bound * groups)
    arguments = launch.arguments(tile, work) | _temporal(call)
    positions = position_table.shape[-1]
    time_sums = launch.unused.new_zeros(grid[0], groups, arguments["BUCKET_LANES"])
    position_sums = launch.unused.new_zeros(grid[0], groups, layout.position_slots(positions, tile.keys))
    of_biases = {name: arguments[name] for name in table_gradient_kernel.arg_names if name in arguments}
    table_gradient_kernel[grid](
        TimeSums=time_sums,
        PositionSums=position_sums,
        groups=groups,
        BT=tile.keys,
        **given,
        **of_biases,
        **launch.options,
    )
    folded = layout.fold_positions(position_sums, positions, tile.keys)
    time = summed_like(table, time_sums[..., : table.shape[-1]] * call.bias_scale)
    return time, summed_like(position_table, folded * call.bias_scale)
