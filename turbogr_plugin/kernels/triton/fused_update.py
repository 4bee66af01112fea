"""The update of touched rows in Triton: prepares a call and launches fused_update_kernels.py.

Left out: max_norm, Adam's bias correction by row, and the rarer optimizers; the reference serves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.fused_optimizers import DECOUPLED, DECOUPLED_GLOBAL, L2, Settings
from turbogr_plugin.kernels.lookup_call import StochasticRounding, UpdateCall
from turbogr_plugin.kernels.triton import row_tiles, targets
from turbogr_plugin.kernels.triton.attention_launch import last_dim_dense
from turbogr_plugin.kernels.triton.coalesce_rows import refuses_sizes

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
_DROPPED = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Bits of float32's mantissa that a table lacks."""


def refuses(call: UpdateCall) -> str | None:
    """Why Triton cannot serve this call: the device, a missing package, a dtype, a size, an optimizer."""
    reason = targets.refuses_device(call.weights.device.type)
    for tensor in (call.weights, call.rows, *call.states):
        reason = reason or targets.refuses_tensors(tensor)
    reason = reason or refuses_sizes(call.ids.numel(), call.weights.shape[1])
    rounded = call.stochastic_rounding is not None
    return reason or refuses_optimizer(call.optimizer, call.settings, call.weights.shape[1] if rounded else 0)


def refuses_optimizer(optimizer: str, settings: Settings, rounded_width: int) -> str | None:
    """Why an optimizer with these settings cannot be served; None if it can.

    Args:
        optimizer: its name.
        settings: its arguments.
        rounded_width: columns of the widest row that is rounded stochastically.
    """
    if optimizer not in OPTIMIZERS:
        return f"the optimizer {optimizer} is not one of {', '.join(OPTIMIZERS)}"
    if optimizer == "rowwise_adagrad" and settings.max_norm > 0.0:
        return f"max_norm = {settings.max_norm} of rowwise_adagrad"
    if optimizer == "adam" and settings.rowwise_bias_correction:
        return "rowwise_bias_correction of adam"
    if rounded_width > row_tiles.WIDEST_ROUNDED:
        return f"stochastic rounding of rows of {rounded_width} columns, more than {row_tiles.WIDEST_ROUNDED}"
    return None


def optimizer_arguments(
    optimizer: str, settings: Settings, rounding: StochasticRounding | None, weights: Tensor
) -> dict[str, Any]:
    """What `row_kernels.update_row` wants to know, by name.

    Args:
        optimizer: one of OPTIMIZERS.
        settings: its arguments.
        rounding: None: to nearest.
        weights: the tables, for their dtype and device.
    """
    rate = settings.learning_rate
    on_device = isinstance(rate, Tensor)
    decay = {L2: 1, DECOUPLED: 2, DECOUPLED_GLOBAL: 2}.get(settings.weight_decay_mode, 0)
    dropped = 0 if rounding is None else _DROPPED[weights.dtype]
    return {
        "Rate": rate.reshape(1).to(weights.device) if isinstance(rate, Tensor) else weights,
        "rate": 0.0 if isinstance(rate, Tensor) else float(rate),
        "eps": float(settings.eps),
        "beta1": float(settings.beta1),
        "beta2": float(settings.beta2),
        "correction1": 1.0 - settings.beta1**settings.iteration if optimizer == "adam" else 1.0,
        "correction2": 1.0 - settings.beta2**settings.iteration if optimizer == "adam" else 1.0,
        "weight_decay": float(settings.weight_decay),
        "seed": 0 if rounding is None else _signed(rounding.seed),
        "step": 0 if rounding is None else _signed(rounding.step),
        "OPTIMIZER": optimizer,
        "DECAY": decay if optimizer == "rowwise_adagrad" else 0,
        "RATE_ON_DEVICE": on_device,
        "DROPPED": dropped,
    }


def _signed(word: int) -> int:
    """The 32-bit integer with the bits of an unsigned one."""
    return word - (1 << 32) if word >= 1 << 31 else word


def update(call: UpdateCall) -> None:
    """Changes weights and states in place, each row of `ids` once."""
    count, width = call.rows.shape
    if count == 0 or call.weights.numel() == 0:
        return
    from turbogr_plugin.kernels.triton.fused_update_kernels import update_kernel

    target = targets.current_target(call.weights.device)
    rows = last_dim_dense(call.rows)
    states = (*call.states, call.weights, call.weights)[:2]  # what an optimizer does not have is not read
    update_kernel[(row_tiles.programs(target, width),)](
        Weights=call.weights,
        State0=states[0],
        State1=states[1],
        Ids=call.ids.contiguous(),
        RowGradients=rows,
        count=count,
        table_rows=call.weights.shape[0],
        width=width,
        weights_row=call.weights.stride(0),
        state0_row=states[0].stride(0),
        state1_row=states[1].stride(0),
        gradients_row=rows.stride(0),
        WIDTH=row_tiles.padded_width(width),
        **optimizer_arguments(call.optimizer, call.settings, call.stochastic_rounding, call.weights),
        **row_tiles.options(target, width),
    )
