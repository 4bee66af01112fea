from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.sharding.balanced_runs import batch_of_numbers, same
from turbogr_plugin.sharding.sample_columns import batch_of, columns_of, join, ragged_index, structure_of

Pair = namedtuple("Pair", ["left", "right"])


def _taken(numbers: list[int], order: list[int]) -> Any:
    batch = batch_of_numbers(numbers)
    columns, samples = columns_of(batch)
    assert samples == len(numbers)
    return batch_of(batch, [column.take(torch.tensor(order, dtype=torch.int64)) for column in columns])


@pytest.mark.parametrize("order", [[], [0], [3, 1], [4, 3, 2, 1, 0], [2, 2, 0]])
def test_samples_are_taken_whole_in_any_order(order: list[int]) -> None:
    numbers = [3, 8, 40, 13, 22]
    assert same(_taken(numbers, order), batch_of_numbers([numbers[place] for place in order]))


def test_batches_are_joined_sample_after_sample() -> None:
    parts = [batch_of_numbers(numbers) for numbers in ([1, 2], [], [39, 7, 8])]
    columns = [join(same_part) for same_part in zip(*(columns_of(part)[0] for part in parts), strict=True)]
    assert same(batch_of(parts[0], columns), batch_of_numbers([1, 2, 39, 7, 8]))


def test_every_kind_of_nesting_is_kept() -> None:
    batch = {"a": [torch.arange(3), None], "b": Pair(torch.ones(3, 2), (torch.zeros(3),))}
    columns, _ = columns_of(batch)
    back = batch_of(batch, [column.take(torch.tensor([2, 0])) for column in columns])
    assert back["a"][0].tolist() == [2, 0] and back["a"][1] is None
    assert isinstance(back["b"], Pair) and back["b"].left.shape == (2, 2) and isinstance(back["b"].right, tuple)


def test_values_behind_the_last_row_of_a_jagged_tensor_are_not_sent() -> None:
    padded = JaggedTensor(torch.arange(10), lengths=torch.tensor([2, 0, 3]))
    columns, _ = columns_of(padded)
    assert columns[0].values.tolist() == [0, 1, 2, 3, 4]


def test_rows_are_found_among_ragged_ones() -> None:
    lengths = torch.tensor([2, 0, 3, 1])
    assert ragged_index(lengths, torch.tensor([2, 1, 0, 3])).tolist() == [2, 3, 4, 0, 1, 5]
    assert ragged_index(lengths, torch.tensor([], dtype=torch.int64)).tolist() == []


def test_sizes_count_the_values_of_groups_of_samples() -> None:
    columns, _ = columns_of(JaggedTensor(torch.arange(6), lengths=torch.tensor([2, 0, 3, 1])))
    assert columns[0].sizes([3, 0, 1]) == [5, 0, 1]
    assert columns_of(torch.ones(4))[0][0].sizes([3, 0, 1]) == [3, 0, 1]


def test_structures_differ_by_part_key_dtype_and_shape() -> None:
    ids = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor([2, 0]))
    batches: list[Any] = [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        {"x": torch.zeros(2)},
        {"y": torch.zeros(2)},
        ids,
        KeyedJaggedTensor(["b"], torch.arange(2), lengths=torch.tensor([2, 0])),
        KeyedJaggedTensor(["a"], torch.arange(2), torch.ones(2), lengths=torch.tensor([2, 0])),
        JaggedTensor(torch.arange(2), lengths=torch.tensor([2, 0])),
    ]
    found = [structure_of(batch) for batch in batches]
    assert len(set(found)) == len(found) and min(found) > 0
    assert structure_of(torch.ones(7)) == found[0]


def test_what_is_not_made_of_samples_is_refused() -> None:
    for batch, error, message in (
        ({"x": torch.ones(2), "step": 3}, TypeError, r"batch\['step'\] is a int: a batch consists of tensors"),
        ([torch.ones(2), torch.ones(3)], ValueError, r"as many samples, got \{'batch\[0\]': 2, 'batch\[1\]': 3\}"),
        (torch.tensor(1.0), ValueError, "batch is a scalar"),
        ({"x": None}, ValueError, "batch has no tensor"),
    ):
        with pytest.raises(error, match=message):
            columns_of(batch)
    variable = KeyedJaggedTensor(
        ["a", "b"], torch.arange(3), lengths=torch.tensor([1, 1, 1]), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(ValueError, match="batch has a stride per key"):
        columns_of(variable)


def test_weights_behind_the_last_row_of_a_jagged_tensor_are_not_sent() -> None:
    padded = JaggedTensor(torch.arange(10), lengths=torch.tensor([2, 0, 3]), weights=torch.arange(10) / 10)
    (column,), samples = columns_of(padded)
    assert samples == 3 and column.weights is not None
    assert torch.equal(column.weights, torch.arange(5) / 10)
    twice = join([column, column])
    assert twice.weights is not None and len(twice.weights) == len(twice.values) == 10
    back = batch_of(padded, [twice.take(torch.tensor([5, 0]))])
    assert back.values().tolist() == [2, 3, 4, 0, 1]
    assert torch.equal(back.weights(), back.values() / 10)
