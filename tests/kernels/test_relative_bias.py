from __future__ import annotations

import math

import pytest
import torch

from turbogr_plugin.kernels.offsets import lengths_to_offsets
from turbogr_plugin.kernels.relative_bias import bucket_numbers, query_times, time_borders, time_buckets


def test_buckets_are_the_floor_of_the_published_logarithm() -> None:
    gaps = [*range(20_000), *(3**i for i in range(39)), *(10**i + 1 for i in range(18))]
    exact = [math.log(max(gap, 1)) / 0.301 for gap in gaps]
    # float32 may fall on either side of a border that the exact value all but touches.
    clear = [i for i, value in enumerate(exact) if abs(value - round(value)) > 1e-4 or value == 0]
    assert len(clear) > 0.99 * len(gaps)
    found = time_buckets(torch.tensor(gaps), 128)
    assert found.dtype == torch.int64
    assert [int(found[i]) for i in clear] == [min(math.floor(exact[i]), 127) for i in clear]


def test_buckets_ignore_the_sign_and_stay_in_the_table() -> None:
    gaps = torch.tensor([[0, 1, 2, 10**9], [-1, -5, 5, -(10**15)]])
    assert torch.equal(time_buckets(gaps, 64), time_buckets(-gaps, 64))
    assert time_buckets(gaps, 5).tolist() == [[0, 0, 2, 4], [0, 4, 4, 4]]
    assert time_buckets(gaps, 1).tolist() == [[0] * 4] * 2
    assert time_buckets(torch.empty(0, 3, dtype=torch.int64), 5).shape == (0, 3)


def test_gaps_are_left_as_they_were() -> None:
    gaps = torch.tensor([-5, 0, 7])
    time_buckets(gaps, 8)
    assert gaps.tolist() == [-5, 0, 7]


@pytest.mark.parametrize("lengths", [[], [0], [1], [3, 0, 1, 4], [0, 2, 0]], ids=str)
def test_queries_stand_at_their_own_or_the_next_event_of_their_row(lengths: list[int]) -> None:
    rows = [[100 * row + 7 * place for place in range(length)] for row, length in enumerate(lengths)]
    times = torch.tensor([time for row in rows for time in row], dtype=torch.int64)
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
    assert torch.equal(query_times(times, offsets, "own"), times)
    shifted = [time for row in rows for time in row[1:] + row[-1:]]
    assert query_times(times, offsets, "next").tolist() == shifted
    assert times.tolist() == [time for row in rows for time in row]


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'own', 'next'.*'last'"):
        query_times(torch.tensor([1]), torch.tensor([0, 1]), "last")  # type: ignore[arg-type]


GAPS = torch.cat(
    [
        torch.arange(100_000),
        torch.randint(0, 2**62, (20_000,), generator=torch.Generator().manual_seed(0)),
        torch.tensor([2**63 - 1]),
    ]
)


@pytest.mark.parametrize("entries", [1, 2, 5, 32, 128, 400])
def test_the_borders_are_those_of_the_published_buckets_bit_for_bit(entries: int) -> None:
    borders = time_borders(entries)
    assert borders.shape == (entries - 1,)
    assert borders.dtype == torch.float32
    assert torch.equal(bucket_numbers(GAPS, borders), time_buckets(GAPS, entries))
    assert torch.equal(bucket_numbers(-GAPS, borders), time_buckets(GAPS, entries))
    reached = borders[borders.isfinite()]
    below = (reached.view(torch.int32) - 1).view(torch.float32)  # the float before each border is of the bucket before
    logs = torch.stack([below, reached]).log().div(0.301).long().clamp(max=entries - 1)
    bucket = torch.arange(1, len(reached) + 1)
    assert torch.equal(logs, torch.stack([bucket - 1, bucket]))


def test_the_borders_are_found_once() -> None:
    assert time_borders(64) is time_borders(64)


def test_any_borders_count_those_that_are_at_most_the_gap() -> None:
    borders = torch.tensor([0.0, 5.0, 5.0, 2.0**24, torch.inf])
    gaps = torch.tensor([[0, 4, 5], [-6, 2**24 + 1, -(2**40)]])
    assert bucket_numbers(gaps, borders).tolist() == [[1, 1, 3], [3, 4, 4]]
    assert bucket_numbers(gaps, torch.empty(0)).tolist() == [[0] * 3] * 2
