"""Which implementation an operator takes on a device type, and why.

The dispatcher is asked, in this process and after registration: what is told is what a call would get here. Whose code
is reached is listed in reached_operators.py; `turbogr doctor` asks for all of it.

Left out: what an implementation does with its arguments. One that is there may refuse a dtype, and says so when called.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType

import torch

from turbogr_plugin import kernels
from turbogr_plugin.kernels.npu_operators import NpuKernel

DEVICE_TYPES = MappingProxyType({"npu": "PrivateUse1", "cuda": "CUDA", "cpu": "CPU"})
"""Device types that can be asked for, with their dispatch key."""


@dataclass(frozen=True)
class Explanation:
    """What a call of an operator gets."""

    choice: str
    """"ours (kernels/NAME.py)", "fbgemm's", "another package's", or "none: " and what happens then."""
    reason: str


def explain_operator(name: str, device_type: str) -> Explanation:
    """Which implementation a call with tensors of that device type gets in this process.

    Args:
        name: qualified, as "fbgemm::jagged_to_padded_dense".
        device_type: one of DEVICE_TYPES; no device of it needs to be there.

    Raises:
        ValueError: another device type, or a name without a namespace.
    """
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"device_type must be one of {', '.join(DEVICE_TYPES)}, got {device_type!r}")
    if "::" not in name:
        raise ValueError(f"name must be qualified, as 'fbgemm::invert_permute', got {name!r}")
    if not _is_defined(name):
        return Explanation("none: not there", "the installed fbgemm_gpu defines no such operator")
    key = DEVICE_TYPES[device_type]
    if _has(name, key) or _has(name, f"Autograd{key}"):
        return _registered(name, device_type)
    if _has(name, "CompositeImplicitAutograd") or _has(name, "CompositeExplicitAutograd"):
        return Explanation("fbgemm's", "made of other operators, for every device type")
    if device_type == "npu" and name.endswith("_function_pt2"):
        return Explanation("none: refused", "fbgemm's autograd code takes tables on CPU, CUDA or MTIA only")
    if _has(name, "Autograd") and not _has(name, "CPU"):
        return Explanation("fbgemm's", "its autograd code, made of other operators, for every device type")
    if device_type == "npu" and _has(name, "CPU"):
        return Explanation("none: falls back to the CPU", "fbgemm_gpu has a kernel for the CPU, nobody one for npu")
    return Explanation("none: raises", f"no kernel is registered under {key}")


def _registered(name: str, device_type: str) -> Explanation:
    key = DEVICE_TYPES[device_type]
    under = " and ".join(one for one in (f"Autograd{key}", key) if _has(name, one))
    if device_type != "npu":  # fbgemm_gpu registers none for npu, we none for anything else
        return Explanation("fbgemm's", f"registered under {under}")
    module, refuses = _ours().get(name, (None, False))
    if module is None:
        return Explanation("another package's", f"registered under {under} by neither fbgemm_gpu nor this package")
    if refuses:
        return Explanation("none: refused", f"kernels/{module}.py raises and says why")
    return Explanation(f"ours (kernels/{module}.py)", f"registered under {under}")


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _is_defined(name: str) -> bool:
    qualified, _, overload = name.partition(".")
    try:
        torch._C._get_schema(qualified, overload)
    except RuntimeError:
        return False
    return True


@cache
def _ours() -> dict[str, tuple[str, bool]]:
    """Of our kernels, by operator: the module, and whether all that is there is a function named `refuse`."""
    found = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        if module.name.startswith(("aten_", "fbgemm_")):
            ours: tuple[NpuKernel, ...] = import_module(f"{kernels.__name__}.{module.name}").KERNELS
            found.update({kernel.operator: (module.name, kernel.function.__name__ == "refuse") for kernel in ours})
    return found
