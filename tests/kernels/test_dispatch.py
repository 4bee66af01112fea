"""Who serves a call, why not a faster one, and that this is told as it is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from turbogr_plugin import kernels
from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.usual_calls import usual_calls

CPU = torch.device("cpu")


class Call(NamedTuple):
    number: int
    x: Tensor


CALL = Call(1, torch.zeros(1))
REFERENCE = SimpleNamespace(refuses=lambda call: None)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules of a made-up family by the name of the implementation; without an entry it has none."""
    found: dict[str, Any] = {"reference": REFERENCE}
    monkeypatch.setattr(dispatch.Implementation, "module", lambda self, family: found.get(self.name))
    monkeypatch.setattr(dispatch, "_taken", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    return found


def _refusing(reason: str) -> Any:
    return SimpleNamespace(refuses=lambda call: reason)


def test_the_fastest_that_serves_is_taken(modules: dict[str, Any]) -> None:
    modules["cpu"] = SimpleNamespace(refuses=lambda call: None)
    choice = dispatch.choose("family", CALL)
    assert (choice.implementation, choice.module, dict(choice.passed_over)) == ("cpu", modules["cpu"], {})


def test_one_that_refuses_is_passed_over_for_its_reason(modules: dict[str, Any]) -> None:
    modules["cpu"] = _refusing("dim 7")
    choice = dispatch.choose("family", CALL)
    assert (choice.implementation, dict(choice.passed_over)) == ("reference", {"cpu": "dim 7"})
    assert str(choice) == "family: reference; cpu was passed over: dim 7"


def test_one_that_has_no_such_family_is_passed_over(modules: dict[str, Any]) -> None:
    assert dict(dispatch.choose("family", CALL).passed_over) == {"cpu": "it has no family"}


@pytest.mark.parametrize("device", ["npu", "cuda", "meta"])
def test_only_those_of_the_device_are_asked(device: str, modules: dict[str, Any]) -> None:
    modules["triton"], modules["cpu"] = _refusing("no compiler"), _refusing("must not be asked")
    modules["reference"] = SimpleNamespace(refuses=lambda call: None)
    call: Any = (SimpleNamespace(), torch.empty(1, device="meta"))
    tensor = SimpleNamespace(device=SimpleNamespace(type=device))
    found = dispatch._served(dispatch.IMPLEMENTATIONS[1], "family", call, tensor.device.type)
    assert found == (None, f"it serves tensors on cpu, these are on {device}")
    wanted = "no compiler" if device != "meta" else "it serves tensors on cuda, npu, these are on meta"
    assert dispatch._served(dispatch.IMPLEMENTATIONS[0], "family", call, tensor.device.type)[1] == wanted
    assert dict(dispatch.choose("family", call).passed_over) == {}  # on meta, none is meant to serve


def test_a_requested_one_is_taken_or_refuses(modules: dict[str, Any]) -> None:
    assert dispatch.choose("family", CALL, "reference").implementation == "reference"
    with pytest.raises(ValueError, match="'cpu' cannot serve this call of family: it has no family"):
        dispatch.choose("family", CALL, "cpu")
    modules["cpu"] = _refusing("dim 7")
    with pytest.raises(ValueError, match="'cpu' cannot serve this call of family: dim 7"):
        dispatch.choose("family", CALL, "cpu")
    with pytest.raises(ValueError, match="one of triton, cpu, reference or None, got 'gpu'"):
        dispatch.choose("family", CALL, "gpu")


def test_a_missing_tool_is_warned_of_once_and_a_refused_call_is_not(modules: dict[str, Any]) -> None:
    modules["cpu"] = _refusing(dispatch.MissingTool("no compiler"))
    with pytest.warns(UserWarning, match="family runs as reference: cpu cannot serve here, no compiler"):
        assert dispatch.serve("family", CALL, None) is REFERENCE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.serve("family", CALL, None)
        dispatch.serve("another", CALL, None)
        dispatch.serve("family", CALL, "reference")
        modules["cpu"] = _refusing("dim 7")
        dispatch.serve("family", CALL, None)


def test_what_ran_is_kept_with_its_reasons_and_what_was_only_explained_is_not(modules: dict[str, Any]) -> None:
    dispatch.explain(dispatch.serve, "family", CALL, None)
    assert dispatch.taken() == {}
    dispatch.serve("family", CALL, None)
    dispatch.serve("family", CALL, None)
    dispatch.serve("family", CALL, "reference")
    told = dispatch.taken()
    assert json.loads(json.dumps(told)) == told
    ran = {"implementation": "reference", "details": {}}
    assert told == {"family": [{**ran, "passed_over": {"cpu": "it has no family"}}, {**ran, "passed_over": {}}]}


@pytest.mark.parametrize("name", usual_calls(CPU))
def test_what_is_explained_of_a_usual_call_is_what_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, ran = usual_calls(CPU)[name], []
    choose = dispatch.choose

    def watched(*args: Any) -> dispatch.Choice:
        ran.append(choose(*args))
        return ran[-1]

    monkeypatch.setattr(dispatch, "choose", watched)
    told = kernels.explain(call)
    call()
    assert [(choice.implementation, choice.passed_over) for choice in ran] == [
        (told.implementation, told.passed_over)
    ] * 2


def test_explain_runs_nothing_and_refuses_what_the_operator_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(3, 1, 2)
    offsets = torch.tensor([0, 3])
    reference = "turbogr_plugin.kernels.reference.jagged_attention"
    monkeypatch.setattr(f"{reference}.forward", lambda call: pytest.fail("was run"))
    chosen = kernels.explain(hstu_attention, q, q, q, offsets, alpha=1.0, scale=1.0, implementation="reference")
    assert (chosen.family, chosen.implementation) == ("jagged_attention", "reference")
    named = (q.double(), q.double(), q.double(), offsets, 1.0, 1.0)
    assert "cpu" in kernels.explain(torch.ops.turbogr.hstu_attention, *named).passed_over
    with pytest.raises(ValueError, match="offsets must run"):
        kernels.explain(hstu_attention, q, q, q, offsets + 1, alpha=1.0, scale=1.0)
    with pytest.raises(TypeError, match="operator must be a dispatched operator"):
        kernels.explain(torch.add, q, q)


def test_an_operator_works_after_it_was_explained() -> None:
    q = torch.ones(3, 1, 2, requires_grad=True)
    arguments: dict[str, Any] = {"alpha": 1.0, "scale": 1.0}
    kernels.explain(hstu_attention, q, q, q, torch.tensor([0, 3]), **arguments)
    hstu_attention(q, q, q, torch.tensor([0, 3]), **arguments).sum().backward()
    assert q.grad is not None


def test_another_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'explian'"):
        kernels.explian  # noqa: B018


def test_the_package_imports_no_torch_and_without_a_compiler_the_reference_serves_and_says_so(tmp_path: Any) -> None:
    program = """
import sys, warnings
from turbogr_plugin import kernels
assert "torch" not in sys.modules
import torch
from turbogr_plugin.kernels.jagged_attention import hstu_attention
q = torch.ones(3, 1, 2)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        hstu_attention(q, q, q, torch.tensor([0, 3]), alpha=1.0, scale=1.0)
print(len([w for w in told if "runs as reference: cpu cannot serve here" in str(w.message)]))
print(kernels.explain(hstu_attention, q, q, q, torch.tensor([0, 3]), alpha=1.0, scale=1.0))
"""
    environment = {**os.environ, "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    count, explained = run.stdout.splitlines() or ["", run.stderr]
    assert count == "1", run.stderr
    assert explained.startswith("jagged_attention: reference; cpu was passed over: ")
    assert "no-such-compiler" in explained


def test_every_family_named_is_there_with_a_reference() -> None:
    (reference,) = (one for one in dispatch.IMPLEMENTATIONS if one.name == dispatch.REFERENCE)
    families = {kernels.explain(call).family for call in usual_calls(CPU).values()}
    assert families == set(dispatch.FAMILIES)
    names = {
        "jagged_lookup": ("refuses_update", "forward", "fused_backward", "dense_backward"),
        "jagged_unique": ("unique",),
        "coalesce_rows": ("coalesce",),
        "fused_update": ("update",),
    }
    for family in dispatch.FAMILIES:
        module: Any = reference.module(family)
        functions: list[Callable[..., Any]] = [
            getattr(module, name) for name in ("refuses", *names.get(family, ("forward", "backward")))
        ]
        assert all(map(callable, functions))
