"""Lengths and offsets that do not lay out the values are refused on their way to the npu, whatever batch it is."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.stock import ours, without
from turbogr_plugin.backend.adaptations import kjt_checked_on_host

KEYS = ["a", "b"]
NPU = "npu"


@pytest.fixture(autouse=True)
def _adapted() -> None:
    ours(kjt_checked_on_host.ADAPTATIONS)


def kjt(lengths: list[int] | None = None, offsets: list[int] | None = None, values: int = 5) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.arange(values),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        offsets=None if offsets is None else torch.tensor(offsets),
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (kjt([1, -2, 3, 3]), "lengths must not be negative, got -2 at position 1"),
        (kjt([1, 2, 3, 3]), "lengths must add up to the 5 values, got 9"),
        (kjt([1, 1, 0, 0]), "lengths must add up to the 5 values, got 2"),
        (kjt(offsets=[0, 3, 2, 4, 5]), r"offsets must not decrease, got \[3, 2\] from position 1 on"),
        (kjt(offsets=[0, 1, 2, 3, 4]), "offsets must go from 0 to the 5 values, got 0 to 4"),
        (kjt(offsets=[1, 1, 2, 3, 5]), "offsets must go from 0 to the 5 values, got 1 to 5"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_numbers(made: KeyedJaggedTensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made.to(torch.device(NPU), non_blocking=True)
    made.to(torch.device("cpu"))  # TorchRec on CPU stays as it is


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        ({}, [3, 1], r"sums of the lengths of \[2, 2\] rows, which are \[2, 2\], got \[3, 1\]"),
        ({"stride_per_key_per_rank": [[1], [3]]}, [2, 2], r"\[1, 3\] rows, which are \[1, 3\], got \[2, 2\]"),
    ],
)
@pytest.mark.parametrize("layout", ["lengths", "offsets"])
def test_numbers_of_values_that_are_not_those_of_the_rows_are_refused(
    rows: dict[str, list[list[int]]], given: list[int], message: str, layout: str
) -> None:
    places = torch.ones(4, dtype=torch.int64) if layout == "lengths" else torch.arange(5)
    made = KeyedJaggedTensor(KEYS, torch.arange(4), length_per_key=given, **{layout: places}, **rows)
    with pytest.raises(ValueError, match=message):
        made.to(torch.device(NPU))
    made.to(torch.device("cpu"))


def test_without_the_adaptation_they_pass() -> None:
    with without(kjt_checked_on_host.ADAPTATIONS):
        assert kjt([1, -2, 3, 3]).to(torch.device(NPU)).values().device.type == NPU


@pytest.mark.parametrize(
    "made", [kjt([2, 0, 3, 0]), kjt(offsets=[0, 0, 0, 5, 5]), kjt([0, 0], values=0), kjt([2, 0, 3, 0]).sync()]
)
def test_what_fits_goes_to_the_npu(made: KeyedJaggedTensor) -> None:
    moved = made.to(torch.device(NPU), non_blocking=True)
    assert moved.values().cpu().tolist() == made.values().tolist()
    assert moved.lengths().cpu().tolist() == made.lengths().tolist()


def test_a_module_that_moves_one_still_compiles_by_torchscript() -> None:
    class Move(torch.nn.Module):
        def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return ids.to(torch.device("cpu"))

    assert torch.jit.script(Move())(kjt([2, 0, 3, 0])).values().tolist() == [0, 1, 2, 3, 4]
