"""Loading the simulated npu into this process, and the rules it enforces.

PrivateUse1 can be named once per process, and torch_npu names it too: `load` refuses where torch_npu is imported.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch.utils import backend_registration

from turbogr_plugin.simnpu import build, operators, process_group

Policy = Literal["strict", "report", "permissive"]

SOC_FAMILY = "910B"
"""Whose missing dtypes are enforced; the device calls itself a simulated chip of this family."""

# Beside what operators.py lists: factories, and what concatenates. They write values that no arithmetic made.
_MAKES_DATA = frozenset(
    [
        *("aten::arange.out", "aten::arange.start_out", "aten::eye.out", "aten::eye.m_out", "aten::full.out"),
        *("aten::ones.out", "aten::zeros.out", "aten::_foreach_zero_", "aten::repeat", "aten::index_select.out"),
        *("aten::split_with_sizes_copy.out", "aten::_chunk_cat", "aten::_chunk_cat.out"),
    ]
)

_native: ModuleType | None = None
_loaded_with = (0, 0)  # devices, bytes of each


def is_loaded() -> bool:
    """Whether this process has the simulated npu."""
    return _native is not None


def native() -> Any:
    """The C++ part.

    Raises:
        RuntimeError: it is not loaded.
    """
    if _native is None:
        raise RuntimeError("the simulated npu is not loaded in this process: call turbogr_plugin.simnpu.load() first")
    return _native


def load(*, devices: int = 8, policy: Policy = "strict", memory: int = 64 << 30) -> None:
    """Makes `npu` a device of this process: torch.device("npu"), torch.npu, torch.accelerator, the backend `hccl`.

    The C++ part is built on first use and cached. Calling it again only sets the policy.

    Args:
        devices: how many there are, 1 to 64.
        policy: see `set_policy`.
        memory: bytes per device; an allocation beyond it raises torch.OutOfMemoryError.

    Raises:
        RuntimeError: torch_npu is imported, or another backend has taken PrivateUse1; there is no compiler; it is
            loaded already with other devices; a backward pass has run in this process.
        ValueError: an argument out of range.
    """
    global _native, _loaded_with
    _check_policy(policy)
    if not 1 <= devices <= 64:
        raise ValueError(f"devices must be 1 to 64, got {devices}")
    if memory < 1:
        raise ValueError(f"memory must be a positive number of bytes, got {memory}")
    if _native is not None:
        if (devices, memory) != _loaded_with:
            raise RuntimeError(
                f"the simulated npu is loaded with {_loaded_with[0]} devices of {_loaded_with[1]} bytes and cannot be "
                f"changed to {devices} devices of {memory} bytes"
            )
        set_policy(policy)
        return
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "torch_npu is imported in this process, so `npu` is the real device. The simulated one needs a process of "
            "its own, started with TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone" or hasattr(torch, "npu"):
        raise RuntimeError(f"this process has the backend {taken!r} already: the simulated npu needs one without it")
    module = build.extension("turbogr_simnpu", build.DEVICE_SOURCES)
    module.initialize(devices, memory)
    backend_registration.rename_privateuse1_backend("npu")
    module.register_kernels(sorted(name for name in operators.torch_npu_operators() if name.startswith("aten::")))
    module.set_missing_dtypes(sorted(operators.LACKING_DTYPES[SOC_FAMILY], key=str))
    module.set_any_dtype(sorted(operators.ANY_DTYPE | _MAKES_DATA))
    _native, _loaded_with = module, (devices, memory)
    set_policy(policy)
    from turbogr_plugin.simnpu import device_module

    torch._register_device_module("npu", device_module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    process_group.register()
    _print_on_the_host()
    _check_backward()


def _check_backward() -> None:
    """torch counts devices at a process's first backward pass: those that come later die of an internal assertion."""
    nothing = torch.empty(0, device="npu", requires_grad=True)  # takes no memory
    try:
        nothing.backward(torch.empty(0, device="npu"))
    except RuntimeError as error:
        raise RuntimeError(
            "a backward pass has run in this process, and torch gives no autograd to devices that come after it: call "
            "turbogr_plugin.simnpu.load() before"
        ) from error
    native().reset()


def _print_on_the_host() -> None:
    """Printing takes a tensor to the host first: torch formats numbers with float64 arithmetic on their own device."""
    original = torch._tensor_str._tensor_str

    @functools.wraps(original)
    def from_host(tensor: torch.Tensor, indent: int) -> str:
        return original(tensor.cpu() if tensor.device.type == "npu" else tensor, indent)

    torch._tensor_str._tensor_str = from_host


def set_policy(policy: Policy) -> None:
    """What happens to an operator without a kernel in torch_npu, and to arithmetic in a dtype that chips lack.

    Args:
        policy: "strict": NotImplementedError that names it. "report": it runs by its CPU kernel, as with torch_npu's
            fallback, and is counted in `cpu_fallbacks`. "permissive": it runs, nothing is counted.

    Raises:
        ValueError: another policy.
    """
    _check_policy(policy)
    native().set_policy(policy)


def _check_policy(policy: str) -> None:
    if policy not in get_args(Policy):
        raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}, got {policy!r}")
