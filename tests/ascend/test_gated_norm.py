"""Norm times gate with keyed dropout, lowered for Ascend and run on x86, against the plain PyTorch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ascend import execution
from tests.ascend.calls import LARGEST_ERROR, errors, norm_call
from turbogr_plugin.kernels.keyed_dropout import DropoutKey, keep_mask
from turbogr_plugin.kernels.reference import gated_norm as reference
from turbogr_plugin.kernels.triton import gated_norm

execution.install()

CASES: dict[str, dict[str, Any]] = {
    "layer norm with dropout in fp32": {"dtype": torch.float32, "tokens": 37, "width": 64, "norm": "layer", "p": 0.2},
    "layer norm with dropout in fp16": {"dtype": torch.float16, "tokens": 33, "width": 128, "norm": "layer", "p": 0.5},
    "layer norm with dropout in bf16": {"dtype": torch.bfloat16, "tokens": 9, "width": 512, "norm": "layer", "p": 0.2},
    "seed, step and layer of one": {
        "dtype": torch.bfloat16,
        "tokens": 5,
        "width": 64,
        "norm": "rms",
        "p": 0.2,
        "key": (1, 1, 1),
    },
    "rms norm of an odd width": {"dtype": torch.float32, "tokens": 37, "width": 50, "norm": "rms"},
    "group norm, groups that begin inside a word": {
        "dtype": torch.float32,
        "tokens": 21,
        "width": 75,
        "groups": 3,
        "norm": "group",
        "p": 0.3,
    },
    "group norm without weights": {
        "dtype": torch.bfloat16,
        "tokens": 1,
        "width": 128,
        "groups": 4,
        "norm": "group",
        "p": 0.9,
        "affine": False,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_gated_norm_agrees_with_the_reference(name: str) -> None:
    call = norm_call(**CASES[name])
    found = errors(gated_norm, reference, call)
    assert found.largest <= LARGEST_ERROR[call.x.dtype], found


@pytest.mark.parametrize(("width", "groups"), [(64, 1), (75, 3)])
def test_dropped_elements_are_those_of_the_keyed_mask_in_both_directions(width: int, groups: int) -> None:
    call = norm_call(torch.float32, 40, width, "group", groups=groups, p=0.4)
    assert call.samples is not None and call.positions is not None
    kept = keep_mask(DropoutKey(call.seed, call.step, call.samples, call.positions), call.layer, width, call.p)
    assert torch.equal(gated_norm.forward(call) != 0, kept)
    _, dgate, *_ = gated_norm.backward(torch.ones_like(call.x), call)
    assert torch.equal(dgate != 0, kept)
