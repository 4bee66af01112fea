from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from turbogr_plugin.negatives.sampled_softmax import sampled_softmax
from turbogr_plugin.negatives.uniform import NegativeSharing

LENGTHS = [2, 0, 3, 1]
COUNT = 4
DIM = 5
#: Above 2^24, where float32 confuses neighbours.
BASE = 1 << 24


def _arguments(sharing: NegativeSharing, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    total, groups = sum(LENGTHS), 3

    def random(rows: int) -> Tensor:
        return torch.randn(rows, DIM, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    rows = (total if sharing == "none" else groups) * COUNT
    # Few ids, so that targets stand among their negatives.
    return {
        "queries": random(total),
        "targets": random(total),
        "negatives": random(rows),
        "target_ids": BASE + torch.randint(0, 4, (total,), generator=generator),
        "negative_ids": BASE + torch.randint(0, 4, (rows,), generator=generator),
        "target_lengths": torch.tensor(LENGTHS),
        "sharing": sharing,
        "temperature": 0.3,
    }


def _direct(arguments: dict[str, Any]) -> tuple[Tensor, int]:
    """The loss target by target, from the formula, and how many negatives were left out."""
    loss, left_out, target, group = torch.zeros((), dtype=torch.float64), 0, 0, 0
    for length in LENGTHS:
        for _ in range(length):
            first = (target if arguments["sharing"] == "none" else group) * COUNT
            query = arguments["queries"][target]
            positive = torch.exp(query @ arguments["targets"][target] / arguments["temperature"])
            others = torch.zeros((), dtype=torch.float64)
            for n in range(first, first + COUNT):
                if int(arguments["negative_ids"][n]) == int(arguments["target_ids"][target]):
                    left_out += 1
                else:
                    others = others + torch.exp(query @ arguments["negatives"][n] / arguments["temperature"])
            loss = loss - torch.log(positive / (positive + others))
            target += 1
        group += length > 0
    return loss, left_out


@pytest.mark.parametrize("sharing", ["none", "sequence"])
def test_loss_and_gradients_equal_the_formula_target_by_target(sharing: NegativeSharing) -> None:
    arguments = _arguments(sharing)
    leaves = [arguments[name] for name in ("queries", "targets", "negatives")]
    expected, left_out = _direct(arguments)
    found = sampled_softmax(**arguments)
    assert 1 <= left_out < sum(LENGTHS) * COUNT
    assert found.dtype == torch.float64 and found.shape == ()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for got, want in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_sharing_over_a_sequence_equals_repeated_negatives() -> None:
    shared = _arguments("sequence")
    repeats = torch.cat(
        [torch.arange(group * COUNT, (group + 1) * COUNT).repeat(n) for group, n in enumerate(n for n in LENGTHS if n)]
    )
    repeated = {
        **shared,
        "sharing": "none",
        "negatives": shared["negatives"][repeats],
        "negative_ids": shared["negative_ids"][repeats],
    }
    torch.testing.assert_close(sampled_softmax(**shared), sampled_softmax(**repeated), rtol=1e-13, atol=0)


@pytest.mark.parametrize("sharing", ["none", "sequence"])
def test_the_layout_on_the_host_changes_no_bit(sharing: NegativeSharing) -> None:
    arguments = _arguments(sharing)
    offsets = [sum(LENGTHS[:row]) for row in range(len(LENGTHS) + 1)]
    assert torch.equal(sampled_softmax(**arguments, host_target_offsets=offsets), sampled_softmax(**arguments))


def test_a_target_whose_negatives_are_all_itself_costs_nothing() -> None:
    arguments = _arguments("none")
    arguments["negative_ids"] = arguments["target_ids"].repeat_interleave(COUNT)
    loss = sampled_softmax(**arguments)
    assert loss.item() == 0
    loss.backward()
    for name in ("queries", "targets", "negatives"):
        assert not arguments[name].grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharing", ["none", "sequence"])
def test_the_loss_is_float32_for_lower_precisions(sharing: NegativeSharing, dtype: torch.dtype) -> None:
    arguments = _arguments(sharing, dtype)
    exact = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    found = sampled_softmax(**arguments)
    assert found.dtype == torch.float32
    assert math.isclose(found.item(), _direct(exact)[0].item(), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sharing", ["none", "sequence"])
def test_a_rank_without_targets_adds_zero_and_a_gradient_of_zeros(sharing: NegativeSharing, dtype: torch.dtype) -> None:
    leaves = [torch.empty(0, DIM, dtype=dtype, requires_grad=True) for _ in range(3)]
    ids = torch.empty(0, dtype=torch.int64)
    loss = sampled_softmax(
        *leaves,
        target_ids=ids,
        negative_ids=ids,
        target_lengths=torch.zeros(2, dtype=torch.int64),
        sharing=sharing,
        temperature=0.1,
    )
    assert loss.item() == 0
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize(
    ("sharing", "changes", "message"),
    [
        ("none", {"temperature": 0.0}, "temperature must be positive, got 0"),
        ("none", {"temperature": float("nan")}, "temperature must be positive"),
        ("none", {"targets": torch.ones(5, DIM)}, r"queries \(6, 5\), targets \(5, 5\)"),
        ("none", {"target_ids": torch.zeros(5, dtype=torch.int64)}, "5 target ids"),
        ("none", {"negative_ids": torch.zeros(23, dtype=torch.int64)}, "23 negative ids"),
        (
            "none",
            {"negatives": torch.ones(23, DIM), "negative_ids": torch.zeros(23, dtype=torch.int64)},
            "23 negatives do not divide over 6 groups",
        ),
        (
            "sequence",
            {"negatives": torch.ones(13, DIM), "negative_ids": torch.zeros(13, dtype=torch.int64)},
            "13 negatives do not divide over 3 groups",
        ),
        ("sequence", {"target_lengths": torch.tensor([2, 0, 3, 2])}, "target_lengths must add up to the 6 targets"),
        ("sequence", {"target_lengths": torch.tensor([0, 0])}, "12 negatives do not divide over 0 groups"),
    ],
)
def test_arguments_that_do_not_fit_are_named(sharing: NegativeSharing, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampled_softmax(**{**_arguments(sharing), **changes})
