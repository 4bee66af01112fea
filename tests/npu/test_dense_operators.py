"""Gated norm and the projections on npu, against the reference on CPU, without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.dense_cases import random
from turbogr_plugin.kernels import explain
from turbogr_plugin.kernels.gated_norm import gated_norm
from turbogr_plugin.kernels.keyed_dropout import DropoutKey
from turbogr_plugin.kernels.output_projection import output_projection
from turbogr_plugin.kernels.uvqk_projection import uvqk_projection

TOKENS, WIDTH = 9, 12


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    token = torch.arange(TOKENS, device=x.device)
    key = DropoutKey(1, 2, (1 << 40) + token // 4, token % 4)
    given = {"norm": "group", "groups": 3, "dropout_key": key, "layer": 2, "p": 0.3}
    return [gated_norm(x, gate, weight, bias, **given, **options)]


def _uvqk(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    given = {"norm_weight": weight, "norm_bias": bias}
    return list(uvqk_projection(x, gate, [4, 2, 2, 1], **given, **options))


def _output(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    return [output_projection(x, gate, x[:, :TOKENS] * weight[:TOKENS], bias=bias[:TOKENS], **options)]


def _leaves() -> list[Tensor]:
    shapes = [(TOKENS, WIDTH), (TOKENS, WIDTH), (WIDTH,), (WIDTH,)]
    return [random(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (_gated_norm, {}),
        (_uvqk, {"recompute": "norm"}),
        (_uvqk, {"recompute": "projection", "norm": "rms"}),
        (_output, {}),
    ],
    ids=["gated norm", "uvqk", "uvqk computed again", "output"],
)
def test_outputs_and_gradients_are_those_on_cpu_without_a_wait(
    call: Callable[..., list[Tensor]], options: dict[str, Any], npu: ModuleType
) -> None:
    here = _leaves()
    there = [x.detach().to("npu").requires_grad_() for x in here]
    expected = call(*here, implementation="reference", **options)
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(5)) for y in expected]
    weights_there = [w.to("npu") for w in weights]
    npu.reset()
    found = call(*there, **options)
    found_gradients = torch.autograd.grad(found, there, weights_there)
    assert npu.counters().host_syncs == 0
    assert npu.races() == []
    expected_gradients = torch.autograd.grad(expected, here, weights)
    for got, want in zip([*found, *found_gradients], [*expected, *expected_gradients], strict=True):
        assert got.device.type == "npu"
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)


def test_the_reference_serves_where_torch_npu_and_triton_ascend_are_missing() -> None:
    x = torch.ones(2, 8, device="npu")
    assert explain(gated_norm, x, x).implementation == "reference"
    assert explain(uvqk_projection, x, x, [1, 1, 0, 0]).implementation == "reference"
