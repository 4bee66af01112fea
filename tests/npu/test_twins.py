"""Twin tests of the adaptations that mend TorchRec's faults and of the refusals: what stock does where they are absent.

What happens with them is tested in tests/conformance, test_matrix.py and test_compatibility.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu.ranks import Call, Outcome, RankPool

CASES = "tests.conformance.torchrec_cases:"
USE = "tests.npu.compatibility_cases:use"
RUN = "tests.npu.script:run"

pytestmark = pytest.mark.timeout(240)


def _stock(ranks: RankPool, module: str, function: str, arguments: dict[str, Any], size: int = 1) -> Outcome:
    call = {"module": f"turbogr_plugin.{module}", "function": function, "arguments": arguments}
    return ranks.run([Call("tests.npu.twins:stock", call, size)])[0]


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
def test_stock_cannot_take_a_batch_without_rows_apart(ranks: RankPool, device_type: str) -> None:
    arguments = {"device_type": device_type, "weighted": False}
    outcome = _stock(ranks, "backend.adaptations.kjt_without_rows", CASES + "empty_to_dict", arguments)
    assert "tuple index out of range" in outcome.error


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
def test_stock_cannot_be_told_that_batch_sizes_vary(ranks: RankPool, device_type: str) -> None:
    arguments = {"device_type": device_type, "options": {"force_variable_stride": True}}
    module = "backend.adaptations.kjt_variable_strides"
    outcome = _stock(ranks, module, CASES + "strides_of_a_dictionary", arguments)
    assert "got an unexpected keyword argument 'force_variable_stride'" in outcome.error


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
def test_stock_prints_values_of_another_key(ranks: RankPool, device_type: str) -> None:
    module = "backend.adaptations.kjt_printed_by_key"
    (found,) = _stock(ranks, module, CASES + "printed", {"device_type": device_type}).result()
    assert found["values"]["user"] == [1, 2, 3]
    assert '"user": [[1], [2], [3], [4]]' in found["text"]


def test_stock_cannot_look_sequences_of_an_empty_batch_up(ranks: RankPool) -> None:
    # On one rank, where nobody waits for it: it is the last one, which has no rows.
    arguments = {"device_type": "cpu", "sharding": "row_wise"}
    module = "sharding.adaptations.sequences_without_rows"
    outcome = _stock(ranks, module, CASES + "sequences_with_an_empty_batch", arguments)
    assert "cannot reshape tensor of 0 elements" in outcome.error


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
def test_stock_cannot_manage_collisions_of_a_batch_without_rows(ranks: RankPool, device_type: str) -> None:
    options = {"policy": "LFU", "module": "bags", "empty": "no rows"}
    arguments = {"feature": "managed_collision", "device_type": device_type, **options}
    outcome = _stock(ranks, "sharding.adaptations.collisions_without_rows", USE, arguments, 2)
    assert "cannot reshape tensor of 0 elements" in outcome.error


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
def test_stock_draws_two_batches_too_many_when_prefetching(ranks: RankPool, device_type: str) -> None:
    arguments = {
        "pipeline": "PrefetchTrainPipelineSparseDist",
        "device_type": device_type,
        "options": {"execute_all_batches": False},
    }
    outcome = _stock(ranks, "pipeline.adaptations.prefetch_refill", CASES + "drawn_batches", arguments, 2)
    assert [rank["drawn"] for rank in outcome.result()] == [[3, *range(6, 13)]] * 2


@pytest.mark.parametrize(
    "case",
    [
        "dlrm data_parallel 2 fused_sparse_dist fp32 sgd",
        "dlrm table_wise 4/strided fused_sparse_dist fp32 sgd",
    ],
)
def test_stock_may_read_rows_that_are_being_written(ranks: RankPool, case: str) -> None:
    module, arguments = "pipeline.adaptations.lookup_after_writes", {"name": case, "device_type": "npu"}
    outcome = _stock(ranks, module, RUN, arguments, int(case.split()[2][0]))
    assert any("read before write ended" in race for rank in outcome.result() for race in rank["races"])


def test_stock_gives_memory_away_that_is_read_on_another_stream(ranks: RankPool) -> None:
    # TestSparseNN with the tables of one host as grid: the all-to-all across hosts is among one rank.
    arguments = {"name": "sparse_nn grid_shard 2 fused_sparse_dist fp32 sgd", "device_type": "npu"}
    outcome = _stock(ranks, "backend.adaptations.immediate_results", RUN, arguments, 2)
    assert any("buffer reused before its reader ended" in race for rank in outcome.result() for race in rank["races"])


def test_stock_cannot_average_replicas_on_cpu_under_semi_sync(ranks: RankPool) -> None:
    arguments = {"name": "dlrm row_wise 4/strided semi_sync fp32 sgd", "device_type": "cpu"}
    outcome = _stock(ranks, "sharding.adaptations.replica_averages", RUN, arguments, 4)
    assert "modified by an inplace operation" in outcome.error


@pytest.mark.parametrize(
    ("feature", "options", "said"),
    [
        ("communication", {"precision": "fp8"}, "FloatToHFP8Quantized"),
        ("pruning", {}, "Torch not compiled with CUDA enabled"),
        ("hashed_collision", {}, None),
        ("quantized", {}, "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf"),
        ("metrics", {}, "Double tensor"),
        ("resharded", {}, "Timed out"),  # gloo: the ranks number their messages by a hash that differs
    ],
)
def test_stock_fails_later_and_names_no_feature(
    ranks: RankPool, feature: str, options: dict[str, Any], said: str | None
) -> None:
    arguments = {"feature": feature, "device_type": "npu", **options}
    outcome = _stock(ranks, "sharding.adaptations.refused_features", USE, arguments, 2)
    if said is None:  # it is built, and fails in its first batch
        assert outcome.result() == ["built"] * 2
    else:
        assert said in outcome.error
