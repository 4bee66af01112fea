from __future__ import annotations

import pytest
import torch

from turbogr_plugin.kernels.offsets import check_offsets, lengths_to_offsets, positions, row_ids

LENGTHS = [[], [0], [3], [0, 0], [2, 0, 5, 1, 0], [0, 4]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rows_and_positions_equal_two_nested_loops(lengths: list[int], dtype: torch.dtype) -> None:
    pairs = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=dtype))
    assert offsets.dtype == dtype
    assert offsets.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    assert row_ids(offsets, len(pairs)).tolist() == [row for row, _ in pairs]
    assert positions(offsets, len(pairs)).tolist() == [place for _, place in pairs]
    assert row_ids(offsets, len(pairs)).dtype == positions(offsets, len(pairs)).dtype == torch.int64
    check_offsets(offsets, len(pairs))


@pytest.mark.parametrize(
    ("offsets", "total", "message"),
    [
        (torch.tensor([[0, 1]]), 1, r"one-dimensional.*\(1, 2\)"),
        (torch.tensor(0), 0, "one-dimensional"),
        (torch.empty(0, dtype=torch.int64), 0, "at least|>= 1"),
        (torch.tensor([0.0, 1.0]), 1, "int32 or int64, got torch.float32"),
        (torch.tensor([0, 3]), 2, "number of values 2, got 0 to 3"),
        (torch.tensor([1, 2]), 2, "got 1 to 2"),
        (torch.tensor([0, 3, 2, 4]), 4, r"must not decrease, but spans\[1\] = 3 > 2"),
    ],
)
def test_offsets_that_are_no_layout_are_named(offsets: torch.Tensor, total: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        check_offsets(offsets, total, name="spans")
    assert "spans" in str(raised.value)
