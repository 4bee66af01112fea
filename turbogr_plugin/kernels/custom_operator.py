"""Defines operators of torch under torch.ops.turbogr: schema, body, shapes without data, and autograd.

torch.library.custom_op with register_autograd does the same. It fills in the defaults of a call argument by argument,
each time from a new list of the schema's arguments: 260 us for each forward of an operator of 20 arguments, several
times what all checks and the dispatch of it take. Here the defaults are those of a tuple.

Left out: second derivatives, transforms of torch.func, operators that write to their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

Setup = Callable[[Any, tuple[Any, ...], "str | None", Any], None]
"""(ctx, all positional arguments, implementation, output): keeps what the gradients need."""
Gradients = Callable[..., tuple[Tensor | None, ...]]
"""(ctx, *gradients of the outputs): a gradient or None for each positional argument."""


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("turbogr", "FRAGMENT")


def define_operator(
    name: str,
    schema: str,
    body: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    setup: Setup | None = None,
    gradients: Gradients | None = None,
) -> Any:
    """Defines torch.ops.turbogr.NAME for every device.

    Args:
        name: of the operator.
        schema: "(arguments, *, str? implementation=None) -> returns"; the last argument is the only one by keyword.
        body: takes the arguments, those left out with their defaults missing from the end.
        shapes: the same with tensors without data; returns outputs like those of `body`.
        setup: together with `gradients` makes the operator differentiable.
        gradients: see Gradients.

    Returns:
        The operator, to be called.
    """
    library = _library()
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    # A compiler that meets the operator outside of its graph must not look into its body.
    library.impl(name, _disable_dynamo(body), "CompositeExplicitAutograd")
    torch.library.register_fake(f"turbogr::{name}", shapes, lib=library)
    operator = getattr(torch.ops.turbogr, name).default
    library.impl(name, _autograd(operator, setup, gradients), "Autograd")
    return operator


def _autograd(operator: Any, setup: Setup | None, gradients: Gradients | None) -> Callable[..., Any]:
    """What the dispatcher calls above the body."""
    arguments = [argument for argument in operator._schema.arguments if not argument.kwarg_only]
    defaults = tuple(argument.default_value if argument.has_default_value() else None for argument in arguments)

    def below(*given: Any, implementation: str | None = None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*given, implementation=implementation)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, implementation: str | None, *given: Any) -> Any:
            output = below(*given, implementation=implementation)
            if setup is not None:
                setup(ctx, given, implementation, output)
            return tuple(output) if isinstance(output, list) else output  # autograd takes no lists apart

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if gradients is None:
                raise RuntimeError(f"{operator} has no formula of its derivative")
            return None, *gradients(ctx, *grads)

    def autograd(*given: Any, implementation: str | None = None) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, given)):
            raise RuntimeError(f"{operator} has no formula of its forward-mode derivative")
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*given):
            return Function.apply(implementation, *given, *defaults[len(given) :])
        return below(*given, implementation=implementation)

    return autograd


def _has_tangent(value: Any) -> bool:
    """Whether an argument carries a derivative of forward mode."""
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
