"""Makes an attention family into operators of torch: bodies that check and dispatch, shapes without data, autograd.

HSTU and FuXi attention differ in their record of a call and in what they compute, not in how torch sees them. Checks
and dispatch are in the operators' bodies, so that a call through torch.ops or from a compiled graph takes the same way.

Left out: second derivatives. Differentiating a gradient raises torch's error that the backward has no formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.attention_call import AttentionCall, FuxiAttentionCall, check_shapes, check_values
from turbogr_plugin.kernels.custom_operator import Gradients, Setup, define_operator
from turbogr_plugin.kernels.relative_bias import time_borders

MASK_ARGUMENTS = "Tensor? num_targets=None, Tensor? num_contextual=None, SymInt? window=None, SymInt full_tail=0"
BIAS_ARGUMENTS = (
    "Tensor? timestamps=None, Tensor? query_timestamps=None, Tensor? time_bias=None, Tensor? time_borders=None, "
    "Tensor? position_bias=None, SymInt[]? host_offsets=None, bool time_gradient=True, bool position_gradient=True"
)
CALL_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor offsets, float alpha, float scale, bool causal=True, "
    f"{MASK_ARGUMENTS}, {BIAS_ARGUMENTS}"
)
"""The fields of HSTUAttentionCall, with which those of FuxiAttentionCall begin."""


@dataclass(frozen=True)
class AttentionFamily:
    """An attention operator, before torch knows it."""

    name: str
    """Of the operator, in torch.ops.turbogr."""
    module: str
    """Basename of the modules that implement it."""
    record: type[AttentionCall]
    arguments: str
    """The schema's arguments: the fields of `record`."""
    channels: int
    """The output is [T, H, channels * E]."""

    def shapes(self, arguments: tuple[Any, ...]) -> AttentionCall:
        """The record of a call without its data, borders of buckets as given; raises ValueError."""
        call = self.record(*arguments)
        decay = call.time_decay if isinstance(call, FuxiAttentionCall) else None
        if call.time_bias is None and decay is None:
            call = call._replace(timestamps=None, query_timestamps=None)
        elif call.query_timestamps is None:
            call = call._replace(query_timestamps=call.timestamps)
        check_shapes(call)
        return call

    def call(self, arguments: tuple[Any, ...]) -> AttentionCall:
        """The complete record of a call; raises ValueError."""
        call = self.shapes(arguments)
        check_values(call)
        if call.time_bias is not None and call.time_borders is None:
            call = call._replace(time_borders=time_borders(call.time_bias.shape[-1], call.q.device))
        return call


def contextual_of_all_rows(count: int, offsets: Tensor) -> Tensor | None:
    """The number of contextual tokens of each row, [B], where all rows have `count`; None where they have none."""
    return torch.full((offsets.numel() - 1,), count, device=offsets.device) if count else None


def define(family: AttentionFamily) -> None:
    """Defines torch.ops.turbogr.NAME and NAME_backward for every device."""

    def forward(*arguments: Any, implementation: str | None = None) -> Tensor:
        call = family.call(arguments)
        return cast("Tensor", dispatch.serve(family.module, call, implementation).forward(call))

    def forward_shape(*arguments: Any, implementation: str | None = None) -> Tensor:
        call = family.shapes(arguments)
        tokens, heads, dim = call.v.shape
        return call.v.new_empty(tokens, heads, family.channels * dim)

    def backward(grad: Tensor, *arguments: Any, implementation: str | None = None) -> tuple[Tensor, ...]:
        call = family.call(arguments)
        _check_grad(grad, call, family.channels)
        found = dispatch.serve(family.module, call, implementation).backward(grad, call)
        return tuple(grad.new_empty(0) if gradient is None else gradient for gradient in found)

    def backward_shape(grad: Tensor, *arguments: Any, implementation: str | None = None) -> tuple[Tensor, ...]:
        call = family.shapes(arguments)
        _check_grad(grad, call, family.channels)
        time = _time_table(call) if call.time_gradient else None
        position = call.position_bias if call.position_gradient else None
        inputs = (call.q, call.k, call.v, *(grad.new_empty(0) if x is None else x for x in (time, position)))
        return tuple(x.new_empty(x.shape) for x in inputs)

    keywords = "*, str? implementation=None"
    name, returned = f"{family.name}_backward", "(Tensor, Tensor, Tensor, Tensor, Tensor)"
    schema = f"(Tensor grad, {family.arguments}, {keywords}) -> {returned}"
    backward_op = define_operator(name, schema, backward, backward_shape)
    setup, gradients = _autograd(family, backward_op)
    schema = f"({family.arguments}, {keywords}) -> Tensor"
    define_operator(family.name, schema, forward, forward_shape, setup=setup, gradients=gradients)


def _autograd(family: AttentionFamily, backward: Any) -> tuple[Setup, Gradients]:
    fields = family.record._fields
    differentiable = ("q", "k", "v", "time_bias", "position_bias", "time_decay")

    def setup(ctx: Any, arguments: tuple[Any, ...], implementation: str | None, output: Tensor) -> None:
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in arguments))
        ctx.others = tuple(None if isinstance(value, Tensor) else value for value in arguments)
        ctx.implementation = implementation

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values = (other if saved is None else saved for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True))
        needed = {name for name, needs in zip(fields, ctx.needs_input_grad[1:], strict=True) if needs}
        call = family.record(*values)._replace(
            time_gradient=not needed.isdisjoint(("time_bias", "time_decay")),
            position_gradient="position_bias" in needed,
        )
        dq, dk, dv, time, position = backward(grad.contiguous(), *call, implementation=ctx.implementation)
        found = dict(zip(differentiable, (dq, dk, dv, time, position, time), strict=True))
        return tuple(found[name] if name in needed else None for name in fields)

    return setup, gradients


def _time_table(call: AttentionCall) -> Tensor | None:
    if isinstance(call, FuxiAttentionCall) and call.time_decay is not None:
        return call.time_decay
    return call.time_bias


def _check_grad(grad: Tensor, call: AttentionCall, channels: int) -> None:
    tokens, heads, dim = call.v.shape
    if grad.shape != (tokens, heads, channels * dim) or grad.dtype != call.v.dtype:
        raise ValueError(
            f"grad must be like the output, {call.v.dtype} of shape {(tokens, heads, channels * dim)}; got "
            f"{grad.dtype} of shape {tuple(grad.shape)}"
        )
