"""Which implementation serves a call of an operator of ours, and why not a faster one.

Each family of operators has one module of the same name in each of `reference/` (plain PyTorch, every device), `cpu/`
(C++) and `triton/` (Ascend and CUDA), as far as they are written. They are asked from the fastest on, per call: one
that cannot serve says why, and the next is asked. A caller who names an implementation gets that one or a ValueError.

Left out: tuning by measurement. The order is fixed, so that the same call always runs the same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

REFERENCE = "reference"
FAMILIES = (
    *("jagged_attention", "fuxi_attention", "gated_norm", "uvqk_projection", "output_projection"),
    *("jagged_lookup", "jagged_unique", "coalesce_rows", "fused_update"),
)
"""Basenames of the modules of the operators that are dispatched here."""


@dataclass(frozen=True)
class Implementation:
    """One way in which operators are implemented."""

    name: str
    device_types: frozenset[str] | None
    """Where its tensors may be; None: anywhere."""

    def module(self, family: str) -> ModuleType | None:
        """Its module of a family of operators; None where it has none."""
        return _module(f"turbogr_plugin.kernels.{self.name}", family)


@cache
def _module(package: str, family: str) -> ModuleType | None:
    try:
        return import_module(f"{package}.{family}")
    except ModuleNotFoundError as error:
        if error.name in (package, f"{package}.{family}"):
            return None
        raise


IMPLEMENTATIONS = (
    Implementation("triton", frozenset({"cuda", "npu"})),
    Implementation("cpu", frozenset({"cpu"})),
    Implementation(REFERENCE, None),
)
"""From the fastest to the one that serves everything."""


class MissingTool(str):
    """A reason of `refuses` that holds for every call on this machine: a compiler or a package is missing.

    The first call that the user left open and that is served by something slower for it warns, once per process.
    """


@dataclass(frozen=True)
class Choice:
    """Who serves a call."""

    family: str
    implementation: str
    module: ModuleType = field(repr=False)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Faster implementations with the reason why they cannot serve the call."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Which paths the implementation takes on this machine; told by `explain`."""

    def __str__(self) -> str:
        how = ", ".join(f"{name} {value}" for name, value in self.details.items())
        reasons = "".join(f"; {name} was passed over: {reason}" for name, reason in self.passed_over.items())
        return f"{self.family}: {self.implementation}{f' ({how})' if how else ''}{reasons}"


def choose(
    family: str, call: NamedTuple, requested: str | None = None, also: Callable[[ModuleType], str | None] | None = None
) -> Choice:
    """The implementation that serves a call.

    Args:
        family: basename of the modules of the operator, such as "jagged_attention".
        call: its record; the device is that of its first tensor.
        requested: the name of an implementation; None: the fastest that can.
        also: asks a module that does not refuse the call itself for a reason why it cannot serve what goes with it.

    Raises:
        ValueError: the one requested is unknown or cannot serve this call.
    """
    names = [implementation.name for implementation in IMPLEMENTATIONS]
    if requested is not None and requested not in names:
        raise ValueError(f"implementation must be one of {', '.join(names)} or None, got {requested!r}")
    device_type = next(value.device.type for value in call if isinstance(value, Tensor))
    passed_over: dict[str, str] = {}
    for implementation in IMPLEMENTATIONS:
        if requested is not None and implementation.name != requested:
            continue
        module, reason = _served(implementation, family, call, device_type)
        if module is not None and reason is None and also is not None:
            reason = also(module)
        if module is not None and reason is None:
            return Choice(family, implementation.name, module, passed_over)
        if requested is not None:
            raise ValueError(f"implementation {requested!r} cannot serve this call of {family}: {reason}")
        # That C++ does not serve a GPU is no news; only what could have served this device is told.
        if reason is not None and (implementation.device_types is None or device_type in implementation.device_types):
            passed_over[implementation.name] = reason
    raise AssertionError(f"{family} has no reference implementation")


def _served(
    implementation: Implementation, family: str, call: NamedTuple, device_type: str
) -> tuple[ModuleType | None, str | None]:
    if implementation.device_types is not None and device_type not in implementation.device_types:
        known = ", ".join(sorted(implementation.device_types))
        return None, f"it serves tensors on {known}, these are on {device_type}"
    module = implementation.module(family)
    if module is None:
        return None, f"it has no {family}"
    return module, module.refuses(call)


_taken: dict[tuple[str, str, tuple[tuple[str, str], ...]], None] = {}
_warned: set[tuple[str, str]] = set()


def serve(
    family: str, call: NamedTuple, requested: str | None, also: Callable[[ModuleType], str | None] | None = None
) -> ModuleType:
    """The module that is to run a call: `choose`, kept for `taken`, with a warning where a tool is missing."""
    choice = choose(family, call, requested, also)
    if _explaining.get():
        raise _Chosen(choice)
    if choice.implementation == "cpu" and requested is None and not _builds(family):
        choice = choose(family, call, requested, also)  # the C++ refuses now, and says what failed
    _taken.setdefault((family, choice.implementation, tuple(choice.passed_over.items())))
    for name, reason in choice.passed_over.items():
        if isinstance(reason, MissingTool) and (name, reason) not in _warned:
            _warned.add((name, reason))
            warnings.warn(f"{family} runs as {choice.implementation}: {name} cannot serve here, {reason}", stacklevel=2)
    return choice.module


def _builds(family: str) -> bool:
    """Builds the C++ of a family where that has not been done; False if it fails."""
    from turbogr_plugin.kernels.cpu import build

    try:
        build.load(build.extension_of(family))
    except RuntimeError:
        return False
    return True


def taken() -> dict[str, list[dict[str, Any]]]:
    """What has run in this process, by family, as values for JSON.

    Returns:
        For each implementation that ran: its name, its details (see `details`), and the reasons for which faster ones
        were passed over.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for family, implementation, reasons in _taken:
        told = {"implementation": implementation, "details": dict(details(family, implementation))}
        found.setdefault(family, []).append({**told, "passed_over": dict(reasons)})
    return found


def details(family: str, implementation: str) -> Mapping[str, str]:
    """Which paths an implementation takes on this machine, such as the instructions its C++ was built for."""
    if implementation != "cpu":
        return {}
    from turbogr_plugin.kernels.cpu import build

    return build.describe(family)


class _Chosen(Exception):
    """Ends a call of `explain` before its implementation runs."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(str(choice))
        self.choice = choice


_explaining: ContextVar[bool] = ContextVar("_explaining", default=False)


def explain(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Which implementation a call of an operator takes, and why the faster ones are passed over.

    The call goes the whole way up to the implementation, which is not run, and nothing is built.

    Args:
        operator: a function of `turbogr_plugin.kernels` such as `hstu_attention`, or of torch.ops.turbogr.
        *args: what it is to be called with.
        **kwargs: the same.

    Raises:
        ValueError: arguments that the operator refuses.
        TypeError: `operator` came to its end without a dispatched operator of this package; so does every call with
            tensors that have no data (meta, FakeTensor).
    """
    token = _explaining.set(True)
    try:
        operator(*args, **kwargs)
    except _Chosen as chosen:
        return replace(chosen.choice, details=details(chosen.choice.family, chosen.choice.implementation))
    finally:
        _explaining.reset(token)
    raise TypeError(f"operator must be a dispatched operator of turbogr_plugin.kernels, got {operator!r}")
