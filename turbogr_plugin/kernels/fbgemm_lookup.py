"""fbgemm's table-batched embedding lookup with the optimizer fused into the backward pass, for `npu`.

fbgemm checks in C++, in the Autograd kernel itself, that the tables lie on CPU, CUDA or MTIA; the kernels behind it are
never reached from another device. These kernels therefore take the place of the whole operator, under
AutogradPrivateUse1, and under PrivateUse1 for inference mode, which has no autograd.

What runs is the family jagged_lookup: Triton where it serves the call, else the reference, which is built from
operators that torch_npu implements. Neither pass waits for the device: what decides a shape is known on the host, and
the number of different rows stays on the device. Every touched row is updated once with the sum of its gradients, in
the order of the batch.

Stochastic rounding of tables in fp16 and bf16 (`stochastic_rounding`, on by default in fbgemm's modules) is keyed (see
lookup_call.StochasticRounding). fbgemm hands over no seed, and a step with Adam and LAMB only. The seed is therefore a
checksum of the sizes of the group of tables, the step otherwise the number of training lookups of this group so far:
replicas of a group, which make the same lookups, round alike whatever their rank, and a run that is started again draws
what it drew before. A run that goes on from a checkpoint may count anew, which repeats draws, not what they round.

Left out, each refused by name: unified memory and caches, int8 and fp8 tables, int8 outputs, global weight decay,
sparse gradients (OptimType.NONE), row counters of Adagrad, and variable batch sizes without pooling.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from turbogr_plugin.kernels import lookup_autograd
from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, Settings
from turbogr_plugin.kernels.lookup_call import FusedUpdate, Lookup, StochasticRounding
from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.table_pooling import check_lookup, output_dtype, variable_batch
from turbogr_plugin.kernels.table_rows import FlatTables, Tables


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


_lookups_of_groups = WeakTensorKeyDictionary()  # by the flat buffer of their weights: how many in training


def _rounding(given: Mapping[str, Any]) -> StochasticRounding | None:
    """The key of this lookup's update; None for tables that are not rounded, and where no update will come."""
    weights: Tensor = given["weights"][0]
    if weights.dtype not in (torch.float16, torch.bfloat16) or not torch.is_grad_enabled():
        return None
    step = given["aux_int"][0]
    if step == 0:
        step = _lookups_of_groups[weights] = _lookups_of_groups.get(weights, 0) + 1
    sizes = (weights.numel(), given["D_offsets"].numel(), given["total_D"], given["max_D"])
    return StochasticRounding(zlib.crc32(repr(tuple(map(int, sizes))).encode()), step & 0xFFFFFFFF)


def _update_of(optimizer: str, given: Mapping[str, Any]) -> FusedUpdate:
    _, _, _, apply_global_weight_decay, gradient_clipping, stochastic_rounding, _ = given["aux_bool"]
    if apply_global_weight_decay:
        raise NotImplementedError(
            "global weight decay (WeightDecayMode.DECOUPLE_GLOBAL) is not supported by our lookup"
        )
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
        optimizer=optimizer,
        states=tuple(states),
        settings=settings,
        max_gradient=given["aux_float"][1] if gradient_clipping else None,
        stochastic_rounding=_rounding(given) if stochastic_rounding else None,
    )


def fused_lookup(optimizer: str, given: Mapping[str, Any], implementation: str | None = None) -> Tensor:
    """fbgemm::split_embedding_codegen_lookup_<optimizer>_function_pt2 with its arguments by name.

    Args:
        optimizer: a name of OPTIMIZERS.
        given: all arguments.
        implementation: reference, cpu or triton; None: the fastest that serves the call.

    Raises:
        ValueError: shapes, dtypes or modes that do not fit together.
        NotImplementedError: see the module's docstring.
    """
    call = _lookup_of(given)
    check_lookup(call)
    (output,) = lookup_autograd.fused_lookup(
        call,
        _update_of(optimizer, given),
        placeholder=given["placeholder_autograd_tensor"],
        implementation=implementation,
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


def operator_function(optimizer: str, implementation: str | None = None) -> Callable[..., Tensor]:
    """The kernel of one optimizer: takes the operator's arguments by position, by name, or left at their defaults."""
    parameters = torch._C.parse_schema(_schema(optimizer, _OWN_ARGUMENTS[optimizer])).arguments
    names = [parameter.name for parameter in parameters]
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}

    def lookup(*args: Any, **kwargs: Any) -> Tensor:
        return fused_lookup(optimizer, defaults | dict(zip(names, args, strict=False)) | kwargs, implementation)

    return lookup


def _refusal(optimizer: str) -> Callable[..., Tensor]:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(
            f"the fused optimizer {optimizer} is not supported by our lookup, only {', '.join(sorted(OPTIMIZERS))}"
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
