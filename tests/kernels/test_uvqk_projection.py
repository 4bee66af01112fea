"""The uvqk projection against torch's own norm, linear and SiLU in float64."""

from __future__ import annotations

from dataclasses import dataclass
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
from turbogr_plugin.kernels.projection_call import ProjectionNorm, Recompute
from turbogr_plugin.kernels.uvqk_projection import uvqk_projection

IMPLEMENTATIONS = implementations("uvqk_projection")
RECOMPUTE: list[Recompute] = ["norm", "projection"]
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One call."""

    tokens: int
    dim: int
    widths: tuple[int, int, int, int]
    norm: ProjectionNorm = "layer"
    bias: bool = True
    norm_weight: bool = True
    norm_bias: bool = True

    def __str__(self) -> str:
        changed = [f"{k}={getattr(self, k)}" for k in ("norm", "bias", "norm_weight", "norm_bias")]
        return ",".join([f"{self.tokens}x{self.dim}", "-".join(map(str, self.widths)), *changed])

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        outputs = sum(self.widths)
        shapes = [(self.tokens, self.dim), (outputs, self.dim)]
        shapes += [(outputs,)] * self.bias + [(self.dim,)] * (self.norm_weight + self.norm_bias)  # type: ignore[list-item]
        leaves = [random(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
        leaves[1] = (leaves[1] * self.dim**-0.5).detach()  # products of order one, as a trained model has them
        return [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]

    def named(self, leaves: list[Tensor]) -> dict[str, Any]:
        x, weight, *others = leaves
        there = [name for name in ("bias", "norm_weight", "norm_bias") if getattr(self, name)]
        return {"x": x, "weight": weight, **dict(zip(there, others, strict=True))}

    def call(
        self, leaves: list[Tensor], recompute: Recompute = "norm", implementation: str | None = None
    ) -> tuple[Tensor, ...]:
        given = {**self.named(leaves), "norm": self.norm, "eps": EPS, "recompute": recompute}
        return uvqk_projection(**given, widths=self.widths, implementation=implementation)

    def truth(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        given = self.named(leaves)
        weight, bias = given.get("norm_weight"), given.get("norm_bias")
        if self.norm == "layer":
            normed = functional.layer_norm(given["x"], (self.dim,), weight, bias, EPS)
        else:
            normed = functional.rms_norm(given["x"], (self.dim,), weight, EPS)
            normed = normed if bias is None else normed + bias
        projected = functional.silu(functional.linear(normed, given["weight"], given.get("bias")))
        return projected.split(self.widths, 1)


CASES = [
    Case(9, 8, (8, 8, 8, 8)),
    Case(130, 25, (25, 25, 50, 50), bias=False),
    Case(17, 50, (150, 150, 20, 20), "rms", norm_bias=False),
    Case(7, 64, (64, 64, 64, 64), norm_weight=False, norm_bias=False),
    Case(20, 512, (130, 130, 65, 65)),
    Case(300, 6, (3, 0, 1, 2), "rms", norm_weight=False),
    Case(1, 33, (40, 40, 9, 9), bias=False),
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_in_float64_are_those_of_the_definition(case: Case, recompute: Recompute) -> None:
    leaves = case.leaves(torch.float64)
    found, expected = case.call(leaves, recompute), case.truth(leaves)
    for got, want in zip(found, expected, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    for got, want in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("case", [case for case in CASES if case.tokens > 1], ids=str)
@needs_cpp("uvqk_projection")
def test_the_cpp_is_as_exact_as_the_reference(case: Case, recompute: Recompute) -> None:
    leaves = case.leaves(torch.float32)
    exact = in_float64(leaves)
    runs = [(case.call(leaves, recompute, name), leaves) for name in ("cpu", "reference")]
    runs.append((case.truth(exact), exact))
    assert_within_the_rule(*([*y, *gradients(y, x)] for y, x in runs), outputs=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_is_as_exact_as_the_chain_of_torchs_operators(dtype: torch.dtype) -> None:
    case = Case(60, 64, (40, 40, 30, 30))
    leaves = case.leaves(dtype)
    exact = in_float64(leaves)
    runs = [(case.call(leaves, "projection", "reference"), leaves), (case.truth(leaves), leaves)]
    runs.append((case.truth(exact), exact))
    assert_within_the_rule(*([*y, *gradients(y, x)] for y, x in runs), outputs=4)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_gradients_pass_gradcheck_in_float64(recompute: Recompute) -> None:
    case = Case(3, 4, (2, 3, 1, 1))
    leaves = case.leaves(torch.float64)
    assert torch.autograd.gradcheck(lambda *leaves: case.call(list(leaves), recompute), leaves)


@needs_cpp("uvqk_projection")
def test_a_single_token_is_served() -> None:
    # Too few numbers for the rule: the rounding of one norm is in all of them.
    case = Case(1, 33, (40, 40, 9, 9))
    leaves = case.leaves(torch.float32)
    found, expected = case.call(leaves, "norm", "cpu"), case.truth(leaves)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for got, want in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_computed_again_is_the_same(implementation: str) -> None:
    case = Case(150, 32, (20, 20, 8, 8))
    leaves = case.leaves(torch.float32)
    kept, again = (case.call(leaves, recompute, implementation) for recompute in RECOMPUTE)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    for got, want in zip(gradients(again, leaves), gradients(kept, leaves), strict=True):
        assert torch.equal(got, want)


class _Kept:
    """Bytes that autograd holds for backward beside the leaves."""

    def __init__(self) -> None:
        self.elements = 0

    def pack(self, x: Tensor) -> Tensor:
        self.elements += 0 if x.is_leaf and x.requires_grad else x.numel()
        return x


@pytest.mark.parametrize(("recompute", "elements"), [("norm", 150 * 56), ("projection", 0)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_switch_decides_what_is_kept_for_backward(implementation: str, recompute: Recompute, elements: int) -> None:
    case = Case(150, 32, (20, 20, 8, 8))
    leaves, kept = case.leaves(torch.float32), _Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x):
        case.call(leaves, recompute, implementation)
    assert kept.elements == elements


def test_nothing_is_kept_where_there_will_be_no_backward() -> None:
    case = Case(5, 8, (8, 8, 8, 8))
    sizes: list[tuple[int, ...]] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.turbogr.uvqk_projection.default:
                sizes.append(tuple(result[4].shape))
            return result

    leaves = case.leaves(torch.float64)
    with Spy():
        case.call(leaves)
        case.call([leaf.detach() for leaf in leaves])
        with torch.no_grad():
            case.call(leaves)
    assert sizes == [(5, 32), (0, 0), (0, 0)]


@needs_cpp("uvqk_projection")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_results_are_the_same_bits_for_any_number_of_threads(recompute: Recompute) -> None:
    case = Case(1500, 24, (70, 70, 16, 16))  # more tokens than one chunk of the backward

    def run() -> list[Tensor]:
        leaves = case.leaves(torch.float32)
        found = case.call(leaves, recompute, "cpu")
        return [*found, *gradients(found, leaves)]

    first, *others = with_threads(run)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@needs_cpp("uvqk_projection")
def test_chunks_of_the_backward_add_up_to_the_whole() -> None:
    case = Case(3001, 16, (33, 33, 7, 7))
    leaves = case.leaves(torch.float32)
    exact = in_float64(leaves)
    runs = [(case.call(leaves, "norm", name), leaves) for name in ("cpu", "reference")] + [(case.truth(exact), exact)]
    assert_within_the_rule(*([*y, *gradients(y, x)] for y, x in runs), outputs=4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_give_empty_outputs_and_zero_gradients(implementation: str) -> None:
    case = Case(0, 12, (4, 4, 2, 2))
    leaves = case.leaves(torch.float32)
    found = case.call(leaves, "norm", implementation)
    assert [y.shape for y in found] == [(0, 4), (0, 4), (0, 2), (0, 2)]
    for leaf, gradient in zip(leaves, gradients(found, leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_part_that_nobody_uses_has_a_gradient_of_zero(implementation: str) -> None:
    case = Case(30, 8, (5, 4, 3, 2))
    leaves = case.leaves(torch.float32)
    _, _, q, _ = case.call(leaves, "norm", implementation)
    found = torch.autograd.grad(q.square().sum(), leaves)
    _, _, q, _ = case.truth(leaves)
    for got, want in zip(found, torch.autograd.grad(q.square().sum(), leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not found[1][:9].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_of_operands_and_gradients_change_nothing(implementation: str) -> None:
    case = Case(140, 16, (16, 16, 16, 16))
    x, weight, *others = case.leaves(torch.float32)
    expected = case.call([x, weight, *others], "norm", implementation)
    apart, across = torch.cat([x, x], 1)[:, :16], weight.t().contiguous().t()
    found = case.call([apart, across, *others], "norm", implementation)
    torch.testing.assert_close(found, expected)
    grads = [torch.randn(16, 140, generator=torch.Generator().manual_seed(3)) for _ in range(4)]
    got = torch.autograd.grad(found, [x, weight], [g.t() for g in grads])
    want = torch.autograd.grad(expected, [x, weight], [g.t().contiguous() for g in grads])
    for a, b in zip(got, want, strict=True):  # torch's matrix products differ by strides in their last bits
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [-1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_huge_negative_projection_is_switched_off(implementation: str, recompute: Recompute, value: float) -> None:
    case = Case(20, 32, (8, 8, 8, 8))
    leaves = case.leaves(torch.float32)
    with torch.no_grad():
        leaves[2][5] = value  # a bias
    found = case.call(leaves, recompute, implementation)
    assert bool((found[0][:, 5] == 0).all())
    weight_gradient = torch.autograd.grad([part.sum() for part in found], leaves[1])[0]
    assert bool((weight_gradient[5] == 0).all())
    assert bool(weight_gradient.isfinite().all())


def test_autocast_leaves_float64_alone() -> None:
    case = Case(20, 32, (8, 8, 8, 8))
    leaves = case.leaves(torch.float64)
    expected = case.call(leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = case.call(leaves)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == torch.float64
        assert torch.equal(got, want)


def test_autocast_sets_the_dtype_of_products_and_not_of_the_norm() -> None:
    case = Case(20, 32, (8, 8, 8, 8))
    leaves = case.leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = case.call(leaves)
        expected = case.truth(leaves)
    assert [y.dtype for y in found] == [torch.bfloat16] * 4
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    for leaf, gradient in zip(leaves, gradients(found, leaves), strict=True):
        assert gradient.dtype == leaf.dtype


@pytest.mark.parametrize("case", [Case(5, 8, (3, 3, 2, 2)), Case(4, 6, (2, 0, 1, 1), "rms", bias=False)], ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_operators_pass_opcheck(case: Case, recompute: Recompute) -> None:
    given = {"bias": None, "norm_weight": None, "norm_bias": None, **case.named(case.leaves(torch.float32))}
    tensors = [given[name] for name in ("x", "weight", "bias", "norm_weight", "norm_bias")]
    arguments = (list(case.widths), case.norm, EPS, recompute)
    torch.library.opcheck(torch.ops.turbogr.uvqk_projection.default, (*tensors, *arguments))
    detached = [None if x is None else x.detach() for x in tensors]
    *parts, kept = torch.ops.turbogr.uvqk_projection(*detached, *arguments)
    backward = torch.ops.turbogr.uvqk_projection_backward.default
    torch.library.opcheck(backward, ([torch.ones_like(y) for y in parts], [kept], *detached, *arguments))


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_compiled_graph_without_breaks_gives_the_same_bits(recompute: Recompute) -> None:
    case = Case(14, 20, (8, 8, 4, 4))
    leaves = case.leaves(torch.float32)
    compiled = torch.compile(lambda *leaves: case.call(list(leaves), recompute), fullgraph=True, backend="aot_eager")
    found, expected = compiled(*leaves), case.call(leaves, recompute)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for got, want in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        assert torch.equal(got, want)


def test_shapes_are_known_without_data() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(7, 8, requires_grad=True), torch.empty(12, 8, requires_grad=True)
        found = uvqk_projection(x, weight, [5, 4, 2, 1])
        assert [y.shape for y in found] == [(7, 5), (7, 4), (7, 2), (7, 1)]
        dx, dweight = torch.autograd.grad(found, [x, weight], [torch.empty_like(y) for y in found])
        assert (dx.shape, dweight.shape) == (x.shape, weight.shape)


@needs_cpp("uvqk_projection")
def test_explain_tells_who_serves_a_call() -> None:
    x, weight = torch.ones(3, 8), torch.ones(4, 8)
    assert explain(uvqk_projection, x, weight, [1, 1, 1, 1]).implementation == "cpu"
    choice = explain(uvqk_projection, x, weight.bfloat16(), [1, 1, 1, 1])
    assert choice.implementation == "reference"
    assert choice.passed_over["cpu"] == "it serves float32 alone and weight is torch.bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(4, 2, 3)}, r"x must be \[T, D\] and weight \[O, D\].*\(4, 2, 3\) and \(10, 6\)"),
        ({"weight": torch.ones(10, 5)}, r"\(4, 6\) and \(10, 5\)"),
        ({"weight": torch.ones(0, 6), "widths": [0, 0, 0, 0]}, "O >= 1"),
        ({"x": torch.ones(4, 6, dtype=torch.int64)}, "x must be of a floating-point type, got torch.int64"),
        ({"weight": torch.ones(10, 6, dtype=torch.int8)}, "weight must be of a floating-point type"),
        ({"bias": torch.ones(9)}, r"bias must be of shape \[10\], got \(9,\)"),
        ({"norm_weight": torch.ones(10)}, r"norm_weight must be of shape \[6\], got \(10,\)"),
        ({"norm_bias": torch.ones(6, 1)}, r"norm_bias must be of shape \[6\], got \(6, 1\)"),
        ({"widths": [4, 3, 2]}, r"widths must be those of u, v, q and k, together the 10 rows.*\[4, 3, 2\]"),
        ({"widths": [4, 3, 2, 2]}, r"together the 10 rows of weight; got \[4, 3, 2, 2\]"),
        ({"widths": [12, -2, 0, 0]}, "widths must be"),
        ({"norm": "group"}, "norm must be one of layer, rms, got 'group'"),
        ({"eps": float("nan")}, "eps must be at least 0, got nan"),
        ({"recompute": "nothing"}, "recompute must be one of norm, projection, got 'nothing'"),
        ({"implementation": "triton"}, "'triton' cannot serve this call"),
        ({"norm_weight": torch.ones(6, device="meta")}, "norm_weight must be on the device of x"),
    ],
    ids=str,
)
def test_bad_input_is_refused_with_what_was_given_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"x": torch.ones(4, 6), "weight": torch.ones(10, 6), "widths": [4, 3, 2, 1]}
    with pytest.raises(ValueError, match=message):
        uvqk_projection(**{**base, **changes})
