"""An optimizer on given rows of a table, in C++ (csrc/jagged_lookup_update.cpp): each row once, by one thread."""

from __future__ import annotations

import torch

from turbogr_plugin.kernels.cpu.lookup_operands import (
    extension,
    no_extension,
    refuses_dtypes,
    refuses_optimizer,
    rows_of,
    settings_of,
)
from turbogr_plugin.kernels.lookup_call import UpdateCall


def refuses(call: UpdateCall) -> str | None:
    """Why the C++ cannot serve this call; None: it can."""
    if not all(tensor.is_contiguous() for tensor in (call.weights, *call.states)):
        return "it updates tables without gaps"
    return (
        refuses_dtypes("tables", [call.weights])
        or refuses_dtypes("gradients", [call.rows])
        or refuses_dtypes("states", call.states, (torch.float32,))
        or refuses_optimizer(call.optimizer, call.settings)
        or no_extension()
    )


def update(call: UpdateCall) -> None:
    """Changes weights and states in place."""
    settings = settings_of(call.optimizer, call.settings, call.stochastic_rounding)
    states = [state.detach() for state in call.states]
    rows = rows_of(call.rows.detach())
    extension().fused_update(call.weights.detach(), states, call.ids.contiguous(), rows, settings)
