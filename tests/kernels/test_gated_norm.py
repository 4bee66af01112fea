"""Gated norm against torch's own norms in float64 times gate times keyed dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from turbogr_plugin.kernels.gated_norm import gated_norm
from turbogr_plugin.kernels.gated_norm_call import Norm
from turbogr_plugin.kernels.keyed_dropout import DropoutKey, keep_mask, keyed_dropout

IMPLEMENTATIONS = implementations("gated_norm")
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One call; `p` = 0: without a key."""

    tokens: int
    width: int
    norm: Norm = "layer"
    groups: int = 1
    weight: bool = True
    bias: bool = True
    p: float = 0.2
    seed: int = 0

    def __str__(self) -> str:
        changed = [
            f"{k}={v}" for k, v in vars(self).items() if k not in Case.__annotations__ or v != getattr(Case, k, v)
        ]
        return ",".join([f"{self.tokens}x{self.width}", *changed])

    def key(self) -> DropoutKey:
        token = torch.arange(self.tokens)
        return DropoutKey(7, 11, (1 << 40) + token // 3, token % 3)

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        x = [random(self.tokens, self.width, seed=self.seed + i, dtype=dtype) for i in range(2)]
        parameters = [random(self.width, seed=self.seed + 2 + i, dtype=dtype) for i in range(self.weight + self.bias)]
        return [*x, *parameters]

    def named(self, leaves: list[Tensor]) -> dict[str, Tensor | None]:
        x, gate, *parameters = leaves
        weight = parameters.pop(0) if self.weight else None
        return {"x": x, "gate": gate, "weight": weight, "bias": parameters.pop(0) if self.bias else None}

    def arguments(self) -> dict[str, Any]:
        drops = {"dropout_key": self.key(), "layer": 3, "p": self.p} if self.p else {}
        return {"norm": self.norm, "groups": self.groups, "eps": EPS, **drops}

    def call(self, leaves: list[Tensor], implementation: str | None = None) -> Tensor:
        tensors: dict[str, Any] = self.named(leaves)
        return gated_norm(**tensors, **self.arguments(), implementation=implementation)

    def truth(self, leaves: list[Tensor]) -> Tensor:
        given = self.named(leaves)
        x, gate, weight, bias = given["x"], given["gate"], given["weight"], given["bias"]
        assert x is not None
        assert gate is not None
        if self.norm == "rms":
            normed = functional.rms_norm(x, (self.width,), weight, EPS)
            normed = normed if bias is None else normed + bias
        elif self.norm == "layer":
            normed = functional.layer_norm(x, (self.width,), weight, bias, EPS)
        else:
            normed = functional.group_norm(x, self.groups, weight, bias, EPS)
        return keyed_dropout(normed * gate, self.key(), layer=3, p=self.p) if self.p else normed * gate


CASES = [
    Case(9, 8),
    Case(7, 25, weight=False),
    Case(7, 25, bias=False, p=0),
    Case(6, 50, "rms", bias=False),
    Case(6, 50, "rms", p=0.7),
    Case(5, 512, "group", groups=8),
    Case(5, 64, "group", groups=2, weight=False, bias=False),
    Case(1, 1),
    Case(70, 6, "group", groups=1, p=0.5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_in_float64_are_those_of_the_definition(case: Case) -> None:
    leaves = case.leaves(torch.float64)
    found, expected = case.call(leaves), case.truth(leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients([found], leaves), gradients([expected], leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.width > 1], ids=str)
@needs_cpp("gated_norm")
def test_the_cpp_is_as_exact_as_the_reference(case: Case, dtype: torch.dtype) -> None:
    leaves = case.leaves(dtype)
    exact = in_float64(leaves)
    runs = [(case.call(leaves, name), leaves) for name in ("cpu", "reference")] + [(case.truth(exact), exact)]
    assert_within_the_rule(*([y, *gradients([y], x)] for y, x in runs), outputs=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_is_as_exact_as_the_chain_of_torchs_operators(dtype: torch.dtype) -> None:
    case = Case(40, 64)
    leaves = case.leaves(dtype)
    exact = in_float64(leaves)
    runs = [(case.call(leaves, "reference"), leaves), (case.truth(leaves), leaves), (case.truth(exact), exact)]
    assert_within_the_rule(*([y, *gradients([y], x)] for y, x in runs), outputs=1)


@pytest.mark.parametrize("case", [Case(3, 5), Case(2, 6, "rms", bias=False), Case(2, 6, "group", 2, p=0)], ids=str)
def test_gradients_pass_gradcheck_in_float64(case: Case) -> None:
    leaves = case.leaves(torch.float64)
    assert torch.autograd.gradcheck(lambda *leaves: case.call(list(leaves)), leaves)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.999, 1 - 2**-40, 2**-40], ids=str)
@pytest.mark.parametrize("width", [1, 6, 25, 64, 129])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_exactly_the_elements_are_dropped_that_keyed_dropout_drops(implementation: str, width: int, p: float) -> None:
    token = torch.arange(37)
    key = DropoutKey(2**32 - 1, 2**32 - 2, (1 << 56) - 1 - token, (1 << 22) + token)
    x = torch.ones(37, width, requires_grad=True)
    # A bias in place of the norm: no element is zero but by dropout.
    arguments = {
        "weight": torch.zeros(width),
        "bias": torch.ones(width),
        "dropout_key": key,
        "layer": 2**32 - 3,
        "p": p,
    }
    found = gated_norm(x, x, **arguments, implementation=implementation)
    kept = keep_mask(key, 2**32 - 3, width, p)
    assert torch.equal(found != 0, kept)
    torch.testing.assert_close(found, keyed_dropout(torch.ones_like(x), key, layer=2**32 - 3, p=p))
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0] != 0, kept)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_dropped_is_zero_even_where_it_was_not_finite(implementation: str) -> None:
    case = Case(40, 20)
    x, gate, weight, bias = case.leaves(torch.float32)
    with torch.no_grad():
        gate.fill_(torch.inf)
    dropped = ~keep_mask(case.key(), 3, 20, 0.2)
    found = case.call([x, gate, weight, bias], implementation)
    assert not found[dropped].any()
    assert not found[~dropped].isfinite().any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_gets_the_same_bits_in_any_batch(implementation: str) -> None:
    case = Case(300, 50)
    x, gate, weight, bias = case.leaves(torch.float32)
    key, some = case.key(), torch.tensor([3, 290, 71])
    part = DropoutKey(key.seed, key.step, key.samples[some], key.positions[some])
    arguments = {**case.arguments(), "weight": weight, "bias": bias, "implementation": implementation}
    whole = gated_norm(x, gate, **arguments)
    found = gated_norm(x[some], gate[some], **{**arguments, "dropout_key": part})
    assert torch.equal(found, whole[some])


@needs_cpp("gated_norm")
def test_results_are_the_same_bits_for_any_number_of_threads() -> None:
    case = Case(1111, 50)

    def run() -> list[Tensor]:
        leaves = case.leaves(torch.float32)
        found = case.call(leaves, "cpu")
        return [found, *gradients([found], leaves)]

    first, *others = with_threads(run)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_give_empty_outputs_and_zero_gradients(implementation: str) -> None:
    leaves = Case(0, 12).leaves(torch.float32)
    found = Case(0, 12).call(leaves, implementation)
    assert found.shape == (0, 12)
    for leaf, gradient in zip(leaves, torch.autograd.grad(found.sum(), leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_may_stand_apart_and_columns_may_be_transposed(implementation: str) -> None:
    case = Case(30, 16)
    x, gate, weight, bias = case.leaves(torch.float32)
    expected = case.call([x, gate, weight, bias], implementation)
    apart = torch.cat([x, gate], 1)[:, :16]
    across = gate.t().contiguous().t()
    found = case.call([apart, across, weight, bias], implementation)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    for got, want in zip(gradients([found], [x, gate, weight]), gradients([expected], [x, gate, weight]), strict=True):
        assert torch.equal(got, want)
    (spread,) = torch.autograd.grad(case.call([apart, across, weight, bias], implementation).sum(), weight)
    again = case.call([x, gate, weight, bias], implementation)  # the same gradient, but with strides that are not zero
    assert torch.equal(spread, torch.autograd.grad(again, weight, torch.ones(30, 16))[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_of_samples_and_positions_may_stand_apart(implementation: str) -> None:
    x, gate, weight, bias = Case(30, 16).leaves(torch.float32)
    twice = torch.stack([torch.arange(30) // 4, torch.arange(30) % 4], 1)
    samples, positions = twice.unbind(1)
    same = torch.zeros((), dtype=torch.int64).expand(30)
    for key, copied in (
        (DropoutKey(7, 11, samples, positions), DropoutKey(7, 11, samples.clone(), positions.clone())),
        (DropoutKey(7, 11, same, positions), DropoutKey(7, 11, same.contiguous(), positions.clone())),
    ):
        found, expected = (
            gated_norm(x, gate, weight, bias, dropout_key=one, layer=3, p=0.3, implementation=implementation)
            for one in (key, copied)
        )
        assert torch.equal(found, expected)


def test_a_weight_per_group_counts_for_each_element_of_its_group() -> None:
    case = Case(9, 24, "group", groups=4)
    x, gate, _, _ = case.leaves(torch.float64)
    weight, bias = random(4, seed=8), random(4, seed=9)
    found = case.call([x, gate, weight, bias])
    expected = case.call([x, gate, weight.repeat_interleave(6), bias.repeat_interleave(6)])
    assert torch.equal(found, expected)
    for got, want in zip(gradients([found], [x, weight, bias]), gradients([expected], [x, weight, bias]), strict=True):
        torch.testing.assert_close(got, want)


@needs_cpp("gated_norm")
def test_parameters_may_be_wider_than_the_tokens() -> None:
    case = Case(20, 32)
    x, gate, weight, bias = case.leaves(torch.bfloat16)
    wide = [weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_()]
    for name in ("cpu", "reference"):
        found = case.call([x, gate, *wide], name)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, case.call([x, gate, weight, bias], name))
        assert [g.dtype for g in gradients([found], wide)] == [torch.float32, torch.float32]


@pytest.mark.parametrize("case", [Case(5, 12), Case(0, 4, "rms", bias=False), Case(4, 6, "group", 3, p=0)], ids=str)
def test_the_operators_pass_opcheck(case: Case) -> None:
    leaves = case.leaves(torch.float32)
    given, key = case.named(leaves), case.key()
    dropout: tuple[Any, ...] = (key.samples, key.positions, key.seed, key.step, 3, case.p) if case.p else ()
    arguments = (*given.values(), case.norm, case.groups, EPS, *dropout)
    torch.library.opcheck(torch.ops.turbogr.gated_norm.default, arguments)
    detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    grad = torch.ones(case.tokens, case.width)
    torch.library.opcheck(torch.ops.turbogr.gated_norm_backward.default, ([grad], [], *detached))


def test_a_compiled_graph_without_breaks_gives_the_same_bits() -> None:
    case = Case(14, 20)
    leaves = case.leaves(torch.float32)
    compiled = torch.compile(lambda *leaves: case.call(list(leaves)), fullgraph=True, backend="aot_eager")
    found, expected = compiled(*leaves), case.call(leaves)
    assert torch.equal(found, expected)
    for got, want in zip(gradients([found], leaves), gradients([expected], leaves), strict=True):
        assert torch.equal(got, want)


def test_shapes_are_known_without_data() -> None:
    with FakeTensorMode():
        x = torch.empty(7, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        found = gated_norm(x[:, 1], x[:, 0], torch.empty(8))
        assert (found.shape, found.dtype, found.stride()) == ((7, 8), torch.bfloat16, (8, 1))
        assert torch.autograd.grad(found.sum(), x)[0].shape == x.shape


def test_explain_tells_who_serves_a_call() -> None:
    x = torch.ones(3, 8, dtype=torch.float64)
    choice = explain(gated_norm, x, x)
    assert choice.implementation == "reference"
    assert "torch.float64" in choice.passed_over["cpu"]
    with pytest.raises(ValueError, match=r"'cpu' cannot serve this call of gated_norm.*torch\.float64"):
        gated_norm(x, x, implementation="cpu")


@needs_cpp("gated_norm")
def test_an_open_choice_on_cpu_takes_the_cpp() -> None:
    assert explain(gated_norm, torch.ones(3, 8), torch.ones(3, 8)).implementation == "cpu"


def _call(**changes: Any) -> Tensor:
    ids = torch.arange(4)
    base: dict[str, Any] = {
        "x": torch.ones(4, 6),
        "gate": torch.ones(4, 6),
        "weight": torch.ones(6),
        "bias": torch.ones(6),
        "dropout_key": DropoutKey(0, 0, ids, ids),
        "p": 0.5,
    }
    return gated_norm(**{**base, **changes})


KEY = DropoutKey(0, 0, torch.arange(4), torch.arange(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(4, 3, 2)}, r"x and gate must be \[T, W\].*\(4, 3, 2\) and \(4, 6\)"),
        ({"gate": torch.ones(4, 5)}, r"x and gate must be.*\(4, 5\)"),
        ({"x": torch.ones(4, 0), "gate": torch.ones(4, 0)}, "W >= 1"),
        ({"gate": torch.ones(4, 6).double()}, "one floating-point type.*torch.float64"),
        ({"x": torch.ones(4, 6).int(), "gate": torch.ones(4, 6).int()}, "floating-point type, got torch.int32"),
        ({"weight": torch.ones(5)}, r"weight must be floating point of shape \[6\].*\(5,\)"),
        ({"bias": torch.ones(6).long()}, "bias must be floating point.*torch.int64"),
        ({"norm": "batch"}, "norm must be one of layer, rms, group, got 'batch'"),
        ({"groups": 2}, 'groups are for norm="group" only, got 2'),
        ({"norm": "group", "groups": 4}, "groups must divide the width 6, got 4"),
        ({"norm": "group", "groups": 0}, "groups must divide the width 6, got 0"),
        ({"eps": -1e-6}, "eps must be at least 0, got -1e-06"),
        ({"p": 1.0}, r"p must be in \[0, 1\), got 1.0"),
        ({"p": -0.1, "dropout_key": None}, r"p must be in \[0, 1\), got -0.1"),
        ({"p": float("nan")}, r"p must be in \[0, 1\), got nan"),
        ({"dropout_key": replace(KEY, samples=torch.arange(3))}, r"samples must be int64.*T = 4.*\(3,\)"),
        ({"dropout_key": replace(KEY, positions=torch.arange(4.0))}, "positions must be int64.*torch.float32"),
        ({"dropout_key": replace(KEY, seed=1 << 32)}, r"seed must be in \[0, 2\^32\), got 4294967296"),
        ({"dropout_key": replace(KEY, step=-1)}, r"step must be in \[0, 2\^32\), got -1"),
        ({"layer": 1 << 32}, "layer must be in"),
        ({"dropout_key": replace(KEY, samples=torch.arange(-1, 3))}, "sample ids must be in .* got -1 to 2"),
        ({"dropout_key": replace(KEY, positions=torch.arange(4) << 31)}, "positions must be in"),
        ({"implementation": "fast"}, "implementation must be one of .*'fast'"),
        ({"implementation": "triton"}, "'triton' cannot serve this call"),
        ({"weight": torch.ones(6, device="meta")}, "weight must be on the device of x"),
    ],
    ids=str,
)
def test_bad_input_is_refused_with_what_was_given_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_a_gradient_of_another_shape_is_refused() -> None:
    x = torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"grads must be like the outputs, torch.float32 of shape \(4, 6\)"):
        torch.ops.turbogr.gated_norm_backward([torch.ones(4, 5)], [], x, x, None, None, "layer", 1, 1e-6)
