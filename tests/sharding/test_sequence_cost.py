from __future__ import annotations

import numpy as np
import pytest

from turbogr_plugin.sharding.sequence_cost import SequenceCost


def test_a_sequence_costs_linear_and_quadratic_parts() -> None:
    assert SequenceCost(linear=3.0, quadratic=0.5).of([0, 1, 4]).tolist() == [0.0, 3.5, 20.0]


def test_named_costs_are_the_forward_work_of_a_block() -> None:
    length, dim = 7, 16
    pairs = length * length / 2
    assert SequenceCost.hstu(dim).of([length])[0] == 2 * 5 * dim * dim * length + 2 * 2 * dim * pairs
    assert SequenceCost.fuxi(dim).of([length])[0] == 2 * 12 * dim * dim * length + 4 * 2 * dim * pairs
    assert SequenceCost.tokens().of([length])[0] == length


def test_bad_coefficients_and_lengths_are_refused() -> None:
    for linear in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="linear must be finite and at least 0"):
            SequenceCost(linear=linear)
    with pytest.raises(ValueError, match="linear and quadratic are both 0"):
        SequenceCost()
    with pytest.raises(ValueError, match="lengths must be at least 0, got -2"):
        SequenceCost.tokens().of([3, -2])
    with pytest.raises(ValueError, match=r"lengths must be one-dimensional, got the shape \[1, 2\]"):
        SequenceCost.tokens().of(np.ones((1, 2)))
