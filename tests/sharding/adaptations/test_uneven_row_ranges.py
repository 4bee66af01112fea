"""Row-wise tables cut in any way read and train the same rows; without the adaptation they do not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints

from tests.npu.ranks import Call, RankPool
from tests.sharding.planned import SHARDERS, Tables, planner, shardings
from turbogr_plugin.sharding import AccessHistogram, BatchStatistics, cpu_topology

HERE = "tests.sharding.adaptations.uneven_rows_on_ranks"
EVEN = {"t0": [0, 6, 12, 18, 24], "t1": [0, 6, 12, 18, 24]}
UNEVEN = {"t0": [0, 1, 11, 23, 24], "t1": [0, 17, 18, 20, 24]}


def _planned_cut() -> dict[str, list[int]]:
    """What the planner makes of popular heads."""
    access = AccessHistogram.from_counts([40, 30, 20, 10, *[1] * 20])
    topology = cpu_topology(ranks_per_node=4, nodes=1, memory_bytes=1 << 30, intra=1e9, inter=1e9)
    constraints = {table: ParameterConstraints(sharding_types=["row_wise"]) for table in EVEN}
    statistics = BatchStatistics(access=dict.fromkeys(EVEN, access))
    plan = planner(topology, group_size=4, constraints=constraints, batch_statistics=statistics).plan(
        Tables(dict.fromkeys(EVEN, (24, 4))), SHARDERS
    )
    cuts = {}
    for table, sharding in shardings(plan).items():
        cuts[table] = [*(shard.shard_offsets[0] for shard in sharding.sharding_spec.shards), 24]
    return cuts


def _whole(of_ranks: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """All rows of each table, from the shards of all ranks."""
    found: dict[str, list[list[float]]] = {}
    for table in EVEN:
        shards = sorted(rank["rows"][table] for rank in of_ranks)
        found[table] = [row for _, rows in shards for row in rows]
    return found


@pytest.mark.timeout(150)
def test_a_cut_by_the_plan_reads_and_trains_the_rows_of_the_even_cut(ranks: RankPool) -> None:
    cuts = [EVEN, UNEVEN, _planned_cut()]
    assert EVEN not in cuts[1:]
    cases = list(itertools.product(("cpu", "npu"), (False, True)))
    calls = [
        Call(f"{HERE}:trained", {"device_type": device, "pooled": pooled, "cuts": cut}, world_size=4)
        for device, pooled in cases
        for cut in cuts
    ]
    wrong = Call(
        f"{HERE}:trained",
        {"device_type": "cpu", "pooled": False, "cuts": UNEVEN, "stock": True},
        world_size=4,
    )
    *outcomes, stock = ranks.run([*calls, wrong])
    for number, case in enumerate(cases):
        even, *others = (outcome.result() for outcome in outcomes[len(cuts) * number : len(cuts) * (number + 1)])
        for cut, found in zip(cuts[1:], others, strict=True):
            assert [rank["read"] for rank in found] == [rank["read"] for rank in even], (case, cut)
            assert _whole(found) == _whole(even), (case, cut)
    # TorchRec alone looks up other rows, or dies of rows that are not there.
    assert stock.error or [rank["read"] for rank in stock.values] != [rank["read"] for rank in outcomes[0].result()]
