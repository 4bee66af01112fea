"""How a KeyedJaggedTensor prints on CPU; the failing input and npu are in tests/conformance."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.stock import ours, without
from turbogr_plugin.backend.adaptations import kjt_printed_by_key
from turbogr_plugin.backend.adaptations.kjt_printed_by_key import rows_by_value


@pytest.fixture(autouse=True)
def _adapted() -> None:
    ours(kjt_printed_by_key.ADAPTATIONS)


@pytest.mark.parametrize(
    ("offsets", "length_per_key", "rows"),
    [
        ([0, 1, 2, 3, 4], [1, 3], [[1], [1, 1, 1]]),
        ([0, 2, 4], [3, 1], [[2, 1], [1]]),  # a key ends within a row
        ([0, 4, 4], [1, 1, 2], [[1], [1], [2, 0]]),
        ([0, 1, 1, 2], [1, 1], [[1], [0, 1]]),  # a row without values between two keys
        ([0, 0, 2, 2], [0, 2], [[], [0, 2, 0]]),
        ([0], [0, 0], [[], []]),
    ],
)
def test_rows_go_to_the_key_that_has_their_values(
    offsets: list[int], length_per_key: list[int], rows: list[list[int]]
) -> None:
    assert rows_by_value(offsets, length_per_key) == rows


LENGTHS = torch.tensor([2, 0, 1, 3])


@pytest.mark.parametrize(
    "made",
    [
        KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=LENGTHS, length_per_key=[2, 4]),
        KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=LENGTHS).sync(),
        KeyedJaggedTensor(["a", "b"], torch.arange(6), offsets=torch.tensor([0, 2, 2, 3, 6]), length_per_key=[2, 4]),
        KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=LENGTHS, stride_per_key_per_rank=[[1], [3]]).sync(),
        KeyedJaggedTensor(["a", "b"], torch.arange(6), torch.arange(6) / 2, lengths=LENGTHS, length_per_key=[2, 4]),
        KeyedJaggedTensor(["a", "b"], torch.empty(0), lengths=torch.empty(0, dtype=torch.int64), length_per_key=[0, 0]),
        KeyedJaggedTensor.empty(),
    ],
)
def test_what_fits_prints_as_torchrec_prints_it(made: KeyedJaggedTensor) -> None:
    text = str(made)
    with without(kjt_printed_by_key.ADAPTATIONS):
        assert str(made) == text
