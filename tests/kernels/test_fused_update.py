"""One step of an optimizer on some rows: each once, the others untouched, whatever is given refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.lookup_cases import EPSILON, FAST_OPTIMIZERS
from tests.kernels.table_groups import Group, Oracle, dyadic
from turbogr_plugin.kernels import explain
from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS
from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.kernels.lookup_call import StochasticRounding

IMPLEMENTATIONS = ("reference", "cpu")
ROWS, WIDTH = 12, 8
KEYWORDS: dict[str, Any] = {"learning_rate": 2.0**-4, "eps": 0.5}


def states_of(optimizer: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = {"weight": (ROWS, WIDTH), "row": (ROWS,)}
    return [torch.zeros(shapes[kind], dtype=dtype) for kind in OPTIMIZERS[optimizer].states]


@pytest.mark.parametrize(
    ("implementation", "optimizer"),
    [
        *(("cpu", name) for name in FAST_OPTIMIZERS),
        *(("reference", name) for name in OPTIMIZERS),
    ],
)
@pytest.mark.parametrize("exact", [True, False], ids=["dyadic", "random"])
def test_a_hundred_coalesced_updates_equal_those_of_a_dictionary_in_float64(
    exact: bool, optimizer: str, implementation: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, states = dyadic((ROWS, WIDTH), generator), states_of(optimizer)
    oracle = Oracle(Group(((ROWS, WIDTH),), (0,)), optimizer, [weights], learning_rate=2.0**-4)
    for step in range(1, 101):
        ids = torch.randint(0, ROWS - 2, (30,), generator=generator, dtype=torch.int32 if step % 2 else torch.int64)
        grads = torch.randint(-2, 3, (30, WIDTH), generator=generator) / 2
        if not exact:
            grads = torch.randn(30, WIDTH, generator=generator)
        found, rows = coalesce_rows(ids, grads, implementation=implementation)
        fused_update(
            *(weights, states, found, rows, optimizer), iteration=step, implementation=implementation, **KEYWORDS
        )
        oracle.steps += 1
        sums: dict[int, Tensor] = {}
        for row, gradient in zip(ids.tolist(), grads.double(), strict=True):
            sums[row] = sums.get(row, 0.0) + gradient
        for row, total in sums.items():
            oracle._update((0, row), total)
    (wanted,) = oracle.weights
    if exact and optimizer == "sgd":
        assert torch.equal(weights.double(), wanted)
    assert float((weights - wanted).norm()) <= 1600 * EPSILON * float(wanted.norm())
    assert torch.equal(weights[-2:].double(), wanted[-2:])
    if optimizer in ("adagrad", "rowwise_adagrad"):
        for row in range(ROWS - 2):
            second = oracle.state[0, row]["second"]
            error = (states[0][row] - second).norm()
            assert float(error) <= (0.0 if exact else 1600 * EPSILON * float(torch.as_tensor(second).norm()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ids_that_the_table_does_not_have_change_nothing(dtype: torch.dtype, implementation: str) -> None:
    for ids in ([5, -1, 3, ROWS, 2**40], [-1, ROWS], []):
        weights = dyadic((ROWS, WIDTH), torch.Generator().manual_seed(2)).to(dtype)
        before, states = weights.clone(), states_of("adagrad")
        names = torch.tensor(ids, dtype=torch.int64)
        fused_update(
            *(weights, states, names, torch.ones(len(ids), WIDTH), "adagrad"),
            implementation=implementation,
            **KEYWORDS,
        )
        changed = (weights != before).any(1).nonzero().flatten().tolist()
        assert changed == sorted(row for row in ids if 0 <= row < ROWS)
        assert (states[0] != 0).any(1).nonzero().flatten().tolist() == changed


def test_tables_without_rows_and_in_float64_are_served() -> None:
    fused_update(torch.zeros(0, 4), None, torch.tensor([0, 3]), torch.ones(2, 4), "sgd", learning_rate=1.0)
    weights = torch.zeros(2, 1, dtype=torch.float64)
    rows = torch.tensor([[1.0 + 2.0**-40]], dtype=torch.float64)
    fused_update(weights, None, torch.tensor([1]), rows, "sgd", learning_rate=1.0)
    assert float(weights[1]) == -1.0 - 2.0**-40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_gives_the_same_bits_with_every_implementation(dtype: torch.dtype) -> None:
    found = []
    for implementation in IMPLEMENTATIONS:
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(ROWS, 6, generator=generator).to(dtype)
        for step in range(1, 6):
            rows = torch.randn(3, 6, generator=generator)
            fused_update(
                *(weights, None, torch.tensor([1, 7, 9]), rows, "sgd"),
                stochastic_rounding=StochasticRounding(seed=5, step=step),
                implementation=implementation,
                **KEYWORDS,
            )
        found.append(weights)
    assert torch.equal(*found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_are_not_finite_name_the_table_before_anything_is_changed(implementation: str) -> None:
    for bad in (torch.nan, torch.inf):
        weights, states = torch.zeros(ROWS, WIDTH), states_of("adagrad")
        rows = torch.ones(2, WIDTH)
        rows[1, 3] = bad
        with pytest.raises(ValueError, match=f"rows must be finite, got {bad} for id 9 of table 'items'"):
            fused_update(
                *(weights, states, torch.tensor([2, 9]), rows, "adagrad"),
                nan_guard="items",
                implementation=implementation,
                **KEYWORDS,
            )
        assert not weights.any()
        assert not states[0].any()


def test_a_change_is_seen_by_autograd() -> None:
    weights = torch.zeros(ROWS, WIDTH)
    factor = torch.ones(ROWS, WIDTH, requires_grad=True)
    product = (factor * weights).sum()
    fused_update(weights, None, torch.tensor([1]), torch.ones(1, WIDTH), "sgd", **KEYWORDS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_an_optimizer_that_only_the_reference_has_is_passed_over_with_the_reason() -> None:
    weights, states = torch.zeros(ROWS, WIDTH), states_of("lamb")
    choice = explain(fused_update, weights, states, torch.tensor([1]), torch.ones(1, WIDTH), "lamb", **KEYWORDS)
    assert choice.implementation == "reference"
    assert "lamb" in choice.passed_over["cpu"]


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "optimizer must be one of adagrad, adam, .* got 'ftrl'": {"optimizer": "ftrl"},
    r"sgd has 0 state\(s\), got 1": {"optimizer": "sgd"},
    r"adam has 2 state\(s\), got 1": {"optimizer": "adam"},
    "iteration must be at least 1 with adam, got 0": {
        "optimizer": "adam",
        "state": [torch.zeros(ROWS, WIDTH)] * 2,
        "iteration": 0,
    },
    "rowwise_bias_correction is for adam only": {"rowwise_bias_correction": True},
    r"state 0 of adagrad must be contiguous, .* shape \(12, 8\), got .* \(12,\)": {"state": torch.zeros(ROWS)},
    "state 0 of adagrad must be contiguous": {"state": torch.zeros(WIDTH, ROWS).t()},
    "weights must be contiguous": {"weights": torch.zeros(WIDTH, ROWS).t()},
    "weights must be .* got torch.int32": {"weights": torch.zeros(ROWS, WIDTH).int()},
    "ids must be int32 or int64, got torch.float32": {"ids": torch.ones(2)},
    "ids must all be different, got 4 twice; coalesce_rows sums duplicates": {"ids": torch.tensor([4, 4])},
    r"rows must be .* with U = 2 and D = 8, got torch.float32 of shape \(2, 4\)": {"rows": torch.ones(2, 4)},
    "rows must be floating point": {"rows": torch.ones(2, WIDTH).int()},
    "rows must be on the device of weights": {"rows": torch.ones(2, WIDTH, device="meta")},
    r"the step of stochastic_rounding must be in \[0, 2\^32\), got 4294967296": {
        "stochastic_rounding": StochasticRounding(0, 1 << 32)
    },
    "implementation must be one of": {"implementation": "fbgemm"},
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_an_argument_that_does_not_fit_is_refused_by_name(message: str) -> None:
    given: dict[str, Any] = {
        "weights": torch.zeros(ROWS, WIDTH),
        "state": torch.zeros(ROWS, WIDTH),
        "ids": torch.tensor([1, 4]),
        "rows": torch.ones(2, WIDTH),
        "optimizer": "adagrad",
        **KEYWORDS,
    }
    with pytest.raises(ValueError, match=message):
        fused_update(**(given | BAD_ARGUMENTS[message]))
    assert not given["weights"].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, 0x7F800000])
@pytest.mark.parametrize("rounding", [StochasticRounding(1, 1), None], ids=["stochastic", "nearest"])
def test_rounding_keeps_what_is_not_finite(
    rounding: StochasticRounding | None, bits: int, dtype: torch.dtype, implementation: str
) -> None:
    gradient = torch.full((1, 8), bits, dtype=torch.int32).view(torch.float32)
    weights = torch.ones(2, 8, dtype=dtype)
    given = {"stochastic_rounding": rounding, "implementation": implementation}
    fused_update(weights, None, torch.tensor([0]), gradient, "sgd", learning_rate=1.0, **given)
    assert not bool(weights[0].isfinite().any())
    assert bool((weights[1] == 1).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_by_ids_outside_of_the_table_may_repeat(implementation: str) -> None:
    weights = torch.ones(3, 4)
    ids, rows = torch.tensor([1, -1, -1, 7, 7]), torch.ones(5, 4)
    fused_update(weights, None, ids, rows, "sgd", learning_rate=1.0, implementation=implementation)
    assert weights.tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4]


def test_a_mode_of_weight_decay_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_decay_mode must be 0, 1 .* got 3"):
        fused_update(
            torch.ones(3, 4), torch.zeros(3), torch.tensor([1]), torch.ones(1, 4), "rowwise_adagrad", learning_rate=1.0,
            weight_decay_mode=3,
        )  # fmt: skip
