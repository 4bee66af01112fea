"""Plans that cannot be carried out on npu are refused by every rank alike, before any collective."""

from __future__ import annotations

import pytest

from tests.npu.ranks import Call, RankPool

HERE = "tests.sharding.adaptations.on_ranks"

#: What each message holds; {rank} is the rank's own.
MESSAGES = {
    "kernel": "table 't': compute kernel 'fused_uvm_caching' does not exist on npu",
    "device": "table 't': the plan puts a shard at rank:0/cpu, the module is sharded on npu",
    "world": "table 't': the plan puts a shard at rank:2/npu:2, there are 2 ranks: plan with Topology(world_size=2)",
    "index": "table 't': the plan puts a shard at rank:{rank}/npu:{rank}, rank {rank} uses npu:{index} of the 8",
    "fitting": "ShardedEmbeddingBagCollection",
}


@pytest.mark.timeout(150)
def test_a_plan_that_does_not_fit_is_refused_with_its_numbers_by_every_rank(ranks: RankPool) -> None:
    calls = [Call(f"{HERE}:refusal", {"case": case}, world_size=2) for case in MESSAGES]
    stock = Call(f"{HERE}:stock_takes_a_uvm_table_into_hbm", {}, world_size=2)
    *outcomes, without_check = ranks.run([*calls, stock])
    for (case, message), outcome in zip(MESSAGES.items(), outcomes, strict=True):
        for rank, found in enumerate(outcome.result()):
            assert message.format(rank=rank, index=(rank + 3) % 8) in found, case
    assert without_check.result() == ["npu", "npu"]
