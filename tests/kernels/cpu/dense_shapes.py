"""Shapes at which the C++ of the dense operators takes its different ways: tiles, their borders, blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.kernels.dense_cases import gradients, random
from turbogr_plugin.kernels.gated_norm import gated_norm
from turbogr_plugin.kernels.keyed_dropout import DropoutKey
from turbogr_plugin.kernels.output_projection import output_projection
from turbogr_plugin.kernels.uvqk_projection import uvqk_projection

FAMILIES = ("gated_norm", "uvqk_projection", "output_projection")
TOKENS = (0, 1, 15, 128, 129, 1100)
WIDTHS = (1, 8, 25, 64, 130)


def run_all(family: str) -> int:
    """Calls a family forward and backward at every shape in C++; returns how many calls were made."""
    return sum(len(list(_results(family, n, width, "cpu"))) for n in TOKENS for width in WIDTHS)


def assert_like_the_reference(family: str) -> None:
    """Holds outputs and gradients in C++ to those of the reference at some shapes."""
    for tokens, width in ((15, 8), (129, 25), (300, 130)):
        pairs = zip(_results(family, tokens, width, "cpu"), _results(family, tokens, width, "reference"), strict=True)
        for found, expected in pairs:
            for got, want in zip(found, expected, strict=True):
                tolerance = 1e-4 if got.dtype == torch.float32 else 0.02
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            if family == "gated_norm":  # nothing is zero but by dropout
                assert torch.equal(found[0] == 0, expected[0] == 0)


def _results(family: str, tokens: int, width: int, implementation: str) -> Iterator[list[Tensor]]:
    """Outputs and gradients of each call of a family at one shape."""
    calls = {"gated_norm": _gated_norm, "uvqk_projection": _uvqk, "output_projection": _output}
    return calls[family](tokens, width, implementation)


def _gated_norm(tokens: int, width: int, implementation: str) -> Iterator[list[Tensor]]:
    ids = torch.arange(tokens)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for p in (0.0, 0.3):
            shapes = ((tokens, width), (tokens, width), (width,), (width,))
            x, gate, weight, bias = leaves = [random(*shape, seed=1, dtype=dtype) for shape in shapes]
            key = DropoutKey(1, 2, ids, ids)
            found = gated_norm(x, gate, weight, bias, dropout_key=key, p=p, implementation=implementation)
            yield [found, *gradients([found], leaves)]


def _uvqk(tokens: int, width: int, implementation: str) -> Iterator[list[Tensor]]:
    widths = [width, 0, 2 * width, 3]
    outputs = sum(widths)
    for recompute in ("norm", "projection"):
        shapes = ((tokens, width), (outputs, width), (outputs,), (width,))
        x, weight, bias, norm_weight = leaves = [random(*shape, seed=1, dtype=torch.float32) for shape in shapes]
        given = {"bias": bias, "norm_weight": norm_weight, "recompute": recompute, "implementation": implementation}
        found = list(uvqk_projection(x, weight, widths, **given))  # type: ignore[arg-type]
        yield [*found, *gradients(found, leaves)]


def _output(tokens: int, width: int, implementation: str) -> Iterator[list[Tensor]]:
    for dim in (width, 70):
        shapes = ((tokens, width), (dim, width), (dim,), (tokens, dim))
        y, weight, bias, residual = leaves = [random(*shape, seed=1, dtype=torch.float32) for shape in shapes]
        found = output_projection(y, weight, residual, bias=bias, implementation=implementation)
        yield [found, *gradients([found], leaves)]
