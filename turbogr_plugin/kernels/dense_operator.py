"""Makes a family of dense operators into operators of torch: bodies that check and dispatch, shapes, autograd.

Gated norm and the two projections differ in their record of a call and in what they compute, not in how torch sees
them. Checks and dispatch are in the operators' bodies, so that a call through torch.ops or from a compiled graph takes
the same way.

Left out: second derivatives. Differentiating a gradient raises torch's error that the backward has no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.custom_operator import Gradients, Setup, define_operator


@dataclass(frozen=True)
class DenseFamily:
    """An operator, before torch knows it."""

    name: str
    """Of the operator in torch.ops.turbogr and of the modules that implement it."""
    record: Callable[..., Any]
    """Makes the record of a call from the operator's arguments."""
    fields: tuple[str, ...]
    """Of the record: the operator's arguments in their order."""
    arguments: str
    """The same as the arguments of a schema."""
    check_shapes: Callable[[Any], None]
    check_values: Callable[[Any], None]
    outputs: Callable[[Any], tuple[Tensor, ...]]
    """Uninitialised outputs of a call, first those that are differentiated, then those that are kept for backward."""
    kept: int
    """How many of them are only kept for backward."""
    differentiable: tuple[str, ...]
    """Arguments that get gradients, in the order in which `backward` of an implementation returns them.

    It takes the gradients of the outputs, then the kept outputs, then the record.
    """
    passed_through: str | None = None
    """An argument whose gradient is that of the first output, so that no operator need copy it."""


def define(family: DenseFamily, outputs: int) -> Any:
    """Defines torch.ops.turbogr.NAME and NAME_backward for every device; returns the first.

    Args:
        family: the operator.
        outputs: how many outputs it has, kept ones counted.
    """

    def call_of(arguments: tuple[Any, ...]) -> NamedTuple:
        call: NamedTuple = family.record(*arguments)
        family.check_shapes(call)
        return call

    def forward(*arguments: Any, implementation: str | None = None) -> Any:
        call = call_of(arguments)
        family.check_values(call)
        return dispatch.serve(family.name, call, implementation).forward(call)

    def forward_shape(*arguments: Any, implementation: str | None = None) -> Any:
        found = family.outputs(call_of(arguments))
        return found if outputs > 1 else found[0]

    def backward(
        grads: list[Tensor], kept: list[Tensor], *arguments: Any, implementation: str | None = None
    ) -> tuple[Tensor, ...]:
        call = call_of(arguments)
        family.check_values(call)
        _check_grads(grads, kept, family.outputs(_without_data(call)))
        found = dispatch.serve(family.name, call, implementation).backward(*grads, *kept, call)
        return tuple(grads[0].new_empty(0) if gradient is None else gradient for gradient in found)

    def backward_shape(
        grads: list[Tensor], kept: list[Tensor], *arguments: Any, implementation: str | None = None
    ) -> tuple[Tensor, ...]:
        call = call_of(arguments)
        inputs = (getattr(call, name) for name in family.differentiable)
        return tuple(grads[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)

    keywords = f"{family.arguments}, *, str? implementation=None"
    tensors = ", ".join(["Tensor"] * len(family.differentiable))
    schema = f"(Tensor[] grads, Tensor[] kept, {keywords}) -> ({tensors})"
    backward_operator = define_operator(f"{family.name}_backward", schema, backward, backward_shape)
    setup, gradients = _autograd(family, backward_operator)
    returned = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    schema = f"({keywords}) -> {returned}"
    return define_operator(family.name, schema, forward, forward_shape, setup=setup, gradients=gradients)


@overload
def autocast(beside: Tensor, operand: Tensor) -> Tensor: ...
@overload
def autocast(beside: Tensor, operand: Tensor | None) -> Tensor | None: ...
def autocast(beside: Tensor, operand: Tensor | None) -> Tensor | None:
    """An operand of a matrix product in the dtype that autocast, if it is on for the device of `beside`, wants."""
    device_type = beside.device.type
    if operand is None or not torch.is_autocast_enabled(device_type) or not operand.is_floating_point():
        return operand
    if operand.dtype == torch.float64:  # nor does torch touch it
        return operand
    return operand.to(torch.get_autocast_dtype(device_type))


def _autograd(family: DenseFamily, backward: Any) -> tuple[Setup, Gradients]:
    def setup(ctx: Any, arguments: tuple[Any, ...], implementation: str | None, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        kept = outputs[len(outputs) - family.kept :]
        # Zeros for the gradients of what is only kept would be as large as itself.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*kept, *(value if isinstance(value, Tensor) else None for value in arguments))
        ctx.others = tuple(None if isinstance(value, Tensor) else value for value in arguments)
        ctx.implementation = implementation

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, tensors = ctx.saved_tensors[: family.kept], ctx.saved_tensors[family.kept :]
        pairs = zip(tensors, ctx.others, strict=True)
        arguments = tuple(other if tensor is None else tensor for tensor, other in pairs)
        own = grads[: len(grads) - family.kept]
        if any(grad is None for grad in own):
            shapes = family.outputs(_without_data(family.record(*arguments)))
            device = arguments[0].device
            own = tuple(
                torch.zeros(shape.shape, dtype=shape.dtype, device=device) if grad is None else grad
                for grad, shape in zip(own, shapes, strict=False)
            )
        found = backward(list(own), list(kept), *arguments, implementation=ctx.implementation)
        by_name = dict(zip(family.differentiable, found, strict=True))
        if family.passed_through is not None:
            by_name[family.passed_through] = own[0]
        needs = ctx.needs_input_grad[1:]  # the first is the implementation
        return tuple(by_name[name] if needed else None for name, needed in zip(family.fields, needs, strict=True))

    return setup, gradients


def _without_data(call: Any) -> Any:
    """The call with its tensors on the meta device, to ask for shapes without allocating anything."""
    return call._replace(
        **{
            name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            for name, value in zip(call._fields, call, strict=True)
            if isinstance(value, Tensor)
        }
    )


def _check_grads(grads: list[Tensor], kept: list[Tensor], outputs: tuple[Tensor, ...]) -> None:
    if len(grads) + len(kept) != len(outputs):
        raise ValueError(
            f"grads and kept must be {len(outputs)} tensors like the outputs, got {len(grads)}, {len(kept)}"
        )
    for name, given, output in zip(
        ["grads"] * len(grads) + ["kept"] * len(kept), [*grads, *kept], outputs, strict=True
    ):
        if given.shape != output.shape or given.dtype != output.dtype:
            raise ValueError(
                f"{name} must be like the outputs, {output.dtype} of shape {tuple(output.shape)}; got {given.dtype} "
                f"of shape {tuple(given.shape)}"
            )
