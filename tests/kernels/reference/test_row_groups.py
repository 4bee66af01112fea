"""Grouping of duplicate ids and the sum of their gradients."""

from __future__ import annotations

import pytest
import torch

from turbogr_plugin.kernels.reference.row_groups import group_rows, sum_groups


@pytest.mark.parametrize("rows", [[7], [3, 3, 3], [5, 1, 5, 2, 1, 5], list(range(9, -1, -1)), [2**61, 0, 2**61]])
@pytest.mark.parametrize("absent", ["none", "some", "all"])
def test_every_row_comes_once_and_the_places_behind_repeat_the_last(rows: list[int], absent: str) -> None:
    left_out = [absent == "all" or (absent == "some" and position % 3 == 1) for position in range(len(rows))]
    groups = group_rows(torch.tensor(rows), torch.tensor(left_out))
    wanted = sorted({row for row, out in zip(rows, left_out, strict=True) if not out})
    named = [rows[position] for position in groups.representative.tolist()]
    assert bool(groups.any_row) == bool(wanted)
    if wanted:
        assert named == wanted + [wanted[-1]] * (len(rows) - len(wanted))
        assert groups.place.tolist() == [min(place, len(wanted) - 1) for place in range(len(rows))]
    gradients = torch.arange(1.0, len(rows) + 1).unsqueeze(1)
    sums = sum_groups(groups, gradients.index_select(0, groups.order)).flatten().tolist()
    for name, total in zip(named, sums, strict=True):
        if wanted:
            assert total == sum(
                position + 1
                for position, (row, out) in enumerate(zip(rows, left_out, strict=True))
                if row == name and not out
            )


def test_gradients_of_a_row_are_added_in_the_order_of_the_batch() -> None:
    # in float32 2^24 + 1 + 1 is 2^24, and 1 + 1 + 2^24 is 2^24 + 2
    for values in ([2.0**24, 1.0, 1.0], [1.0, 1.0, 2.0**24]):
        groups = group_rows(torch.tensor([4, 0, 4, 4]), torch.zeros(4, dtype=torch.bool))
        gradients = torch.tensor([values[0], 0.0, values[1], values[2]]).unsqueeze(1)
        expected = torch.tensor(values[0]) + values[1] + values[2]
        assert float(sum_groups(groups, gradients.index_select(0, groups.order))[1]) == float(expected)
