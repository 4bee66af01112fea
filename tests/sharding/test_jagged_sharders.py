"""What our sharders make of rows in fp16 and of tables in fp16 and bf16: bytes, and what rounding does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.lookup.bytes import ratio
from tests.npu.ranks import Call, RankPool
from turbogr_plugin.sharding.jagged_sharders import (
    JaggedEmbeddingBagCollectionSharder,
    JaggedEmbeddingCollectionSharder,
)

RUN, PLACES = "tests.sharding.lookup_runs:", "tests.sharding.lookup_places:"


@pytest.mark.timeout(120)
def test_rows_in_fp16_halve_the_bytes_returned_and_those_of_every_collective(ranks: RankPool) -> None:
    cases = [
        {"kind": "sequence", "sharding": "row_wise", "device": "cpu"},
        {"kind": "pooled", "sharding": "row_wise", "device": "cpu"},
        {"kind": "sequence", "sharding": "table_wise", "device": "npu"},
        {"kind": "pooled", "sharding": "table_wise", "device": "npu"},
    ]
    found = ranks.run([Call(f"{RUN}bytes_of_rows", case, world_size=2) for case in cases])
    for case, outcome in zip(cases, found, strict=True):
        for counts in outcome.result():
            assert {"rows returned", "gradients returned"} < counts["fp32"].keys() == counts["fp16"].keys(), case
            assert ratio({"this": counts}) <= 0.51, case


def test_what_a_rank_sends_is_counted_once_and_integers_are_not(ranks: RankPool) -> None:
    (outcome,) = ranks.run([Call(f"{RUN}counted_collectives", world_size=2)])
    assert outcome.result() == [{"allreduce": 40 + 20, "_allgather_base": 6, "alltoall_base": 16}] * 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_stochastic_rounding_keeps_updates_that_rounding_to_nearest_loses(ranks: RankPool, data_type: str) -> None:
    """After 64 updates of 1/8 of the spacing: to nearest nothing, stochastically 8 spacings on average."""
    cases = [
        {"device": device, "data_type": data_type, "stochastic": stochastic}
        for device in ("cpu", "npu")
        for stochastic in (False, True)
    ]
    found = [outcome.result()[0] for outcome in ranks.run([Call(f"{RUN}drift", case) for case in cases])]
    nearest, stochastic, nearest_npu, stochastic_npu = map(torch.tensor, found)
    assert not nearest.any()
    assert not nearest_npu.any()
    assert torch.equal(stochastic, stochastic_npu)  # the draws are keyed
    steps, chance = 64, 1 / 8
    moved = stochastic[: stochastic.numel()].double()
    error = math.sqrt(steps * chance * (1 - chance) / moved.numel())
    assert abs(float(moved.mean()) - steps * chance) < 5 * error
    assert moved.unique().numel() > 5  # elements are drawn apart
    assert float(moved.std()) == pytest.approx(math.sqrt(steps * chance * (1 - chance)), rel=0.25)


@pytest.mark.timeout(120)
def test_ids_are_deduplicated_on_cpu_too(ranks: RankPool) -> None:
    case: dict[str, Any] = {"kind": "sequence", "sharding": "row_wise", "ours": True}
    calls = [Call(f"{RUN}train", {**case, **changes}, world_size=2) for changes in ({}, {"dedup": True})]
    stock = Call(f"{RUN}train", {**case, "ours": False, "dedup": True}, world_size=2)
    plain, deduplicated, theirs = ranks.run([*calls, stock])
    # the gradients are small dyadic numbers: summed by rank first or not, they are the same
    assert deduplicated.result() == plain.result()
    assert all("jagged_unique_indices" in error for error in theirs.errors)


@pytest.mark.timeout(120)
def test_a_model_that_is_sharded_already_deduplicates_on_our_lookup(ranks: RankPool) -> None:
    calls = [Call(f"{PLACES}deduplicated_afterwards", {"dedup": dedup}, world_size=2) for dedup in (False, True)]
    plain, deduplicated = (outcome.result() for outcome in ranks.run(calls))
    for there, here in zip(plain, deduplicated, strict=True):
        assert (there["class"], there["unique ran"]) == ("ShardedEmbeddingCollection", False)
        assert (here["class"], here["unique ran"]) == ("DeduplicatingCollection", True)
        assert (here["losses"], here["tables"]) == (there["losses"], there["tables"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("collection", ["managed_collision", "feature_processors"])
def test_our_sharders_stand_inside_those_of_other_collections(ranks: RankPool, collection: str) -> None:
    arguments = {"collection": collection}
    calls = [Call(f"{PLACES}inside_another", {**arguments, "ours": ours}, world_size=2) for ours in (False, True)]
    theirs, ours = (outcome.result() for outcome in ranks.run(calls))
    for there, here in zip(theirs, ours, strict=True):
        assert (there["ours ran"], here["ours ran"]) == (False, True)
        assert _flat(here["found"]) == pytest.approx(_flat(there["found"]), rel=1e-6, abs=1e-7)


def _flat(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in _flat(part)]
    return [float(value)]


def test_tables_that_were_resharded_have_our_lookup_again(ranks: RankPool) -> None:
    (outcome,) = ranks.run([Call(f"{PLACES}resharded")])
    assert outcome.result() == [["SplitTableBatchedEmbeddingBagsCodegen", "JaggedLookupTables"]]


def test_fbgemm_on_cpu_ignores_stochastic_rounding(ranks: RankPool) -> None:
    arguments = {"device": "cpu", "data_type": "FP16", "stochastic": True, "ours": False, "steps": 4}
    (outcome,) = ranks.run([Call(f"{RUN}drift", arguments)])
    assert not any(outcome.result()[0])


@pytest.mark.parametrize("sharder", [JaggedEmbeddingCollectionSharder(), JaggedEmbeddingBagCollectionSharder()])
def test_only_kernels_that_ours_serves_are_offered(sharder: Any) -> None:
    assert sharder.compute_kernels("table_wise", "cuda") == ["fused"]
    assert sharder.compute_kernels("data_parallel", "cpu") == ["dense"]
