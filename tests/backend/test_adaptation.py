from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turbogr_plugin.backend.adaptation import Adaptation, apply, fingerprint, lookup, undo

HOST = """
LIMIT = 3

def double(value):
    return 2 * value

def helper():
    return double(LIMIT)

class Machine:
    def run(self, value):
        return double(value)

    @classmethod
    def make(cls):
        return cls()

    @property
    def name(self):
        return "machine"
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module adapted_host, and adapted_importer that has imported a function from it."""
    (tmp_path / "adapted_host.py").write_text(HOST)
    (tmp_path / "adapted_importer.py").write_text("from adapted_host import double\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("adapted_host")
    for name in ("adapted_host", "adapted_importer"):
        sys.modules.pop(name, None)


def plus_one(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def replacement(*args: Any) -> int:
        return original(*args) + 1

    return replacement


def adaptation(target: str, replace: Callable[[Any], Any] = plus_one, **changed: Any) -> Adaptation:
    written_for = {target: fingerprint(lookup(target)[2])}
    fields = {"why": "w", "upstream": "u", "delete_when": "d", "written_for": written_for, **changed}
    return Adaptation(target=target, replace=replace, **fields)


def test_a_function_is_replaced_once_and_put_back(host: Any) -> None:
    wanted = adaptation("adapted_host:double")
    try:
        assert apply(wanted).status == "applied"
        assert (host.double(4), host.helper()) == (9, 7)
        assert apply(wanted).status == "already applied"
        assert host.double(4) == 9
    finally:
        undo(wanted)
    assert host.double(4) == 8
    undo(wanted)  # nothing to undo is no error
    assert host.double(4) == 8


def test_names_that_other_modules_have_imported_are_replaced_too(host: Any) -> None:
    importer = importlib.import_module("adapted_importer")
    wanted = adaptation("adapted_host:double", also=("adapted_importer:double",))
    try:
        apply(wanted)
        assert importer.double is host.double
        assert importer.double(1) == 3
    finally:
        undo(wanted)
    assert importer.double(1) == 2


def test_a_name_that_somebody_else_has_replaced_is_refused_and_nothing_changed(host: Any) -> None:
    importer = importlib.import_module("adapted_importer")
    importer.double = lambda value: -value
    outcome = apply(adaptation("adapted_host:double", also=("adapted_importer:double",)))
    assert (outcome.status, outcome.reason) == (
        "refused",
        "adapted_importer:double is not adapted_host:double: another package has replaced it",
    )
    assert (host.double(4), importer.double(4)) == (8, -4)


def test_a_host_whose_source_has_changed_is_refused_by_name(host: Any) -> None:
    outcome = apply(adaptation("adapted_host:double", written_for={"adapted_host:double": "0123456789abcdef"}))
    assert outcome.status == "refused"
    assert outcome.reason.startswith("adapted_host:double has fingerprint ")
    assert outcome.reason.endswith("written for 0123456789abcdef")
    assert host.double(4) == 8


def test_a_change_in_another_source_that_the_replacement_relies_on_is_refused(host: Any) -> None:
    expected = {name: fingerprint(lookup(name)[2]) for name in ("adapted_host:double", "adapted_host:helper")}
    host.helper = lambda: 0
    outcome = apply(adaptation("adapted_host:double", written_for=expected))
    assert outcome.status == "refused"
    assert "adapted_host:helper" in outcome.reason


@pytest.mark.parametrize("target", ["adapted_host:nothing", "adapted_host:Machine.nothing", "no_such_host:double"])
def test_a_place_that_is_not_there_is_refused_by_name(host: Any, target: str) -> None:
    wanted = Adaptation(
        target=target, replace=plus_one, why="w", upstream="u", delete_when="d", written_for={target: "0" * 16}
    )
    outcome = apply(wanted)
    assert (outcome.status, outcome.reason) == ("refused", f"{target} does not exist")


def test_a_method_a_class_method_and_a_property_are_what_their_class_defines(host: Any) -> None:
    assert lookup("adapted_host:Machine.run") == (host.Machine, "run", vars(host.Machine)["run"])
    for name in ("run", "make", "name"):
        assert len(fingerprint(lookup(f"adapted_host:Machine.{name}")[2])) == 16
    wanted = adaptation("adapted_host:Machine.run")
    try:
        apply(wanted)
        assert host.Machine().run(4) == 9
    finally:
        undo(wanted)
    assert host.Machine().run(4) == 8


def test_a_wrapped_function_has_the_fingerprint_of_what_it_wraps(host: Any) -> None:
    assert fingerprint(plus_one(host.double)) == fingerprint(host.double)
    assert fingerprint(host.LIMIT) != fingerprint(4)
