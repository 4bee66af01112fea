"""Registration of one function both below and above autograd.

fbgemm has autograd kernels for some operators under AutogradCPU and AutogradCUDA only, and for others none. Through a
kernel under PrivateUse1 alone gradients flow only by a fallback of torch that warns that it will be removed. A function
over differentiable operators serves both keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turbogr_plugin.kernels.npu_operators import NpuKernel


def with_autograd(schema: str, function: Callable[..., Any]) -> tuple[NpuKernel, NpuKernel]:
    """The kernel for PrivateUse1 (reached in inference mode) and for AutogradPrivateUse1 (reached else)."""
    return (
        NpuKernel(schema=schema, function=function),
        NpuKernel(schema=schema, function=function, key="AutogradPrivateUse1"),
    )
