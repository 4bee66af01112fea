"""Known failing inputs of TorchRec's planner, and the order of embeddings, on both devices."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.torchrec_cases import ORDER_BATCH, ORDER_TABLES, ROWS, order_ids, order_weights, weights
from tests.npu.ranks import Call, RankPool

CASES = "tests.conformance.torchrec_cases:"
WEIGHTS = 1024 * 16 * 4  # bytes of the planned table

devices = pytest.mark.parametrize("device_type", ["cpu", "npu"])


@devices
@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("none", 0), ("SGD", 0), ("RowWiseAdagrad", 1024 * 4), ("Adam", 2 * WEIGHTS)],
)
def test_the_planner_counts_the_state_of_the_optimizer(
    ranks: RankPool, device_type: str, optimizer: str, state: int
) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/2652
    arguments = {"device_type": device_type, "optimizer": optimizer}
    outcomes = ranks.run(
        [Call(CASES + "planned_bytes", {**arguments, "optimizer": name}) for name in ("none", optimizer)]
    )
    (without,), (found,) = (outcome.result() for outcome in outcomes)
    assert found["bytes"] - without["bytes"] == state
    assert without["bytes"] >= WEIGHTS
    assert found["other"] == 0  # nothing is reckoned to the other kind of memory


@devices
def test_every_table_is_in_the_plan(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/3652
    call = Call(CASES + "planned_bytes", {"device_type": device_type, "optimizer": "none"})
    assert ranks.run([call])[0].result()[0]["planned"] == ["t", "u"]


@devices
def test_a_lone_embedding_bag_is_planned_as_it_can_be_sharded(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/issues/602; mended by sharding/adaptations/sharding_types.py.
    outcome = ranks.run([Call(CASES + "lone_embedding_bag", {"device_type": device_type}, 2)])[0]
    table = weights(torch.device("cpu"))
    for rank in outcome.result():
        assert rank["types"] != ["table_wise"]
        assert rank["bags"] == [(table[1] + table[2]).tolist(), table[19].tolist()]


@devices
def test_optimizer_state_is_named_alike_however_a_table_is_sharded(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/issues/2394. Right for data-parallel tables were the same names, so that
    # a checkpoint fits any plan. That is how TorchRec is made and gets no cure here: their optimizer is not among the
    # fused ones, whose state has nothing of them.
    kinds = ("row_wise", "table_wise", "column_wise", "table_row_wise")
    calls = [Call(CASES + "state_names", {"sharding": kind, "device_type": device_type}, 1) for kind in kinds]
    names = [outcome.result()[0] for outcome in ranks.run(calls)]
    assert names == [[["embedding_bags.t.weight"], ["t.momentum1"]]] * len(kinds)
    (outcome,) = ranks.run([Call(CASES + "state_names", {"sharding": "data_parallel", "device_type": device_type}, 1)])
    assert outcome.result() == [[[], []]]


@devices
def test_embeddings_of_many_groups_and_dims_come_in_the_order_of_the_tables(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/1646: the order went unnoticed with one group, one dim and a
    # tolerance of 1. Here every element is its own, and compared exactly.
    outcome = ranks.run([Call(CASES + "ordered_embeddings", {"device_type": device_type}, 4)])[0]
    for rank, (keys, pooled) in enumerate(outcome.result()):
        ids = order_ids(rank)
        owners = {feature: (name, dim) for name, dim, features, _ in ORDER_TABLES for feature in features}
        assert sorted(keys) == sorted(owners)
        expected = [
            [
                value
                for key in keys
                for value in order_weights(owners[key][0], ROWS, owners[key][1])[ids[key][row]].sum(0)
            ]
            for row in range(ORDER_BATCH)
        ]
        assert pooled == torch.tensor(expected).tolist()
