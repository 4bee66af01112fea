"""The shards that a rank holds, from state dicts of both of TorchRec's kinds."""

from __future__ import annotations

import pytest

from tests.npu.ranks import Call, RankPool

HERE = "tests.sharding.hierarchical_runs:shards_of_states"
CASES = [(None, "column_wise"), (2, "column_wise"), (2, "row_wise"), (1, "table_wise")]


@pytest.mark.timeout(150)
def test_the_shards_of_a_group_make_the_table_and_tell_whether_rows_are_cut(ranks: RankPool) -> None:
    calls = [Call(HERE, {"group": group, "sharding": sharding}, world_size=4) for group, sharding in CASES]
    for case, outcome in zip(CASES, ranks.run(calls), strict=True):
        kinds = {"ShardedTensor"} if case[0] is None else {"DTensor"}
        for found in outcome.result():
            assert set(found["kinds"]) == kinds, case
            assert found["whole"], case
            assert found["shapes"], case
            assert any(found["cut"]) == (case[1] == "column_wise"), case
            assert found["told"] == found["cut"], case
