from __future__ import annotations

import bisect
import random

import pytest
import torch

from turbogr_plugin.kernels.segments import (
    as_signed,
    as_unsigned,
    check_offsets_shape,
    complete_offsets,
    copied_from,
    gather,
    numbers_on,
    search_in_groups,
    segment_ids,
    size_or_sync,
    unsigned_divmod,
)

EDGES = [0, 1, 2, 6, 7, (1 << 31) - 1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 1000, (1 << 31) - 1, 1 << 40, 1 << 62])
def test_unsigned_division_equals_that_of_python(divisor: int) -> None:
    generator = random.Random(divisor)
    numbers = EDGES + [generator.getrandbits(64) for _ in range(500)]
    bits = torch.tensor([number - (number >> 63 << 64) for number in numbers])
    quotient, remainder = unsigned_divmod(bits, torch.tensor(divisor))
    expected = [divmod(number, divisor) for number in numbers]
    assert remainder.tolist() == [rest for _, rest in expected]
    assert quotient.tolist() == [whole - (whole >> 63 << 64) for whole, _ in expected]


def test_int32_ids_go_to_unsigned_and_back() -> None:
    ids = torch.tensor([0, 5, (1 << 31) - 1, -(1 << 31), -1], dtype=torch.int32)
    assert as_unsigned(ids).tolist() == [0, 5, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    assert torch.equal(as_signed(as_unsigned(ids), torch.int32), ids)


@pytest.mark.parametrize("sizes", [[1], [3, 1, 8], [2, 2], [1, 17]])
def test_a_search_in_groups_equals_bisection(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = [torch.randint(0, 20, (size,), generator=generator).sort().values for size in sizes]
    offsets = complete_offsets(torch.tensor(sizes))
    group = torch.randint(0, len(sizes), (200,), generator=generator)
    queries = torch.randint(-2, 23, (200,), generator=generator)
    found = search_in_groups(torch.cat(groups), offsets[group], offsets[group + 1], queries, max(sizes))
    expected = [bisect.bisect_right(groups[g].tolist(), query) for g, query in zip(group, queries, strict=True)]
    assert found.tolist() == expected


def test_positions_outside_the_segments_get_the_nearest() -> None:
    assert segment_ids(torch.tensor([2, 3, 3, 5]), 7).tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert segment_ids(torch.tensor([4]), 2).tolist() == [0, 0]


def test_indices_outside_the_rows_are_clamped_and_no_rows_give_zeros() -> None:
    rows = torch.tensor([[1, 2], [3, 4]])
    assert gather(rows, torch.tensor([[-5, 1], [0, 9]])).tolist() == [[[1, 2], [3, 4]], [[1, 2], [3, 4]]]
    assert gather(rows[:0], torch.tensor([7])).tolist() == [[0, 0]]


def test_runs_are_copied_one_behind_the_other() -> None:
    source = copied_from(torch.tensor([7, 0, 3], dtype=torch.int32), torch.tensor([2, 0, 3], dtype=torch.int32), 5)
    assert source.tolist() == [7, 8, 3, 4, 5]
    assert copied_from(torch.zeros(0), torch.zeros(0), 2).tolist() == [0, 0]


def test_sizes_and_offsets_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match="count must not be negative, got -3"):
        size_or_sync(-3, torch.ones(2), "count")
    with pytest.raises(ValueError, match="lengths must not be negative, got -2"):
        size_or_sync(None, torch.tensor([3, -2]), "count")
    with pytest.raises(ValueError, match="lengths must not be negative, got -2"):
        size_or_sync(None, torch.tensor([3]), "count", rows=torch.tensor([5, -2]))
    with pytest.raises(ValueError, match="lengths add up to 3, but there are 2 values"):
        size_or_sync(None, torch.tensor([1]), "count", rows=torch.tensor([1, 2]), values=2)
    assert size_or_sync(None, torch.tensor([1, 2], dtype=torch.int32), "count", values=3) == 3
    assert size_or_sync(None, torch.tensor([], dtype=torch.int32), "count", values=0) == 0
    with pytest.raises(ValueError, match=r"spans must have 2 \+ 1 elements, got 2"):
        check_offsets_shape(torch.tensor([0, 1]), "spans", segments=2)
    with pytest.raises(ValueError, match=r"spans must be int32 or int64, got torch\.float32"):
        check_offsets_shape(torch.tensor([0.0]), "spans")


def test_numbers_are_made_on_the_device() -> None:
    assert numbers_on(torch.device("cpu"), [3, 4], torch.int32).tolist() == [3, 4]
