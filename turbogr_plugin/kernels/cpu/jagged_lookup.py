"""The lookup of a group of tables in C++ (csrc/jagged_lookup_forward.cpp, csrc/jagged_lookup_backward.cpp).

The backward pass sorts the positions by row once; then each row's gradients are summed and the row is updated at once,
by one thread. Results are the same bits for any number of threads, and but for the mean over a row in row-wise
Adagrad, those of the reference. Nothing is kept between forward and backward but the ids.

Left out: variable batch sizes, float64, optimizers that count or compare norms by row; the reference has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu.lookup_operands import (
    TABLE_DTYPES,
    extension,
    no_extension,
    refuses_count,
    refuses_dtypes,
    refuses_optimizer,
    rows_of,
    settings_of,
)
from turbogr_plugin.kernels.lookup_call import SEQUENCE, FusedUpdate, Lookup


def refuses(call: Lookup) -> str | None:
    """Why the C++ cannot serve this call; None: it can."""
    if call.variable is not None:
        return "it has no variable batch sizes"
    if not call.weights.values.is_contiguous():
        return "it reads one buffer without gaps"
    for block in call.blocks:
        if block.dtype not in TABLE_DTYPES:
            return f"it returns rows in {', '.join(map(str, TABLE_DTYPES))}, got {block.dtype}"
    return (
        refuses_dtypes("tables", [call.weights.values])
        or refuses_dtypes("ids and offsets", [call.indices, call.offsets], (torch.int32, torch.int64))
        or refuses_count(call.indices)
        or no_extension()
    )


def refuses_update(call: Lookup, update: FusedUpdate) -> str | None:
    """Why the C++ cannot update the tables of this call in the backward pass; None: it can."""
    states = [state.values for state in update.states]
    if not all(state.is_contiguous() for state in states):
        return "it reads one buffer without gaps"
    return refuses_optimizer(update.optimizer, update.settings) or refuses_dtypes("states", states, (torch.float32,))


def forward(call: Lookup) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The output of each block; nothing is kept."""
    ends = [block.end for block in call.blocks]
    dtypes = [block.dtype for block in call.blocks]
    return tuple(extension().forward(_tables(call), _ids(call), ends, dtypes)), ()


def fused_backward(
    call: Lookup,
    kept: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    update: FusedUpdate,
    indice_weights_gradient: bool,
) -> Tensor | None:
    """Updates the tables; returns the gradient of `indice_weights` [N] if it is wanted."""
    gradient = _gradient(call, grads, update.max_gradient)
    factors = _indice_weights_gradient(call, gradient) if indice_weights_gradient else None
    settings = settings_of(update.optimizer, update.settings, update.stochastic_rounding)
    states = [(state.values, state.begin) for state in update.states]
    extension().fused_backward(_tables(call), _ids(call), gradient, settings, states)
    return factors


def dense_backward(
    call: Lookup, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], indice_weights_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the flat buffer [E] and, if it is wanted, of `indice_weights` [N]."""
    gradient = _gradient(call, grads, None)
    factors = _indice_weights_gradient(call, gradient) if indice_weights_gradient else None
    return extension().dense_backward(_tables(call), _ids(call), gradient), factors


def _indice_weights_gradient(call: Lookup, gradient: tuple[Any, ...]) -> Tensor:
    assert call.indice_weights is not None
    wanted = call.feature_requires_grad
    features = [1] * call.tables.features if wanted is None else [int(value) for value in wanted.tolist()]
    found: Tensor = extension().indice_weights_gradient(_tables(call), _ids(call), gradient, features)
    return found.to(call.indice_weights.dtype)


def _tables(call: Lookup) -> tuple[Any, ...]:
    tables = call.tables
    shapes = (tables.d_offsets, tables.first_row, tables.total_d, tables.max_d)
    return call.weights.values.detach(), call.weights.begin, *shapes


def _ids(call: Lookup) -> tuple[Any, ...]:
    weights = call.indice_weights
    factors = None if weights is None else weights.detach().float().contiguous()
    return call.indices.contiguous(), call.offsets.contiguous(), call.pooling, factors


def _gradient(call: Lookup, grads: tuple[Tensor, ...], limit: float | None) -> tuple[Any, ...]:
    width = call.tables.max_d if call.pooling == SEQUENCE else call.tables.total_d
    return [rows_of(grad.reshape(-1, width)) for grad in grads], [block.end for block in call.blocks], limit
