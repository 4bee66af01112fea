"""The update of some rows of a table in plain PyTorch: any device, every optimizer, no wait for the device."""

from __future__ import annotations

import torch

from turbogr_plugin.kernels.lookup_call import FusedUpdate, UpdateCall
from turbogr_plugin.kernels.reference.lookup_update import update_rows
from turbogr_plugin.kernels.segments import numbers_on
from turbogr_plugin.kernels.table_rows import FlatTables, Rows, Tables


def refuses(call: UpdateCall) -> str | None:
    """None: every call is served."""
    return None


def update(call: UpdateCall) -> None:
    """Changes weights and states in place."""
    height, width = call.weights.shape
    if call.ids.numel() == 0 or height == 0:
        return
    device = call.weights.device
    inside = (call.ids >= 0) & (call.ids < height)
    # What is outside becomes a copy of what is inside, which brings equal values to the same row: no wait is needed.
    position = torch.arange(call.ids.numel(), device=device)
    position = torch.where(inside, position, inside.to(torch.int32).argmax())
    index = call.ids.to(torch.int64).index_select(0, position).clamp(0, height - 1)
    dtype = torch.float64 if call.weights.dtype == torch.float64 else torch.float32
    gradient = call.rows.index_select(0, position).to(dtype)
    begin = torch.zeros(1, dtype=torch.int64, device=device)
    tables = Tables(
        numbers_on(device, [0, width], torch.int64), numbers_on(device, [0, height], torch.int64), width, width
    )
    fused = FusedUpdate(
        optimizer=call.optimizer,
        states=tuple(FlatTables(state.view(-1), begin) for state in call.states),
        settings=call.settings,
        stochastic_rounding=call.stochastic_rounding,
    )
    rows = Rows(torch.zeros_like(index), index)
    update_rows(FlatTables(call.weights.view(-1), begin), tables, rows, inside.any(), gradient, fused)
