"""The comparison with the reference sees what it is there for: kernels with a fault planted in their source fail it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.ascend import execution
from tests.ascend.calls import LARGEST_ERROR, errors, fuxi_call, hstu_call, norm_call
from tests.ascend.lookup_calls import copied, gradients, lookup_call, new_update
from turbogr_plugin.kernels.lookup_call import SUM, StochasticRounding
from turbogr_plugin.kernels.reference import fuxi_attention as fuxi_reference
from turbogr_plugin.kernels.reference import gated_norm as norm_reference
from turbogr_plugin.kernels.reference import jagged_attention as hstu_reference
from turbogr_plugin.kernels.reference import jagged_lookup as lookup_reference
from turbogr_plugin.kernels.triton import (
    fuxi_attention,
    fuxi_attention_kernels,
    gated_norm,
    gated_norm_kernels,
    jagged_attention,
    jagged_attention_kernels,
    jagged_lookup,
    jagged_lookup_kernels,
)

execution.install()

_HSTU = (jagged_attention, hstu_reference, jagged_attention_kernels)
_FUXI = (fuxi_attention, fuxi_reference, fuxi_attention_kernels)
_NORM = (gated_norm, norm_reference, gated_norm_kernels)

# What is planted: (family, text in the source, what stands in its place, direction that it spoils).
FAULTS: dict[str, tuple[tuple[ModuleType, ModuleType, ModuleType], str, str, str]] = {
    "forward mask missing": (
        _HSTU,
        "tl.where(allowed, scores / (1.0 + tl.exp(-scores)), 0.0)",
        "scores / (1.0 + tl.exp(-scores))",
        "forward",
    ),
    "another head's table": (_HSTU, "PositionTable + head * position_head", "PositionTable", "forward"),
    "query and key swapped": (_HSTU, "tl.dot(grad, tl.trans(v)", "tl.dot(v, tl.trans(grad)", "backward"),
    "backward mask missing": (_HSTU, "of_heads = tl.where(allowed, of_heads, 0.0)", "", "backward"),
    "channels swapped": (_FUXI, "Channels + 2 * E, positional", "Channels + 2 * E, temporal", "forward"),
    "mean not taken off": (
        _NORM,
        "normalised(x, there, width, eps, CENTERED)",
        "normalised(x, there, width, eps, False)",
        "forward",
    ),
}


def _call(family: ModuleType) -> Any:
    if family is gated_norm:
        return norm_call(torch.float32, 9, 64, "layer", p=0.2)
    arguments = {"lengths": (0, 5, 33, 1), "per_head": True, "targets": True, "buckets": 8}
    return fuxi_call(torch.float32, **arguments) if family is fuxi_attention else hstu_call(torch.float32, **arguments)


def _with_fault(kernels: ModuleType, text: str, fault: str, folder: Path) -> ModuleType:
    source = Path(str(kernels.__file__)).read_text()
    assert text in source, f"the kernels have changed: {text!r} is no longer in {kernels.__name__}"
    path = folder / "faulty.py"
    path.write_text(source.replace(text, fault))
    spec = importlib.util.spec_from_file_location(f"faulty_{folder.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plant(kernels: ModuleType, text: str, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = _with_fault(kernels, text, fault, folder)
    monkeypatch.setitem(sys.modules, kernels.__name__, faulty)
    monkeypatch.setattr(sys.modules[kernels.__package__ or ""], kernels.__name__.rpartition(".")[2], faulty)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (family, reference, kernels), text, fault, direction = FAULTS[name]
    _plant(kernels, text, fault, tmp_path, monkeypatch)
    found = errors(family, reference, _call(family), backward=direction == "backward")
    spoiled = found.forward if direction == "forward" else max(found.gradients)
    assert spoiled > 100 * LARGEST_ERROR[torch.float32], found


# In the lookup, whose results are equal to the reference's and not only near them.
LOOKUP_FAULTS = {
    "ids too large read": ("& (index < rows) & (ahead", "& (ahead", "forward"),
    "another table": ("multiple_of(table + tl", "multiple_of(tl", "forward"),
    "draws of another row": ("tl.load(FirstRow + feature) + index", "index", "backward"),
    "gradients left out": ("    end = tl.load(Begins + segment + 1)", "    end = begin + 1", "backward"),
}


@pytest.mark.parametrize("name", LOOKUP_FAULTS)
def test_a_fault_planted_in_the_lookup_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, fault, direction = LOOKUP_FAULTS[name]
    _plant(jagged_lookup_kernels, text, fault, tmp_path, monkeypatch)
    call = lookup_call(SUM, dtype=torch.bfloat16)
    update = new_update(call, "sgd", rounding=StochasticRounding(1, 2))
    ours, theirs = copied(call, update), copied(call, update)
    (out,), (expected,) = jagged_lookup.forward(call)[0], lookup_reference.forward(call)[0]
    grads = gradients(call, torch.Generator().manual_seed(0), exact=False)
    jagged_lookup.fused_backward(ours[0], (), grads, ours[1], False)
    lookup_reference.fused_backward(theirs[0], (), grads, theirs[1], False)
    assert torch.equal(out, expected) == (direction != "forward")
    assert torch.equal(ours[0].weights.values, theirs[0].weights.values) == (direction != "backward")
