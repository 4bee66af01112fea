"""What the simulated npu has seen since the last `reset`: operators, copies, host synchronisations, races."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turbogr_plugin.simnpu.simulation import native

_MOST_LINES = 16
_HIDDEN = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/", "<")  # the slash: torchrec is to be seen
_places: list[_Place] = []
_index: dict[_Place, int] = {}


@dataclass(frozen=True)
class _Place:
    where: tuple[str, ...] = ()
    thread: str = ""


@dataclass(frozen=True)
class Counters:
    """How often data crossed the border of a device, and the host waited."""

    h2d: int
    """Copies from host to device."""
    d2h: int
    d2d: int
    """Copies within and between devices."""
    host_syncs: int


@dataclass(frozen=True)
class HostSync:
    """An operator, copy or call for which the host waited until the device was done."""

    operator: str
    """Overload name ("aten::_local_scalar_dense"), or what the program asked for ("stream synchronize")."""
    where: tuple[str, ...]
    """Python source lines "path:line in function", innermost first, without torch's; empty unless they are traced."""
    count: int
    thread: str = ""
    """Name of the Python thread that waited; empty unless sources are traced."""


@dataclass(frozen=True)
class Use:
    """One side of a race."""

    operator: str
    stream: str
    """ "npu:0 stream 1", or "host"."""
    bytes: int
    """Span of memory that was used."""
    writes: bool
    where: tuple[str, ...]
    """As in `HostSync`."""


@dataclass(frozen=True)
class Race:
    """Two uses of the same memory that nothing in the program has ordered, so that a real device may swap them."""

    kind: str
    """"read before write ended", "write before reader ended", "write before write ended", "buffer reused before its
    reader ended" or "... writer ended", "host read before copy ended", "host write before copy ended"."""
    detail: str
    """The whole report in one sentence."""
    earlier: Use
    later: Use
    count: int


def counters() -> Counters:
    """Copies and host synchronisations."""
    return Counters(*native().counters())


def executed() -> dict[str, int]:
    """Operators that ran by their CPU kernel on npu memory, by overload name ("aten::add.Tensor")."""
    return dict(native().executed())


def cpu_fallbacks() -> dict[str, int]:
    """Operators that torch_npu would run on the CPU, or "NAME (Double)" in a dtype that chips lack; policy "report"."""
    return dict(native().cpu_fallbacks())


def host_syncs() -> list[HostSync]:
    """Where the host waited for a device, by operator and place."""
    found = [(operator, _place(source), count) for operator, source, count in native().host_syncs()]
    return [HostSync(operator, place.where, count, place.thread) for operator, place, count in found]


def races() -> list[Race]:
    """Unordered uses of memory; none in a correct program."""
    return [_race(*values) for values in native().races()]


def check_streams(on: bool, *, by_thread: bool = False) -> None:
    """Turns the search for races on (as it is after loading) or off.

    Args:
        on: whether to look.
        by_thread: what a thread has waited for orders what it launches itself, and not what other threads launch, which
            may have been slower by luck. For programs whose threads order their work by streams and events; what one
            waits for in another's place is then a race. Threads of the autograd engine know what any thread does.
    """
    native().set_check_streams(on, by_thread)


def trace_sources(on: bool) -> None:
    """Keeps Python source lines of host synchronisations and races; costs a few microseconds per operator.

    Operators of a backward pass have none: they are launched by a thread of the autograd engine.
    """
    native().trace_sources(_capture if on else None)


def reset() -> None:
    """Sets all counts to zero and forgets races and synchronisations; what streams have done stays known."""
    native().reset()


def _place(source: int) -> _Place:
    return _places[source] if source >= 0 else _Place()


def _use(values: dict[str, Any]) -> Use:
    host = values["device"] < 0
    stream = "host" if host else f"npu:{values['device']} stream {values['stream']}"
    return Use(values["operator"], stream, values["bytes"], values["writes"], _place(values["source"]).where)


def _race(kind: str, earlier: dict[str, Any], later: dict[str, Any], block_bytes: int, count: int) -> Race:
    uses = _use(earlier), _use(later)
    told = [
        f"{use.operator} on {use.stream} {'writes' if use.writes else 'reads'} {use.bytes} bytes"
        + (f" ({use.where[0]})" if use.where else "")
        for use in uses
    ]
    detail = f"{kind}: {told[1]} of a block of {block_bytes}, not ordered after: {told[0]}"
    return Race(kind, detail, *uses, count)


def _capture() -> int:
    """Index of the source lines of the caller, called by the C++ part."""
    lines: list[str] = []
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None and len(lines) < _MOST_LINES:
        code = frame.f_code
        if not code.co_filename.startswith(_HIDDEN):
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    key = _Place(tuple(lines), threading.current_thread().name)
    # The GIL is held throughout, so no other thread comes between.
    if key not in _index:
        _index[key] = len(_places)
        _places.append(key)
    return _index[key]
