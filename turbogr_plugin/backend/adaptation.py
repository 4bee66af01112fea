"""Adaptations: places of a host package that have no seam, replaced while the process runs.

Subclassing and registration come first; an adaptation is for what neither reaches. Each one is a record in a file of
its own that says what it replaces, why, where upstream has the line and when it can be deleted. It holds the
fingerprints of the sources that it was written against, so that a host that has moved on is refused by name instead of
being half replaced.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["applied", "already applied", "refused"]


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """One replaced attribute of a host package."""

    target: str
    """What is replaced, as "package.module:name" or "package.module:Class.name"."""
    replace: Callable[[Any], Any]
    """Makes the replacement from the original (a function as it stands in its class or module, wrappers included)."""
    why: str
    """What goes wrong without it, in one sentence."""
    upstream: str
    """Package, version, file and line of the place, or the upstream issue."""
    delete_when: str
    """What upstream has to do for this to become superfluous."""
    written_for: Mapping[str, str]
    """Fingerprint (see `fingerprint`) by target notation of each source that `replace` relies on, `target` included."""
    also: tuple[str, ...] = ()
    """Other names, in the same notation, that modules have bound to the same object by `from ... import`."""


@dataclass(frozen=True)
class Outcome:
    """What became of one adaptation or operator."""

    name: str
    status: Status
    reason: str
    """Why it is done if it was, why it was not if it was refused."""


_originals: dict[str, list[tuple[Any, str, Any]]] = {}
_lock = threading.RLock()


def fingerprint(value: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a function's or class's source, or of a plain value's repr."""
    function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    value = inspect.unwrap(function)
    has_source = inspect.isroutine(value) or inspect.isclass(value)
    text = textwrap.dedent(inspect.getsource(value)) if has_source else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lookup(target: str) -> tuple[Any, str, Any]:
    """The owner (module or class), the attribute's name, and what the owner itself defines under it.

    Raises:
        LookupError: the host has no such module, class or attribute.
    """
    module, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise LookupError(f"{target} does not exist") from error


def apply(adaptation: Adaptation) -> Outcome:
    """Replaces the target, once per process; refuses, changing nothing, where a source is not the expected one."""
    target = adaptation.target
    assert target in adaptation.written_for, target
    with _lock:
        if target in _originals:
            return Outcome(target, "already applied", adaptation.why)
        try:
            for source, expected in adaptation.written_for.items():
                found = fingerprint(lookup(source)[2])
                if found != expected:
                    return Outcome(
                        target, "refused", f"{source} has fingerprint {found}, this was written for {expected}"
                    )
            places = [lookup(name) for name in (target, *adaptation.also)]
        except LookupError as error:
            return Outcome(target, "refused", str(error))
        original = places[0][2]
        for name, (_, _, value) in zip(adaptation.also, places[1:], strict=True):
            if value is not original:
                return Outcome(target, "refused", f"{name} is not {target}: another package has replaced it")
        replacement = adaptation.replace(original)
        for owner, name, _ in places:
            setattr(owner, name, replacement)
        _originals[target] = places
        return Outcome(target, "applied", adaptation.why)


def undo(adaptation: Adaptation) -> None:
    """Puts the original back; for tests that compare a host with and without."""
    with _lock:
        for owner, name, value in _originals.pop(adaptation.target, []):
            setattr(owner, name, value)
