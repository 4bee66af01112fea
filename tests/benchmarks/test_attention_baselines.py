"""Each baseline computes what the operator computes, gradients included: otherwise a speedup would mean nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention.problems import Case, Kernel, Side, problem
from benchmarks.baselines import padded_attention

LENGTHS = (5, 1, 19, 0, 12)


def agree(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        # fbgemm pads float32 but not float64, so the baselines run in float32 against the reference in float64.
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize(
    ("kernel", "side", "bias"),
    [("hstu", "padded", True), ("hstu", "padded", False), ("hstu", "meta", False), ("fuxi", "padded", True)],
)
def test_a_padded_baseline_gives_the_output_and_gradients_of_the_operator(
    kernel: Kernel, side: Side, bias: bool
) -> None:
    # The table of positions has fewer entries than the longest row: the last one serves what is farther apart.
    case = Case(kernel=kernel, lengths=LENGTHS, cap=15, heads=2, dim=8, bias=bias)
    ours = problem(case.of("ours", implementation="reference", dtype="float64")).step()
    theirs = problem(case.of(side)).step()
    if side == "padded":
        padded, tables = theirs[:4], theirs[4:]
        theirs = (*(padded_attention.unpad(x, LENGTHS) for x in padded), *tables)
    agree(theirs, ours)


@pytest.mark.parametrize("kernel", ["gate", "uvqk"])
def test_an_eager_chain_gives_the_output_and_gradients_of_the_operator(kernel: Kernel) -> None:
    case = Case(kernel=kernel, lengths=LENGTHS, cap=19, heads=2, dim=8, dropout=0.0)
    ours = problem(case.of("ours", implementation="reference", dtype="float64")).step()
    agree(problem(case.of("eager")).step(), ours)


def test_the_eager_chain_drops_as_many_elements_as_the_operator() -> None:
    case = Case(kernel="gate", lengths=(2000,), cap=2000, heads=2, dim=8, dropout=0.2)
    for side in ("ours", "eager"):
        (output,) = problem(case.of(side, implementation="reference")).forward()
        assert abs((output == 0).double().mean() - 0.2) < 0.01
