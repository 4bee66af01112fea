"""Lookup of jagged ids in a group of tables in Triton: prepares a call and launches jagged_lookup_kernels.py.

Nothing waits for the device. Forward reads ids, offsets and rows and nothing else. Backward sorts the positions by row
(torch's sort), then sums and updates in one kernel.

Left out, the reference serves it: variable batch sizes, float64, and the optimizers that fused_update.py leaves out.
"""

from __future__ import annotations

from itertools import groupby
from math import gcd
from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.lookup_call import MEAN, SEQUENCE, FusedUpdate, Lookup
from turbogr_plugin.kernels.table_bags import Values, resolve_values
from turbogr_plugin.kernels.triton import row_tiles, targets
from turbogr_plugin.kernels.triton.attention_launch import last_dim_dense
from turbogr_plugin.kernels.triton.coalesce_rows import refuses_sizes
from turbogr_plugin.kernels.triton.fused_update import optimizer_arguments, refuses_optimizer
from turbogr_plugin.kernels.triton.row_segments import row_segments

_LARGEST_UNIT = 16  # elements: further ones would only be further kernels


def refuses(call: Lookup) -> str | None:
    """Why Triton cannot serve this call: the device, a missing package, a dtype, a size, variable batch sizes."""
    reason = targets.refuses_device(call.indices.device.type) or targets.refuses_tensors(call.weights.values)
    if reason is None and call.variable is not None:
        return "variable batch sizes"
    for dtype in (block.dtype for block in call.blocks):
        if reason is None and dtype not in targets.DTYPES:
            return f"output in {dtype}, not in one of {', '.join(str(served) for served in targets.DTYPES)}"
    return reason or refuses_sizes(max(call.indices.numel(), call.bags), call.tables.max_d)


def refuses_update(call: Lookup, update: FusedUpdate) -> str | None:
    """Why Triton cannot serve this optimizer; None if it can."""
    reason = None
    for state in update.states:
        reason = reason or targets.refuses_tensors(state.values)
    rounded = call.tables.max_d if update.stochastic_rounding is not None else 0
    return reason or refuses_optimizer(update.optimizer, update.settings, rounded)


def forward(call: Lookup) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The output of each block: [ids, D], or pooled [B, total_D]. Nothing is kept."""
    if call.pooling != SEQUENCE:
        return (_pooled(call),), ()
    features = [call.tables.features]
    if call.output_dtypes is not None:
        features = [len(list(same)) for _, same in groupby(call.output_dtypes)]
    outputs = []
    first = 0
    for block, count in zip(call.blocks, features, strict=True):
        out = call.weights.values.new_empty(block.end - block.begin, call.tables.max_d, dtype=block.dtype)
        _look_up(call, out, block.begin, first, first + count)
        outputs.append(out)
        first += count
    return tuple(outputs), ()


def _tables(call: Lookup) -> dict[str, Any]:
    """What every lookup reads, by name."""
    return {
        "Weights": call.weights.values,
        "Ids": call.indices.contiguous(),
        "Offsets": call.offsets.contiguous(),
        "TableBegin": call.weights.begin.to(torch.int64),
        "TableRows": call.tables.heights,
        "features": call.tables.features,
        "batch": call.bags // call.tables.features,
        "UNIT": _unit(call),
    }


def _unit(call: Lookup) -> int:
    """What divides all widths and addresses, as far as it lets a CUDA thread load more at once."""
    return gcd(call.tables.unit, _LARGEST_UNIT)


def _look_up(call: Lookup, out: Tensor, begin: int, first_feature: int, last_feature: int) -> None:
    if out.numel() == 0:
        return
    from turbogr_plugin.kernels.triton.jagged_lookup_kernels import sequence_kernel

    target = targets.current_target(out.device)
    width = call.tables.max_d
    tile = row_tiles.lookup_tile(width)
    sequence_kernel[(row_tiles.programs(target, width),)](
        **_tables(call),
        Out=out,
        begin=begin,
        end=begin + out.shape[0],
        first_feature=first_feature,
        last_feature=last_feature,
        width=width,
        ROWS=tile.rows,
        WIDTH=tile.width,
        **row_tiles.options(target, width),
    )


def _pooled(call: Lookup) -> Tensor:
    batch = call.bags // call.tables.features
    out = call.weights.values.new_empty(batch, call.tables.total_d, dtype=call.output_dtype)
    if out.numel() == 0:
        return out
    from turbogr_plugin.kernels.triton.jagged_lookup_kernels import pooled_kernel

    target = targets.current_target(out.device)
    width = call.tables.max_d
    programs = row_tiles.programs(target, width)
    tile = row_tiles.sum_tile(target, width)
    pooled_kernel[(programs,)](
        **_tables(call),
        IdWeights=call.offsets if call.indice_weights is None else call.indice_weights.contiguous(),
        OutOffsets=call.tables.d_offsets,
        Shares=bag_shares(call.offsets, call.tables.features, batch, programs),
        Out=out,
        out_row=out.stride(0),
        MEAN=call.pooling == MEAN,
        WEIGHTED=call.indice_weights is not None,
        ROWS=tile.rows,
        WIDTH=tile.width,
        **row_tiles.options(target, width),
    )
    return out


def bag_shares(offsets: Tensor, features: int, batch: int, programs: int) -> Tensor:
    """[features, programs + 1] int64: the bags of each feature at which the programs begin, and its end.

    Shares are even in ids and bags together: an empty bag has a row of zeros to write.

    Args:
        offsets: [features * batch + 1], non-decreasing.
        features: F.
        batch: B, at least 1.
        programs: number of shares of each feature.
    """
    device = offsets.device
    work = offsets.to(torch.int64) + torch.arange(features * batch + 1, device=device)
    begin = work[:-1:batch].unsqueeze(1)
    size = work[batch::batch].unsqueeze(1) - begin
    part = torch.arange(programs + 1, device=device)
    # Exact at both ends, where the part is 0 or all of them.
    target = begin + torch.div(size * part, programs, rounding_mode="floor")
    return torch.searchsorted(work, target)


class _Backward:
    """A call with at least one id, its ids resolved, and the gradients of its output in at most two tensors."""

    def __init__(self, call: Lookup, grads: tuple[Tensor, ...]) -> None:
        self.call = call
        self.values: Values = resolve_values(call.tables, call.indices, call.offsets, None)
        self.second_begin = grads[0].shape[0]
        # A row may have gradients of all blocks. Kernels know of two; more are brought together first.
        if len(grads) > 2:
            grads = (torch.cat([grad.to(torch.float32) for grad in grads]),)
        self.grad, self.second = last_dim_dense(grads[0]), last_dim_dense(grads[-1])
        self.split = len(grads) == 2
        self.target = targets.current_target(self.grad.device)
        self.width = call.tables.max_d
        self.grid = (row_tiles.programs(self.target, self.width),)
        self.options = row_tiles.options(self.target, self.width)

    @property
    def arguments(self) -> dict[str, Any]:
        """What every kernel of a backward pass takes, by name."""
        return {
            "Grad": self.grad,
            "Ids": self.call.indices.contiguous(),
            "Feature": self.values.rows.feature,
            "Bag": self.values.bag,
            "Offsets": self.call.offsets.contiguous(),
            "GradOffsets": self.call.tables.d_offsets,
            "TableBegin": self.call.weights.begin.to(torch.int64),
            "count": self.call.indices.numel(),
            "batch": self.call.bags // self.call.tables.features,
            "grad_row": self.grad.stride(0),
            "MEAN": self.call.pooling == MEAN,
            "UNIT": gcd(_unit(self.call), self.grad.stride(0), self.second.stride(0)),
        }

    @property
    def sums(self) -> dict[str, Any]:
        """What kernels that sum by row take besides."""
        call = self.call
        number = call.tables.first_row.index_select(0, self.values.rows.feature) + self.values.rows.index
        segments = row_segments(number, self.values.absent)
        tile = row_tiles.sum_tile(self.target, self.width)
        return {
            "SecondGrad": self.second,
            "second_begin": self.second_begin,
            "second_row": self.second.stride(0),
            "SPLIT": self.split,
            "Order": segments.order,
            "Begins": segments.begins,
            "Heads": segments.heads,
            "IdWeights": call.offsets if call.indice_weights is None else call.indice_weights.contiguous(),
            "POOLED": call.pooling != SEQUENCE,
            "WEIGHTED": call.indice_weights is not None,
            "ROWS": tile.rows,
            "WIDTH": tile.width,
        }

    def id_weights_gradient(self) -> Tensor:
        """[N] in the dtype of the weights of the ids."""
        from turbogr_plugin.kernels.triton.jagged_lookup_kernels import id_weights_gradient_kernel

        call = self.call
        assert call.indice_weights is not None
        wanted = ~self.values.absent
        if call.feature_requires_grad is not None:
            wanted &= (call.feature_requires_grad != 0).index_select(0, self.values.rows.feature)
        out = torch.empty_like(call.indice_weights, memory_format=torch.contiguous_format)
        id_weights_gradient_kernel[self.grid](
            **self.arguments,
            Out=out,
            Weights=call.weights.values,
            Wanted=wanted.to(torch.int32),
            WIDTH=row_tiles.padded_width(self.width),
            **self.options,
        )
        return out


def fused_backward(
    call: Lookup,
    kept: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    update: FusedUpdate,
    indice_weights_gradient: bool,
) -> Tensor | None:
    """Updates the tables in place; returns the gradient of the weights of the ids [N] if it is wanted."""
    if call.indices.numel() == 0 or call.weights.values.numel() == 0:
        return _no_gradient(call, indice_weights_gradient)
    from turbogr_plugin.kernels.triton.jagged_lookup_kernels import update_kernel

    if update.max_gradient is not None:
        grads = tuple(grad.clamp(-update.max_gradient, update.max_gradient) for grad in grads)
    work = _Backward(call, grads)
    found = work.id_weights_gradient() if indice_weights_gradient else None
    states = (*update.states, call.weights, call.weights)[:2]  # what an optimizer does not have is not read
    update_kernel[work.grid](
        **work.arguments,
        **work.sums,
        Weights=call.weights.values,
        State0=states[0].values,
        State1=states[1].values,
        State0Begin=states[0].begin.to(torch.int64),
        State1Begin=states[1].begin.to(torch.int64),
        FirstRow=call.tables.first_row,
        **optimizer_arguments(update.optimizer, update.settings, update.stochastic_rounding, call.weights.values),
        **work.options,
    )
    return found


def dense_backward(
    call: Lookup, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], indice_weights_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the tables [E], summed in float32 and rounded once, and of the weights of the ids [N]."""
    out = torch.zeros_like(call.weights.values)
    if call.indices.numel() == 0 or out.numel() == 0:
        return out, _no_gradient(call, indice_weights_gradient)
    from turbogr_plugin.kernels.triton.jagged_lookup_kernels import dense_gradient_kernel

    work = _Backward(call, grads)
    found = work.id_weights_gradient() if indice_weights_gradient else None
    dense_gradient_kernel[work.grid](**work.arguments, **work.sums, Out=out, **work.options)
    return out, found


def _no_gradient(call: Lookup, wanted: bool) -> Tensor | None:
    return torch.zeros_like(call.indice_weights) if wanted and call.indice_weights is not None else None
