"""Ids without their repetitions, against Python's sorted sets."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch

from turbogr_plugin.kernels.jagged_unique import jagged_unique

IMPLEMENTATIONS = ("reference", "cpu")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(12))
def test_each_table_gets_its_sorted_set_and_each_id_its_place(
    seed: int, dtype: torch.dtype, implementation: str
) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 3, 40]) for _ in range(seed % 5)]
    kinds = [
        [0],
        range(-3, 4),
        range(2**24 - 2, 2**24 + 5),  # float32 cannot tell these apart
        range(2**31 - 9, 2**31) if dtype == torch.int32 else range(2**62 - 3, 2**62 + 4),
        range(-(2**31), -(2**31) + 3),
    ]
    ids = [[draw.choice(kinds[(seed + table) % 5]) for _ in range(length)] for table, length in enumerate(lengths)]
    values = torch.tensor(list(chain.from_iterable(ids)), dtype=dtype)
    offsets = torch.tensor([sum(lengths[:table]) for table in range(len(lengths) + 1)], dtype=dtype)
    if len(offsets) == 1:
        offsets, ids = torch.zeros(2, dtype=dtype), [[]]
    found, ends, inverse = jagged_unique(values, offsets, implementation=implementation)
    wanted = [sorted(set(each)) for each in ids]
    assert found.tolist() == list(chain.from_iterable(wanted))
    assert ends is not None
    assert ends.tolist() == [sum(map(len, wanted[:table])) for table in range(len(wanted) + 1)]
    assert (found.dtype, ends.dtype, inverse.dtype) == (dtype, dtype, torch.int64)
    assert torch.equal(found[inverse], values)
    places = torch.repeat_interleave(torch.arange(len(ids)), offsets.diff())
    assert ((ends[places] <= inverse) & (inverse < ends[places + 1])).all()
    alone, none, inverse = jagged_unique(values, implementation=implementation)
    assert none is None
    assert alone.tolist() == sorted(set(values.tolist()))
    assert torch.equal(alone[inverse], values)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_ids_of_strided_memory(implementation: str) -> None:
    ids = torch.randint(-(2**40), 2**40, (100_000, 2), generator=torch.Generator().manual_seed(1))[:, 1] // 2**27
    offsets = torch.tensor([0, 60_000, 60_000, 100_000])
    found, ends, inverse = jagged_unique(ids, offsets, implementation=implementation)
    assert ends is not None
    for begin, end, first, last in zip(offsets[:-1], offsets[1:], ends[:-1], ends[1:], strict=True):
        wanted, places = ids[begin:end].unique(return_inverse=True)
        assert torch.equal(found[first:last], wanted)
        assert torch.equal(inverse[begin:end], places + first)


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (torch.ones(3), None, "ids must be int32 or int64, got torch.float32"),
        (torch.ones(3, 1).int(), None, r"ids must have 1 dimension\(s\), got shape \(3, 1\)"),
        (torch.ones(3).int(), torch.tensor([0.0, 3.0]), "table_offsets must be int32 or int64, got torch.float32"),
        (torch.ones(3).int(), torch.zeros(0).int(), "table_offsets must have at least one element, got none"),
        (torch.ones(3).int(), torch.tensor([0, 2]), "table_offsets must go from 0 to the number of ids, 3; got 0 to 2"),
        (torch.ones(3).int(), torch.tensor([1, 3]), "table_offsets must go from 0 .* got 1 to 3"),
        (torch.ones(3).int(), torch.tensor([0, 2, 1, 3]), "table_offsets must not decrease, got 2 and then 1 at 1"),
        (torch.ones(3).int(), torch.zeros(2, device="meta").int(), "table_offsets must be on the device of ids"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ids: torch.Tensor, offsets: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jagged_unique(ids, offsets)
