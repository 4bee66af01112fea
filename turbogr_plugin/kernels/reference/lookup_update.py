"""The update of touched rows by the optimizers that fbgemm fuses, shared by `jagged_lookup` and `fused_update`.

Nothing here waits for the device. Rows may come more than once if they bring equal gradients.

Left out: the optimizers' formulas (fused_optimizers.py); which rows are touched (row_groups.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, RowShape, round_stochastically
from turbogr_plugin.kernels.keyed_random import Purpose, keyed_words
from turbogr_plugin.kernels.lookup_call import FusedUpdate, StochasticRounding
from turbogr_plugin.kernels.table_rows import (
    FlatTables,
    Rows,
    Tables,
    lookup_row_values,
    lookup_rows,
    store_row_values,
    store_rows,
)


def update_rows(
    weights: FlatTables, tables: Tables, rows: Rows, any_row: Tensor, gradient: Tensor, update: FusedUpdate
) -> None:
    """Applies the optimizer to rows in place.

    Args:
        weights: the tables' weights.
        tables: their shapes.
        rows: [N]; those that come more than once bring equal gradients.
        any_row: [] bool: whether there is a row at all; if not, all stays as it is.
        gradient: [N, max_D] float32 (float64 for tables in float64), the sum of each row.
        update: optimizer, its states and settings.
    """
    optimizer = OPTIMIZERS[update.optimizer]
    columns = tables.columns(rows.feature)
    width: Tensor | int = tables.max_d
    if columns is not None:
        width = tables.widths.index_select(0, rows.feature).unsqueeze(1)
    old = lookup_rows(weights, tables, rows).to(gradient.dtype)
    kinds = optimizer.states + ("row",) * (len(update.states) - len(optimizer.states))
    states = [
        lookup_rows(state, tables, rows) if kind == "weight" else lookup_row_values(state, rows)
        for kind, state in zip(kinds, update.states, strict=True)
    ]
    states = [state.to(gradient.dtype) for state in states]
    new, new_states = optimizer.update(old, gradient, states, RowShape(columns, width), update.settings)
    if update.stochastic_rounding is not None and weights.values.dtype in (torch.float16, torch.bfloat16):
        draw = _draws(update.stochastic_rounding, tables, rows)
        if columns is not None:
            draw = draw.gather(1, tables.source_columns(rows.feature))
        new = round_stochastically(new, weights.values.dtype, draw)
    # where all ids are absent, every row given stands for some row that must stay as it is
    store_rows(weights, tables, rows, torch.where(any_row, new, old))
    for kind, state, old_values, new_values in zip(kinds, update.states, states, new_states, strict=True):
        kept = torch.where(any_row, new_values, old_values)
        if kind == "weight":
            store_rows(state, tables, rows, kept)
        else:
            store_row_values(state, rows, kept)


def _draws(rounding: StochasticRounding, tables: Tables, rows: Rows) -> Tensor:
    """[N, max_D] int32: the random words of `StochasticRounding`, their lower 31 bits."""
    number = tables.first_row.index_select(0, rows.feature) + rows.index
    blocks = -(-tables.max_d // 4)
    words = keyed_words(
        Purpose.ROUNDING,
        seed=rounding.seed,
        step=rounding.step,
        samples=number.unsqueeze(1),
        lanes=0,
        blocks=torch.arange(blocks, device=number.device),
    )
    drawn = words.permute(1, 2, 0).reshape(number.numel(), 4 * blocks)[:, : tables.max_d]
    return torch.bitwise_and(drawn, 0x7FFFFFFF).to(torch.int32)
