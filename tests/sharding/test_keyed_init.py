"""Initial values of rows; that shards of every plan hold them is tested on two ranks (test_gradient_scale.py)."""

from __future__ import annotations

import math

import pytest
import torch

from turbogr_plugin.kernels.keyed_random import Purpose, keyed_words
from turbogr_plugin.sharding.keyed_init import keyed_normal_rows


def test_values_are_normal_with_the_asked_deviation() -> None:
    values = keyed_normal_rows("items", torch.arange(4000), 50, seed=1, std=0.02).double() / 0.02
    count = values.numel()
    # Each moment within five deviations of its estimator: 1, 2, 15 and 96 over the count.
    for power, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(float((values**power).mean()) - expected) < 5 * math.sqrt(variance / count), power
    for bound, share in [(1.0, 0.682689), (2.0, 0.954500), (3.0, 0.997300)]:
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs(float((values.abs() < bound).double().mean()) - share) < 5 * deviation
    # Rows, columns, and the two values of one transform are uncorrelated.
    for a, b in [(values[:-1], values[1:]), (values[:, :-1], values[:, 1:]), (values[:, :-2], values[:, 2:])]:
        assert abs(float((a * b).mean())) < 5 / math.sqrt(a.numel())


def test_values_are_the_box_muller_transform_of_the_words() -> None:
    found = keyed_normal_rows("items", torch.tensor([7]), 4, seed=1, std=2.0)[0].tolist()
    words = keyed_words(
        Purpose.TABLE_INIT,
        seed=1,
        step=0xE11EE94D,  # CRC-32 of "items": the same in every process, which Python's hash is not
        samples=torch.tensor([7]),
        lanes=0,
        blocks=torch.tensor([0]),
    )
    a, b, c, d = ((word + 0.5) / 2**32 for word in words.flatten().tolist())
    expected = [
        radius * function(angle)
        for function in (math.cos, math.sin)
        for radius, angle in ((2 * math.sqrt(-2 * math.log(a)), 2 * math.pi * b),
                              (2 * math.sqrt(-2 * math.log(c)), 2 * math.pi * d))
    ]  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dim", [1, 3, 4, 9])
def test_a_row_has_the_same_values_whoever_asks_for_it(dim: int) -> None:
    whole = keyed_normal_rows("items", torch.arange(20), dim, seed=1, std=0.02)
    assert whole.shape == (20, dim) and whole.dtype == torch.float32
    some = torch.tensor([19, 3, 3, 0])
    assert torch.equal(keyed_normal_rows("items", some, dim, seed=1, std=0.02), whole[some])
    assert keyed_normal_rows("items", some[:0], dim, seed=1, std=0.02).shape == (0, dim)


def test_tables_seeds_and_rows_differ() -> None:
    rows = torch.arange(50)
    drawn = [
        keyed_normal_rows("items", rows, 8, seed=1, std=0.02),
        keyed_normal_rows("items", rows, 8, seed=2, std=0.02),
        keyed_normal_rows("users", rows, 8, seed=1, std=0.02),
    ]
    assert len({tuple(row) for part in drawn for row in part.tolist()}) == 150
