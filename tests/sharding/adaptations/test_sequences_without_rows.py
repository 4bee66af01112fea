"""A sharded EmbeddingCollection whose batch has no rows on any rank; that of one rank is in tests/conformance."""

from __future__ import annotations

import pytest

from tests.npu.ranks import Call, RankPool

RUN = "tests.sharding.adaptations.on_ranks:batches_without_rows"
#: device, sharding, ranks
CASES = [
    ("cpu", "table_wise", 1),
    ("npu", "table_wise", 1),
    ("cpu", "row_wise", 2),
    ("npu", "row_wise", 2),
    ("npu", "table_wise", 2),
]


@pytest.mark.timeout(200)
def test_batches_without_rows_on_any_rank_give_no_rows_and_change_no_table(ranks: RankPool) -> None:
    calls = [Call(RUN, {"device_type": device, "kind": kind}, world_size) for device, kind, world_size in CASES]
    for case, outcome in zip(CASES, ranks.run(calls, timeout=180), strict=True):
        values = outcome.result()
        for found in values:
            assert found["shapes"] == {"f_a": [[0, 8], [0]], "f_b": [[0, 8], [0]]}, case
            assert found["change without rows"] == 0, case
        assert sum(found["change with rows"] for found in values) > 0, case


@pytest.mark.timeout(100)
def test_torchrec_alone_raises(ranks: RankPool) -> None:
    call = Call(RUN, {"device_type": "cpu", "kind": "table_wise", "stock": True})
    assert "cannot reshape tensor of 0 elements" in ranks.run([call])[0].error
