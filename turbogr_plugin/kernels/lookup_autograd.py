"""Autograd of a lookup whose optimizer is fused into the backward pass, for every way into it.

The tables are no inputs of the graph: the backward pass changes them, and other lookups may be under way. A lookup that
goes backward twice (retain_graph=True) updates twice, as upstream.

Left out: the arguments of fbgemm's operators (fbgemm_lookup.py) and of ours (jagged_lookup.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.lookup_call import SEQUENCE, FusedUpdate, Lookup


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        placeholder: Tensor,
        indice_weights: Tensor | None,
        output: Tensor | None,
        call: Lookup,
        update: FusedUpdate,
        module: ModuleType,
        table_names: Sequence[str] | None,
    ) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        outputs, kept = module.forward(call)
        ctx.call, ctx.update, ctx.module, ctx.table_names = call, update, module, table_names
        ctx.has_output = output is not None
        # What the backward pass reads again is saved, too: autograd then notices if it was changed in between.
        ctx.save_for_backward(call.indices, call.offsets, call.indice_weights, *kept)
        if output is not None:
            assert call.variable is not None
            ctx.mark_dirty(output)
            # the node must not hold what it returns: they would keep each other alive
            ctx.call = call._replace(variable=call.variable.without_output())
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, indice_weights, *kept = ctx.saved_tensors
        call: Lookup = ctx.call._replace(indices=indices, offsets=offsets, indice_weights=indice_weights)
        if ctx.table_names is not None:
            check_finite(call, grads, ctx.table_names)
        wanted = call.indice_weights is not None and ctx.needs_input_grad[1]
        found = ctx.module.fused_backward(call, tuple(kept), grads, ctx.update, wanted)
        # autograd is to notice, whatever the implementation wrote with, that what it saved elsewhere has changed
        torch.autograd.graph.increment_version([call.weights.values, *(each.values for each in ctx.update.states)])
        # groups of tables that share one output are chained by it: each passes the whole gradient on, as upstream
        return None, found, grads[0] if ctx.has_output else None, None, None, None, None


def fused_lookup(
    call: Lookup,
    update: FusedUpdate,
    *,
    placeholder: Tensor | None = None,
    table_names: Sequence[str] | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, ...]:
    """Looks up, and updates the tables when the output goes backward.

    Args:
        call: complete and checked; `call.indice_weights` may want a gradient.
        update: what the backward pass does.
        placeholder: a tensor of any shape that requires a gradient (and gets none), so that there is a backward pass;
            None: one is made.
        table_names: of each feature's table: the backward pass refuses gradients that are not finite, before it changes
            anything, and names the table. Reading them waits for a device. None: they are not looked at.
        implementation: reference, cpu or triton; None: the fastest that serves the call and the update.

    Returns:
        The output of each block.
    """
    module = dispatch.serve(
        "jagged_lookup", call, implementation, lambda candidate: _refuses_update(candidate, call, update)
    )
    if placeholder is None:
        placeholder = torch.empty(0, requires_grad=True)
    output = None if call.variable is None else call.variable.output
    outputs: tuple[Tensor, ...] = _FusedLookup.apply(
        placeholder, call.indice_weights, output, call, update, module, table_names
    )
    return outputs


def _refuses_update(module: ModuleType, call: Lookup, update: FusedUpdate) -> str | None:
    reason: str | None = module.refuses_update(call, update)
    return reason


def check_finite(call: Lookup, grads: Sequence[Tensor], table_names: Sequence[str]) -> None:
    """Raises ValueError if a gradient of the output is NaN or infinite; waits for a device.

    Args:
        call: the lookup, without variable batch sizes.
        grads: of the output of each block.
        table_names: of each feature's table.
    """
    finite = torch.stack([gradient.isfinite().all() for gradient in grads]).tolist()
    if all(finite):
        return
    block = finite.index(False)
    position = tuple((~grads[block].isfinite()).nonzero()[0].tolist())
    if call.pooling == SEQUENCE:
        batch = call.bags // call.tables.features
        ends = call.offsets[batch::batch] if batch else call.offsets
        row = call.blocks[block].begin + position[0]
        feature = int(torch.searchsorted(ends.cpu().contiguous(), row, right=True))
        where = f"position {row}"
    else:
        feature = int(torch.searchsorted(call.tables.d_offsets[1:].cpu().contiguous(), position[1], right=True))
        where = f"row {position[0]} of the batch"
    feature = min(feature, call.tables.features - 1)
    raise ValueError(
        f"gradients must be finite, got {float(grads[block][position])} for table {table_names[feature]!r} (feature "
        f"{feature}, {where}); nothing has been updated"
    )
