"""fbgemm's table-batched embedding lookup with the optimizer fused into the backward pass, for `npu`.

fbgemm checks in C++, in the Autograd kernel itself, that the tables lie on CPU, CUDA or MTIA; the kernels behind it are
never reached from another device. These kernels therefore take the place of the whole operator, under
AutogradPrivateUse1, and under PrivateUse1 for inference mode, which has no autograd.

Everything is built from operators that torch_npu implements. Neither pass waits for the device: what decides a shape
is known on the host, and the number of different rows stays on the device (coalesce_rows.py). Every touched row is
updated once with the sum of its gradients, in the order of the batch. The lookup, the summing and the update are
`lookup_rows`, `coalesce` with `sum_by_row`, and `update_rows`; they work on any device.

A lookup that goes backward twice (retain_graph=True) updates twice, as upstream.

Left out, each refused by name: unified memory and caches, int8 and fp8 tables, int8 outputs, global weight decay,
sparse gradients (OptimType.NONE), row counters of Adagrad, and variable batch sizes without pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, Settings
from turbogr_plugin.kernels.fused_update import FusedUpdate, backward_lookup
from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.table_bags import Values, resolve_values
from turbogr_plugin.kernels.table_pooling import (
    Lookup,
    check_lookup,
    forward_lookup,
    gradient_by_bag,
    indice_weights_gradient,
    output_dtype,
    variable_batch,
)
from turbogr_plugin.kernels.table_rows import FlatTables, Rows, Tables


class _FusedLookup(torch.autograd.Function):
    """The tables are no inputs of the graph: the backward pass changes them, and other lookups may be under way."""

    @staticmethod
    def forward(
        ctx: Any,
        placeholder: Tensor,
        indice_weights: Tensor | None,
        output: Tensor | None,
        call: Lookup,
        update: FusedUpdate,
    ) -> Tensor:
        values = resolve_values(call.tables, call.indices, call.offsets, call.variable)
        ctx.call, ctx.update, ctx.has_output = call, update, output is not None
        ctx.save_for_backward(values.rows.feature, values.rows.index, values.bag, values.absent)
        if output is not None:
            assert call.variable is not None
            ctx.mark_dirty(output)
            # the node must not hold what it returns: they would keep each other alive
            ctx.call = replace(call, variable=replace(call.variable, output=None))
        return forward_lookup(call, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: Lookup = ctx.call
        update: FusedUpdate = ctx.update
        feature, index, bag, absent = ctx.saved_tensors
        values = Values(Rows(feature, index), bag, absent)
        gradient = output_gradient
        if update.max_gradient is not None:
            gradient = gradient.clamp(-update.max_gradient, update.max_gradient)
        by_bag = gradient_by_bag(call, gradient)
        weights_gradient = None
        if call.indice_weights is not None and ctx.needs_input_grad[1]:
            weights_gradient = indice_weights_gradient(call, values, by_bag).to(call.indice_weights.dtype)
        backward_lookup(call, values, by_bag, update)
        # groups of tables that share one output are chained by it: each passes the whole gradient on, as upstream
        return None, weights_gradient, output_gradient if ctx.has_output else None, None, None


def _flat(name: str, parts: list[Tensor]) -> FlatTables:
    """The one buffer of a list of fbgemm's: [host, placements, offsets] or [dev, uvm, placements, offsets, (cache)]."""
    if len(parts) == 3:
        return FlatTables(parts[0].detach(), parts[2])
    if parts[1].numel() or (len(parts) == 5 and parts[4].numel()):
        raise NotImplementedError(f"{name} lies in unified memory or behind a cache, which npu does not have")
    return FlatTables(parts[0].detach(), parts[3])


_UNIT = 4  # fbgemm's fused modules refuse a width that 4 does not divide (construct_split_state)

_FLOATS = {
    "sgd": (),
    "adagrad": ("eps",),
    "rowwise_adagrad": ("eps", "weight_decay", "max_norm"),
    "adam": ("eps", "beta1", "beta2", "weight_decay"),
    "partial_rowwise_adam": ("eps", "beta1", "beta2", "weight_decay"),
    "lamb": ("eps", "beta1", "beta2", "weight_decay"),
    "partial_rowwise_lamb": ("eps", "beta1", "beta2", "weight_decay"),
    "lars_sgd": ("eta", "momentum", "weight_decay"),
}
"""What optim_float holds, by optimizer (fbgemm_gpu 1.8.0, split_embedding_codegen_lookup_invokers/lookup_*.py)."""


def _lookup_of(given: Mapping[str, Any]) -> Lookup:
    bag_offsets, output_offsets, rank_offsets, _, _, _, own_offsets = given["aux_tensor"]
    tables = Tables(given["D_offsets"], given["hash_size_cumsum"], given["total_D"], given["max_D"], _UNIT)
    return Lookup(
        weights=_flat("weights", given["weights"]),
        tables=tables,
        indices=given["indices"],
        offsets=given["offsets"],
        pooling=given["pooling_mode"],
        indice_weights=given["indice_weights"],
        feature_requires_grad=given["feature_requires_grad"],
        output_dtype=output_dtype(given["output_dtype"]),
        variable=variable_batch(
            bag_offsets,
            rank_offsets,
            output_offsets,
            given["vbe_output_size"],
            tables.features,
            given["vbe_output"],
            own_offsets,
        ),
    )


def _update_of(optimizer: str, given: Mapping[str, Any]) -> FusedUpdate:
    _, _, _, apply_global_weight_decay, gradient_clipping, stochastic_rounding, _ = given["aux_bool"]
    if apply_global_weight_decay:
        raise NotImplementedError("global weight decay (WeightDecayMode.DECOUPLE_GLOBAL) is not supported on npu")
    states = [_flat(name, given[name]) for name in ("momentum1", "momentum2") if name in given]
    rowwise_bias_correction = any(given.get("optim_bool", ()))
    if rowwise_bias_correction:
        _, counter, _, _, counter_begin = given["optim_tensor"]
        states.append(FlatTables(counter.detach(), counter_begin))
    rate: Tensor = given["learning_rate_tensor"]
    settings = Settings(
        # fbgemm keeps the rate on the CPU; the value of the forward pass counts, as upstream
        learning_rate=float(rate) if rate.device.type == "cpu" else rate.clone(),
        iteration=given["aux_int"][0],
        weight_decay_mode=given["optim_int"][0] if "optim_int" in given else 0,
        rowwise_bias_correction=rowwise_bias_correction,
        **dict(zip(_FLOATS[optimizer], given.get("optim_float", ()), strict=True)),
    )
    return FusedUpdate(
        optimizer=OPTIMIZERS[optimizer],
        states=tuple(states),
        settings=settings,
        max_gradient=given["aux_float"][1] if gradient_clipping else None,
        stochastic_rounding=stochastic_rounding,
    )


def fused_lookup(optimizer: str, given: Mapping[str, Any]) -> Tensor:
    """fbgemm::split_embedding_codegen_lookup_<optimizer>_function_pt2 with its arguments by name.

    Raises:
        ValueError: shapes, dtypes or modes that do not fit together.
        NotImplementedError: see the module's docstring.
    """
    call = _lookup_of(given)
    check_lookup(call)
    update = _update_of(optimizer, given)
    output: Tensor = _FusedLookup.apply(
        given["placeholder_autograd_tensor"], call.indice_weights, given["vbe_output"], call, update
    )
    return output


_COMMON = (
    "(Tensor placeholder_autograd_tensor, Tensor[](a!) weights, Tensor D_offsets, SymInt total_D, SymInt max_D, "
    "Tensor hash_size_cumsum, int total_hash_size_bits, Tensor indices, Tensor offsets, int pooling_mode, "
    "Tensor? indice_weights, Tensor? feature_requires_grad, int output_dtype, Tensor?[](e!) aux_tensor, int[] aux_int, "
    "float[] aux_float, bool[] aux_bool, "
)
_MOMENTUM1, _MOMENTUM2 = "Tensor[](g!) momentum1, ", "Tensor[](j!) momentum2, "
_RATE = "Tensor learning_rate_tensor, "
_BATCH = "SymInt max_B=-1, SymInt max_B_feature_rank=-1, SymInt vbe_output_size=-1, Tensor? vbe_output=None) -> Tensor"
_OWN_ARGUMENTS = {
    "sgd": _RATE,
    "adagrad": _MOMENTUM1 + _RATE + "float[] optim_float, ",
    "rowwise_adagrad": _MOMENTUM1 + _RATE + "int[] optim_int, float[] optim_float, ",
    "adam": _MOMENTUM1 + _MOMENTUM2 + _RATE + "Tensor?[] optim_tensor, float[] optim_float, bool[] optim_bool, ",
    "partial_rowwise_adam": _MOMENTUM1 + _MOMENTUM2 + _RATE + "float[] optim_float, ",
    "lamb": _MOMENTUM1 + _MOMENTUM2 + _RATE + "float[] optim_float, ",
    "partial_rowwise_lamb": _MOMENTUM1 + _MOMENTUM2 + _RATE + "float[] optim_float, ",
    "lars_sgd": _MOMENTUM1 + _RATE + "float[] optim_float, ",
}
_REFUSED = {
    "none": "int[] optim_int, SymInt total_unique_indices=0, ",
    "rowwise_adagrad_with_counter": _MOMENTUM1
    + "Tensor[](m!) prev_iter, Tensor[](p!) row_counter, "
    + _RATE
    + "int[] optim_int, float[] optim_float, ",
}


def _schema(optimizer: str, own_arguments: str) -> str:
    return f"fbgemm::split_embedding_codegen_lookup_{optimizer}_function_pt2{_COMMON}{own_arguments}{_BATCH}"


def operator_function(optimizer: str) -> Callable[..., Tensor]:
    """The kernel of one optimizer: takes the operator's arguments by position, by name, or left at their defaults."""
    parameters = torch._C.parse_schema(_schema(optimizer, _OWN_ARGUMENTS[optimizer])).arguments
    names = [parameter.name for parameter in parameters]
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}

    def lookup(*args: Any, **kwargs: Any) -> Tensor:
        return fused_lookup(optimizer, defaults | dict(zip(names, args, strict=False)) | kwargs)

    return lookup


def _refusal(optimizer: str) -> Callable[..., Tensor]:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(
            f"the fused optimizer {optimizer} is not supported on npu, only {', '.join(sorted(OPTIMIZERS))}"
        )

    return refuse


KERNELS = (
    *(
        NpuKernel(schema=_schema(name, own), function=operator_function(name), key=key)
        for name, own in _OWN_ARGUMENTS.items()
        for key in ("AutogradPrivateUse1", "PrivateUse1")
    ),
    *(
        NpuKernel(schema=_schema(name, own), function=_refusal(name), key=key)
        for name, own in _REFUSED.items()
        for key in ("AutogradPrivateUse1", "PrivateUse1")
    ),
)
