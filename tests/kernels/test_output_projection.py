"""The output projection against torch's own linear in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tests.kernels.dense_cases import (
    assert_within_the_rule,
    gradients,
    implementations,
    in_float64,
    needs_cpp,
    random,
    with_threads,
)
from turbogr_plugin.kernels import explain
from turbogr_plugin.kernels.output_projection import output_projection

IMPLEMENTATIONS = implementations("output_projection")
SHAPES = [(9, 8, 8, True), (130, 25, 50, False), (17, 512, 64, True), (3, 64, 70, True), (1, 1, 1, False)]
"""Tokens, width of y, model dim, whether there is a bias."""


def _leaves(tokens: int, width: int, dim: int, bias: bool, dtype: torch.dtype) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(tokens, width), (dim, width), (tokens, dim), *([(dim,)] if bias else [])]
    return [random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def _call(leaves: list[Tensor], implementation: str | None = None) -> Tensor:
    y, weight, residual, *bias = leaves
    return output_projection(y, weight, residual, bias=bias[0] if bias else None, implementation=implementation)


def _truth(leaves: list[Tensor]) -> Tensor:
    y, weight, residual, *bias = leaves
    return residual + functional.linear(y, weight, bias[0] if bias else None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_in_float64_are_those_of_the_definition(shape: tuple[int, int, int, bool]) -> None:
    leaves = _leaves(*shape, torch.float64)
    found, expected = _call(leaves), _truth(leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients([found], leaves), gradients([expected], leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@needs_cpp("output_projection")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cpp_is_as_exact_as_the_reference(shape: tuple[int, int, int, bool]) -> None:
    leaves = _leaves(*shape, torch.float32)
    exact = in_float64(leaves)
    runs = [(_call(leaves, name), leaves) for name in ("cpu", "reference")] + [(_truth(exact), exact)]
    assert_within_the_rule(*([y, *gradients([y], x)] for y, x in runs), outputs=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_is_as_exact_as_the_chain_of_torchs_operators(dtype: torch.dtype) -> None:
    leaves = _leaves(60, 64, 40, True, dtype)
    exact = in_float64(leaves)
    runs = [(_call(leaves, "reference"), leaves), (_truth(leaves), leaves), (_truth(exact), exact)]
    assert_within_the_rule(*([y, *gradients([y], x)] for y, x in runs), outputs=1)


def test_gradients_pass_gradcheck_in_float64() -> None:
    leaves = _leaves(3, 4, 5, True, torch.float64)
    assert torch.autograd.gradcheck(lambda *leaves: _call(list(leaves)), leaves)


@needs_cpp("output_projection")
def test_results_are_the_same_bits_for_any_number_of_threads() -> None:
    def run() -> list[Tensor]:
        leaves = _leaves(1500, 24, 70, True, torch.float32)
        found = _call(leaves, "cpu")
        return [found, *gradients([found], leaves)]

    first, *others = with_threads(run)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_give_empty_outputs_and_zero_gradients(implementation: str) -> None:
    leaves = _leaves(0, 6, 4, True, torch.float32)
    found = _call(leaves, implementation)
    assert found.shape == (0, 4)
    for leaf, gradient in zip(leaves, torch.autograd.grad(found.sum(), leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_of_operands_and_gradients_change_nothing(implementation: str) -> None:
    y, weight, residual, bias = _leaves(140, 16, 24, True, torch.float32)
    expected = _call([y, weight, residual, bias], implementation)
    apart, across = torch.cat([y, y], 1)[:, :16], weight.t().contiguous().t()
    found = _call([apart, across, residual.t().contiguous().t(), bias], implementation)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    grad = torch.randn(24, 140, generator=torch.Generator().manual_seed(3)).t()
    got = torch.autograd.grad(found, [y, weight, bias], grad)
    want = torch.autograd.grad(expected, [y, weight, bias], grad.contiguous())
    for a, b in zip(got, want, strict=True):  # torch's matrix products differ by strides in their last bits
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_autocast_leaves_the_residual_as_it_is() -> None:
    leaves = _leaves(20, 32, 16, True, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = _call(leaves), _truth(leaves)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    found_gradients, expected_gradients = gradients([found], leaves), gradients([expected], leaves)
    for got, want in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("shape", [(5, 8, 4, True), (0, 3, 2, False)], ids=str)
def test_the_operators_pass_opcheck(shape: tuple[int, int, int, bool]) -> None:
    y, weight, residual, *bias = _leaves(*shape, torch.float32)
    arguments = (y, weight, bias[0] if bias else None, residual)
    torch.library.opcheck(torch.ops.turbogr.output_projection.default, arguments)
    detached = tuple(None if x is None else x.detach() for x in arguments)
    backward = torch.ops.turbogr.output_projection_backward.default
    torch.library.opcheck(backward, ([torch.ones(residual.shape)], [], *detached))


def test_a_compiled_graph_without_breaks_gives_the_same_bits() -> None:
    leaves = _leaves(14, 20, 6, True, torch.float32)
    compiled = torch.compile(lambda *leaves: _call(list(leaves)), fullgraph=True, backend="aot_eager")
    found, expected = compiled(*leaves), _call(leaves)
    assert torch.equal(found, expected)
    for got, want in zip(gradients([found], leaves), gradients([expected], leaves), strict=True):
        assert torch.equal(got, want)


def test_shapes_are_known_without_data() -> None:
    with FakeTensorMode():
        y = torch.empty(7, 8, requires_grad=True)
        found = output_projection(y, torch.empty(4, 8), torch.empty(7, 4))
        assert found.shape == (7, 4)
        assert torch.autograd.grad(found.sum(), y)[0].shape == y.shape


@needs_cpp("output_projection")
def test_explain_tells_who_serves_a_call() -> None:
    y, weight, residual = torch.ones(3, 8), torch.ones(4, 8), torch.ones(3, 4)
    assert explain(output_projection, y, weight, residual).implementation == "cpu"
    choice = explain(output_projection, y.double(), weight.double(), residual)
    assert choice.passed_over["cpu"] == "it serves float32 alone and y is torch.float64"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.ones(4, 2, 3)}, r"y must be \[T, I\] and weight \[D, I\].*\(4, 2, 3\) and \(10, 6\)"),
        ({"weight": torch.ones(10, 5)}, r"\(4, 6\) and \(10, 5\)"),
        ({"residual": torch.ones(4, 9)}, r"residual must be \[4, 10\], got \(4, 9\)"),
        ({"residual": torch.ones(4, 10).long()}, "residual must be of a floating-point type, got torch.int64"),
        ({"y": torch.ones(4, 6).double()}, "one floating-point type, got torch.float64 and torch.float32"),
        ({"bias": torch.ones(9)}, r"bias must be of shape \[10\], got \(9,\)"),
        ({"implementation": "triton"}, "'triton' cannot serve this call"),
        ({"residual": torch.ones(4, 10, device="meta")}, "residual must be on the device of y"),
    ],
    ids=str,
)
def test_bad_input_is_refused_with_what_was_given_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"y": torch.ones(4, 6), "weight": torch.ones(10, 6), "residual": torch.ones(4, 10)}
    with pytest.raises(ValueError, match=message):
        output_projection(**{**base, **changes})
