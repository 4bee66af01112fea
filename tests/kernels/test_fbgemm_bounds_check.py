"""The check of ids and offsets, with tensors on the CPU, against fbgemm's own CPU kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from turbogr_plugin.kernels.fbgemm_bounds_check import FATAL, IGNORE, WARNING, bounds_check_indices

ROWS = torch.tensor([5, 9, 1])


def spoilt(
    generator: torch.Generator, dtype: torch.dtype, by_feature: list[int]
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Ids and offsets of which some are wrong, and with unequal sizes the first bag of each feature."""
    bags = sum(by_feature)
    lengths = torch.randint(0, 4, (bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.randint(-2, 8, (int(offsets[-1]),), generator=generator)
    for _ in range(int(torch.randint(0, 3, (), generator=generator))):
        place = int(torch.randint(0, bags + 1, (), generator=generator))
        offsets[place] += int(torch.randint(-6, 7, (), generator=generator))
    variable = len(set(by_feature)) > 1
    first = torch.tensor([0, *torch.tensor(by_feature).cumsum(0).tolist()], dtype=torch.int32) if variable else None
    return indices.to(dtype), offsets.to(dtype), first, max(by_feature)


@pytest.mark.parametrize("by_feature", [[4, 4, 4], [3, 0, 5], [0, 0, 0]], ids=["equal", "variable", "none"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", [WARNING, IGNORE], ids=["warning", "ignore"])
def test_repaired_input_and_counter_equal_those_of_the_cpu_kernel(
    mode: int, dtype: torch.dtype, by_feature: list[int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        indices, offsets, first, largest = spoilt(generator, dtype, by_feature)
        warnings = torch.tensor([77]), torch.tensor([77])
        expected, found = (indices.clone(), offsets.clone()), (indices.clone(), offsets.clone())
        torch.ops.fbgemm.bounds_check_indices(ROWS, *expected, mode, warnings[0], B_offsets=first, max_B=largest)
        bounds_check_indices(ROWS, *found, mode, warnings[1], B_offsets=first, max_B=largest)
        given = f"indices {indices.tolist()} offsets {offsets.tolist()}"
        assert found[1].tolist() == expected[1].tolist(), given
        assert found[0].tolist() == expected[0].tolist(), given
        assert warnings[1].tolist() == warnings[0].tolist(), given


@pytest.mark.parametrize("by_feature", [[4, 4, 4], [3, 0, 5]], ids=["equal", "variable"])
def test_fatal_raises_where_the_cpu_kernel_does_and_changes_nothing(by_feature: list[int]) -> None:
    generator = torch.Generator().manual_seed(2)
    raised = 0
    for _ in range(60):
        indices, offsets, first, largest = spoilt(generator, torch.int64, by_feature)
        indices = indices.clamp(-1, 0) if raised % 2 else indices
        given = indices.clone(), offsets.clone()
        arguments: tuple[Any, ...] = (FATAL, torch.zeros(1, dtype=torch.int64))
        try:
            torch.ops.fbgemm.bounds_check_indices(
                ROWS, indices.clone(), offsets.clone(), *arguments, B_offsets=first, max_B=largest
            )
        except RuntimeError:
            raised += 1
            with pytest.raises(ValueError, match="bounds_check_mode FATAL"):
                bounds_check_indices(ROWS, indices, offsets, *arguments, B_offsets=first, max_B=largest)
        else:
            bounds_check_indices(ROWS, indices, offsets, *arguments, B_offsets=first, max_B=largest)
        assert torch.equal(indices, given[0])
        assert torch.equal(offsets, given[1])
    assert 10 < raised < 60


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        ([1, 9, 0], [0, 1, 2, 3], "id 9 at position 1 belongs to feature 1, whose table has 9 rows"),
        ([1, 8, -5], [0, 1, 2, 3], "id -5 at position 2 belongs to feature 2, whose table has 1 rows"),
        ([1, 2, 0], [0, 2, 1, 3], "bag 1 goes from offset 2 to 1; offsets must not decrease and lie in 0 to 3"),
        ([1, 2, 0], [-1, 2, 2, 3], "bag 0 goes from offset -1 to 2"),
        ([1, 2, 0], [0, 1, 2, 2], "offsets end at 2, but there are 3 ids"),
        ([2**40], [0, 1, 1, 1], "id 1099511627776 at position 0 belongs to feature 0, whose table has 5 rows"),
    ],
)
def test_fatal_names_the_first_violation_with_its_numbers(indices: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounds_check_indices(
            ROWS, torch.tensor(indices), torch.tensor(offsets), FATAL, torch.zeros(1, dtype=torch.int64)
        )


def test_strided_input_of_two_integer_types_is_repaired_in_place() -> None:
    indices = torch.tensor([[7, 0], [8, 0], [3, 0]], dtype=torch.int32)[:, 0]
    offsets = torch.tensor([[0, 0], [1, 0], [9, 0], [3, 0]])[:, 0]
    bounds_check_indices(ROWS, indices, offsets, WARNING, counter := torch.zeros(1, dtype=torch.int64))
    assert indices.tolist() == [0, 8, 3]
    assert offsets.tolist() == [0, 1, 3, 3]
    assert counter.tolist() == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bounds_check_mode": 3}, "bounds_check_mode must be 0"),
        ({"offsets": torch.tensor([0, 1, 1])}, "offsets has 3 elements, which is no multiple of 3 features plus 1"),
        ({"weights": torch.ones(3)}, "weights has 3 elements for 1 indices"),
        ({"B_offsets": torch.tensor([0, 1, 2, 3])}, "B_offsets came with max_B -1"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "rows_per_table": ROWS,
        "indices": torch.tensor([0]),
        "offsets": torch.tensor([0, 1, 1, 1]),
        "bounds_check_mode": WARNING,
        "warning": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        bounds_check_indices(**(given | changes))
