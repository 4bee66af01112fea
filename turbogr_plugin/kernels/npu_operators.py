"""Registration of our kernels under the names of others' operators, for the `npu` dispatch keys.

fbgemm_gpu registers no PrivateUse1 kernel at all, so that on an NPU each of its operators is missing or falls back to
the CPU. The `fbgemm_*.py` modules beside this one hold the kernels, each in a tuple `KERNELS`; `aten_*.py` those for
operators of torch that torch_npu lacks.

Left out: schemas. They are the owners', and a kernel whose operator has another one than it was written for is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from turbogr_plugin.backend.adaptation import Outcome

_libraries: dict[str, torch.library.Library] = {}  # by namespace; a kernel lives as long as its library object
_registered: set[tuple[str, str]] = set()


@dataclass(frozen=True, kw_only=True)
class NpuKernel:
    """One kernel for one operator under one dispatch key."""

    schema: str
    """As fbgemm 1.8.0 or torch 2.13 has it, e.g. "fbgemm::invert_permute(Tensor permute) -> Tensor"."""
    function: Callable[..., Any]
    """Takes the schema's arguments."""
    key: Literal["PrivateUse1", "AutogradPrivateUse1"] = "PrivateUse1"
    """AutogradPrivateUse1 only where the operator's own autograd cannot be used or is missing."""

    @property
    def operator(self) -> str:
        """Qualified name, with its overload if it has one."""
        return self.schema.partition("(")[0]


def with_autograd(schema: str, function: Callable[..., Any]) -> tuple[NpuKernel, NpuKernel]:
    """One function of differentiable operators below autograd (reached in inference mode) and in place of it (else).

    fbgemm has autograd kernels for some operators under AutogradCPU and AutogradCUDA only, and for others none. Through
    a kernel under PrivateUse1 alone gradients flow only by a fallback of torch that warns that it will be removed.
    """
    return (
        NpuKernel(schema=schema, function=function),
        NpuKernel(schema=schema, function=function, key="AutogradPrivateUse1"),
    )


def register(kernels: Sequence[NpuKernel]) -> list[Outcome]:
    """Registers kernels, each once per process.

    fbgemm_gpu must have been imported: its shared libraries define its operators.

    Returns:
        One outcome per kernel; refused are an operator that is not there, one with another schema, and one for which
        another package has a kernel under the same key.
    """
    return [_register(kernel) for kernel in kernels]


def _register(kernel: NpuKernel) -> Outcome:
    name = f"{kernel.operator} [{kernel.key}]"
    if (kernel.operator, kernel.key) in _registered:
        return Outcome(name, "already applied", "kernel registered")
    qualified, _, overload = kernel.operator.partition(".")
    try:
        found = str(torch._C._get_schema(qualified, overload))
    except RuntimeError:
        return Outcome(name, "refused", "the installed packages define no such operator")
    if found != kernel.schema:
        return Outcome(name, "refused", f"its schema is {found}, the kernel was written for {kernel.schema}")
    if torch._C._dispatch_has_kernel_for_dispatch_key(kernel.operator, kernel.key):
        return Outcome(name, "refused", f"another package has registered a kernel under {kernel.key}")
    namespace, _, operator = kernel.operator.partition("::")
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    _libraries[namespace].impl(operator, kernel.function, kernel.key)
    _registered.add((kernel.operator, kernel.key))
    return Outcome(name, "applied", "kernel registered")
