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
@pytest.mark.parametrize("sharding", ["table_wise", "column_wise"])
def test_a_rank_with_an_empty_batch_takes_part_in_a_pooled_lookup(
    ranks: RankPool, sharding: str, device_type: str
) -> None:
    # Not by rows: the reduce-scatter of TorchRec wants as many rows on every rank.
    call = Call(CASES + "bags_with_an_empty_batch", {"sharding": sharding, "device_type": device_type}, 2)
    with_rows, without = ranks.run([call])[0].result()
    expected = [
        torch.cat([TABLE[[1, 2]].sum(0), TABLE[3]]).tolist(),
        torch.cat([torch.zeros(DIM), TABLE[[19, 3]].sum(0)]).tolist(),
    ]
    assert [with_rows["found"], without["found"]] == [expected, []]
    updated = TABLE.clone().index_add_(0, torch.tensor([1, 2, 3, 19, 3]), torch.full((5, DIM), -0.5))
    shards = [torch.tensor(shard) for rank in (with_rows, without) for shard in rank["table"]]
    assert torch.equal(torch.cat(shards, 1), updated)


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


FORCED = {"force_variable_stride": True}


@devices
@pytest.mark.parametrize("sharding", ["table_wise", "column_wise"])
def test_a_rank_whose_batch_sizes_happen_to_agree_may_share_a_variable_batch(
    ranks: RankPool, sharding: str, device_type: str
) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/4459: batches made by `from_jt_dict`, whose argument
    # backend/adaptations/kjt_variable_strides.py adds.
    shared = {"sharding": sharding, "device_type": device_type, "case": "uniform"}
    calls = [
        Call(CASES + "variable_batch_of_a_dictionary", {**shared, "options": FORCED}, 2),
        Call(CASES + "variable_batch", shared, 2),  # made with stride_per_key_per_rank
    ]
    expected = [batch.pooled() for batch in VARIABLE_BATCHES["uniform"]]
    assert [outcome.result() for outcome in ranks.run(calls)] == [expected, expected]


@devices
@pytest.mark.parametrize(("options", "second"), [({}, [False, []]), (FORCED, [True, [[2], [2]]])])
def test_a_batch_of_a_dictionary_forgets_sizes_that_agree_unless_it_is_told(
    ranks: RankPool, device_type: str, options: dict[str, bool], second: list[object]
) -> None:
    # Without the argument it stays as it was: nothing in the dictionary says that the sizes vary on other ranks. There
    # the lookup of both ranks then ends in whatever the tensors hold that they do not have in common.
    call = Call(CASES + "strides_of_a_dictionary", {"device_type": device_type, "options": options})
    assert ranks.run([call])[0].result() == [[[True, [[2], [1]]], second]]


@devices
@pytest.mark.parametrize("weighted", [False, True])
def test_a_tensor_prints_under_each_key_the_values_that_the_key_has(
    ranks: RankPool, device_type: str, weighted: bool
) -> None:
    # https://github.com/meta-pytorch/torchrec/issues/1075; mended by backend/adaptations/kjt_printed_by_key.py.
    call = Call(CASES + "printed", {"device_type": device_type, "weighted": weighted})
    found = ranks.run([call])[0].result()[0]
    assert found["values"] == {"user": [1, 2, 3], "item": [4, 5, 6, 7, 8]}
    user, item = "[[1], [2], [3]]", "[[4], [5], [6], [7], [8]]"
    if weighted:
        assert f'"user": {{\n        "values": {user},\n        "weights": [[0.25], [0.5], [0.75]]' in found["text"]
        assert f'"item": {{\n        "values": {item}' in found["text"]
    else:
        assert f'"user": {user}' in found["text"]
        assert f'"item": {item}' in found["text"]


def test_such_a_tensor_is_looked_up_by_its_lengths_on_cpu_and_refused_on_its_way_to_the_npu(ranks: RankPool) -> None:
    # What stock TorchRec does on CPU, and stays: 4 rows for each key, of which those of "user" have a value too many.
    # The remedy is the batch with stride_per_key_per_rank, which has 3 rows and 5.
    (on_cpu,) = ranks.run([Call(CASES + "printed", {"device_type": "cpu"})])[0].result()
    assert on_cpu["lengths"] == {"user": [1] * 4, "item": [1] * 4}
    (remedied,) = ranks.run([Call(CASES + "printed", {"device_type": "npu", "strides": [[3], [5]]})])[0].result()
    assert remedied["lengths"] == {"user": [1] * 3, "item": [1] * 5}
    assert remedied["text"] == on_cpu["text"]
    (error,) = ranks.run([Call(CASES + "printed", {"device_type": "npu", "moved": True})])[0].errors
    assert (
        "ValueError: length_per_key must be the sums of the lengths of [4, 4] rows, which are [4, 4], got [3, 5]"
        in error
    )


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
