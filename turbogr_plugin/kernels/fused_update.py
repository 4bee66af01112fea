"""The update of touched rows: each one once, with the sum of its gradients, by the optimizer that fbgemm fuses.

Left out: the optimizers' formulas (fused_optimizers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr_plugin.kernels.coalesce_rows import Coalesced, coalesce, sum_by_row
from turbogr_plugin.kernels.fused_optimizers import Optimizer, RowShape, Settings, round_stochastically
from turbogr_plugin.kernels.table_bags import Values
from turbogr_plugin.kernels.table_pooling import Lookup, gradient_by_value
from turbogr_plugin.kernels.table_rows import (
    FlatTables,
    Rows,
    Tables,
    lookup_row_values,
    lookup_rows,
    store_row_values,
    store_rows,
)


@dataclass(frozen=True, kw_only=True)
class FusedUpdate:
    """What the backward pass does to the tables."""

    optimizer: Optimizer
    states: tuple[FlatTables, ...]
    settings: Settings
    max_gradient: float | None
    """Gradients of the output are clamped to this magnitude."""
    stochastic_rounding: bool
    """How tables in fp16 and bf16 are rounded."""


def update_rows(
    weights: FlatTables, tables: Tables, rows: Rows, groups: Coalesced, gradient: Tensor, update: FusedUpdate
) -> None:
    """Applies the optimizer to rows in place.

    Args:
        weights: the tables' weights.
        tables: their shapes.
        rows: [N] by place (see `Coalesced`): repeated rows bring equal gradients.
        groups: what `coalesce` returned.
        gradient: [N, max_D] float32 by place.
        update: optimizer, its states and settings.
    """
    columns = tables.columns(rows.feature)
    width: Tensor | int = tables.max_d
    if columns is not None:
        width = tables.widths.index_select(0, rows.feature).unsqueeze(1)
    old = lookup_rows(weights, tables, rows).to(torch.float32)
    kinds = update.optimizer.states + ("row",) * (len(update.states) - len(update.optimizer.states))
    states = [
        lookup_rows(state, tables, rows) if kind == "weight" else lookup_row_values(state, rows)
        for kind, state in zip(kinds, update.states, strict=True)
    ]
    states = [state.to(torch.float32) for state in states]
    new, new_states = update.optimizer.update(old, gradient, states, RowShape(columns, width), update.settings)
    if update.stochastic_rounding and weights.values.dtype != torch.float32:
        draw = torch.empty_like(new, dtype=torch.int32).random_().index_select(0, groups.place)
        if columns is not None:
            draw = draw.gather(1, tables.source_columns(rows.feature))
        new = round_stochastically(new, weights.values.dtype, draw)
    # where all ids are absent, every place stands for some row that must stay as it is
    store_rows(weights, tables, rows, torch.where(groups.any_row, new, old))
    for kind, state, old_values, new_values in zip(kinds, update.states, states, new_states, strict=True):
        kept = torch.where(groups.any_row, new_values, old_values)
        if kind == "weight":
            store_rows(state, tables, rows, kept)
        else:
            store_row_values(state, rows, kept)


def backward_lookup(call: Lookup, values: Values, by_bag: Tensor, update: FusedUpdate) -> None:
    """Sums the gradients of each row and applies the optimizer."""
    if values.absent.numel() == 0:
        return
    first_row = call.tables.first_row.index_select(0, values.rows.feature)
    groups = coalesce(first_row + values.rows.index, values.absent)
    gradient = sum_by_row(groups, gradient_by_value(call, values, by_bag, groups.order))
    rows = Rows(
        values.rows.feature.index_select(0, groups.representative),
        values.rows.index.index_select(0, groups.representative),
    )
    update_rows(call.weights, call.tables, rows, groups, gradient, update)
