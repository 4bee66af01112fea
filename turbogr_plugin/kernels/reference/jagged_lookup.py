"""Lookup of jagged ids in a group of tables in plain PyTorch: any device, any table dtype, every optimizer and batch.

Nothing waits for the device: what decides a shape is known on the host, and the number of different rows stays on the
device (row_groups.py).
"""

from __future__ import annotations

from torch import Tensor

from turbogr_plugin.kernels.lookup_call import FusedUpdate, Lookup
from turbogr_plugin.kernels.reference.lookup_update import update_rows
from turbogr_plugin.kernels.reference.row_groups import group_rows, sum_groups
from turbogr_plugin.kernels.table_bags import Values, resolve_values
from turbogr_plugin.kernels.table_pooling import (
    forward_lookup,
    gradient_by_bag,
    gradient_by_value,
    gradient_of_indice_weights,
)
from turbogr_plugin.kernels.table_rows import Rows, add_rows


def refuses(call: Lookup) -> str | None:
    """None: every call is served."""
    return None


def refuses_update(call: Lookup, update: FusedUpdate) -> str | None:
    """None: every optimizer is served."""
    return None


def forward(call: Lookup) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The output of each block, and where each id was found: feature, row, bag, and whether it is absent."""
    values = _resolved(call)
    return forward_lookup(call, values), (values.rows.feature, values.rows.index, values.bag, values.absent)


def fused_backward(
    call: Lookup,
    kept: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    update: FusedUpdate,
    indice_weights_gradient: bool,
) -> Tensor | None:
    """Updates the tables in place; returns the gradient of the weights of the ids [N] if it is wanted."""
    values = _resolved(call, kept)
    if update.max_gradient is not None:
        grads = tuple(gradient.clamp(-update.max_gradient, update.max_gradient) for gradient in grads)
    by_bag = gradient_by_bag(call, grads)
    found = gradient_of_indice_weights(call, values, by_bag) if indice_weights_gradient else None
    if values.absent.numel() == 0:
        return found
    first_row = call.tables.first_row.index_select(0, values.rows.feature)
    groups = group_rows(first_row + values.rows.index, values.absent)
    gradient = sum_groups(groups, gradient_by_value(call, values, by_bag, groups.order))
    rows = Rows(
        values.rows.feature.index_select(0, groups.representative),
        values.rows.index.index_select(0, groups.representative),
    )
    update_rows(call.weights, call.tables, rows, groups.any_row, gradient, update)
    return found


def dense_backward(
    call: Lookup, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], indice_weights_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the tables [E], summed in float32 or wider and rounded once, and of the weights of the ids [N]."""
    values = _resolved(call, kept)
    by_bag = gradient_by_bag(call, grads)
    found = gradient_of_indice_weights(call, values, by_bag) if indice_weights_gradient else None
    by_value = gradient_by_value(call, values, by_bag).masked_fill(values.absent.unsqueeze(1), 0.0)
    dense = add_rows(call.weights, call.tables, values.rows, by_value)
    return dense.to(call.weights.values.dtype), found


def _resolved(call: Lookup, kept: tuple[Tensor, ...] = ()) -> Values:
    if not kept:
        return resolve_values(call.tables, call.indices, call.offsets, call.variable)
    feature, index, bag, absent = kept
    return Values(Rows(feature, index), bag, absent)
