"""Known failing inputs of TorchRec about empty, uneven and malformed batches: the right values on both devices."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.torchrec_cases import DIM, ROWS, VARIABLE_BATCHES, weights
from tests.npu.ranks import Call, RankPool

CASES = "tests.conformance.torchrec_cases:"
TABLE = weights(torch.device("cpu"))

devices = pytest.mark.parametrize("device_type", ["cpu", "npu"])


@devices
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_a_rank_with_an_empty_batch_takes_part_in_a_sequence_lookup(
    ranks: RankPool, sharding: str, device_type: str
) -> None:
    # https://github.com/meta-pytorch/torchrec/issues/2773; mended by sharding/adaptations/sequences_without_rows.py.
    call = Call(CASES + "sequences_with_an_empty_batch", {"sharding": sharding, "device_type": device_type}, 2)
    with_rows, without = (value["found"] for value in ranks.run([call])[0].result())
    assert with_rows == {
        "a": [TABLE[[1, 2]].tolist(), [2, 0]],
        "b": [TABLE[[3, 19, 3]].tolist(), [1, 2]],
    }
    assert without == {"a": [[], []], "b": [[], []]}


@devices
def test_the_table_is_updated_for_the_ranks_that_have_rows(ranks: RankPool, device_type: str) -> None:
    call = Call(CASES + "sequences_with_an_empty_batch", {"sharding": "row_wise", "device_type": device_type}, 2)
    updated = [row for value in ranks.run([call])[0].result() for shard in value["table"] for row in shard]
    # The gradient of each embedding is 1; TorchRec divides those of a table by the two ranks. Row 3 is looked up twice.
    expected = TABLE.clone().index_add_(0, torch.tensor([1, 2, 3, 19, 3]), torch.full((5, DIM), -0.5))
    assert updated == expected.tolist()


@devices
@pytest.mark.parametrize("weighted", [False, True])
def test_to_dict_of_a_batch_without_rows_has_every_key(ranks: RankPool, device_type: str, weighted: bool) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/4638; mended by backend/adaptations/kjt_without_rows.py.
    call = Call(CASES + "empty_to_dict", {"device_type": device_type, "weighted": weighted})
    assert ranks.run([call])[0].result() == [{"a": [[], [], [0]], "b": [[], [], [0]]}]


@devices
def test_an_unsharded_collection_looks_up_a_batch_without_rows(ranks: RankPool, device_type: str) -> None:
    call = Call(CASES + "empty_lookup", {"device_type": device_type})
    assert ranks.run([call])[0].result() == [{"a": [0, DIM, 0], "b": [0, DIM, 0]}]


@devices
@pytest.mark.parametrize("sharding", ["table_wise", "column_wise", "row_wise", "table_row_wise"])
def test_ranks_without_a_table_take_part_in_a_variable_batch(ranks: RankPool, sharding: str, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/978 and /1566: the one table is on one rank of four, on two by
    # columns, or on the two ranks of one host. Rows of all features together are as many on every rank: sharded by
    # rows, the backward pass gathers equal sizes on gloo.
    arguments = {"sharding": sharding, "device_type": device_type, "case": "varying"}
    found = ranks.run([Call(CASES + "variable_batch", arguments, 4)])[0].result()
    assert found == [VARIABLE_BATCHES["varying"][rank % 2].pooled() for rank in range(4)]


@devices
@pytest.mark.parametrize("sharding", ["table_wise", "column_wise"])
def test_a_rank_whose_batch_sizes_happen_to_agree_may_share_a_variable_batch(
    ranks: RankPool, sharding: str, device_type: str
) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/4459: a KJT made by `from_jt_dict` forgets there that the sizes
    # vary. One made with stride_per_key_per_rank, as here, does not.
    arguments = {"sharding": sharding, "device_type": device_type, "case": "uniform"}
    found = ranks.run([Call(CASES + "variable_batch", arguments, 2)])[0].result()
    assert found == [batch.pooled() for batch in VARIABLE_BATCHES["uniform"]]


@devices
def test_features_with_different_numbers_of_rows_print_as_they_are(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/issues/1075: with length_per_key alone TorchRec shares the rows evenly.
    text, values = ranks.run([Call(CASES + "printed", {"device_type": device_type})])[0].result()[0]
    assert '"user": [[1], [2], [3]]' in text
    assert '"item": [[4], [5], [6], [7], [8]]' in text
    assert values == "{'user': [1, 2, 3], 'item': [4, 5, 6, 7, 8]}"


@devices
@pytest.mark.parametrize(
    ("case", "numbers"),
    [
        # https://github.com/meta-pytorch/torchrec/issues/1756
        ("lengths do not divide by the keys", ["20", "2114"]),
        ("lengths do not divide by the stride", ["105", "2114"]),
        ("lengths do not add up to the values", ["4", "5"]),
    ],
)
def test_lengths_that_do_not_fit_are_refused_with_the_numbers(
    ranks: RankPool, device_type: str, case: str, numbers: list[str]
) -> None:
    (message,) = ranks.run([Call(CASES + "refused", {"device_type": device_type, "case": case})])[0].result()
    assert message.startswith(("ValueError", "RuntimeError"))
    assert [number for number in numbers if number not in message] == []


def test_the_table_of_the_cases_tells_its_rows_apart() -> None:
    assert len({tuple(row) for row in TABLE.tolist()}) == ROWS
