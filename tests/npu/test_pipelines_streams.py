"""TorchRec's own pipelines on npu, two ranks: they overlap, no use of memory is unordered, no loss changes.

The functions that run on the ranks are in pipeline_runs.py; all calls of this module go to the pool at once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.npu.ranks import Call, Outcome, RankPool

pytestmark = pytest.mark.timeout(240)

RUNS = "tests.npu.pipeline_runs:"
#: Pipelines that compute what the plain loop computes.
SYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "Base": ("TrainPipelineBase", {}),
    "SparseDist": ("TrainPipelineSparseDist", {}),
    "Lite": ("TrainPipelineSparseDistLite", {}),
    "Fused": ("TrainPipelineFusedSparseDist", {}),
    "Fused, own lookup stream": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "new"}),
    "Prefetch": ("PrefetchTrainPipelineSparseDist", {}),
}
#: They are compared with themselves on CPU.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SemiSync from 0": ("TrainPipelineSemiSync", {"start_batch": 0}),
    "SemiSync from 2": ("TrainPipelineSemiSync", {"start_batch": 2}),
    "Eval": ("EvalPipelineSparseDist", {}),
    "Eval fused, lookup ahead": (
        "EvalPipelineFusedSparseDist",
        {"enable_embedding_lookup_prefetch": True, "emb_lookup_stream": "new"},
    ),
}
STAGES: dict[str, list[str]] = {"Staged": [], "Staged, prefetch": ["prefetch_stream"]}
CODECS = ("FP16", "BF16")
SHARDINGS = ("row_wise", "table_wise")
#: Run by `make test-full` only.
MORE_SYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "SparseDist, copy behind forward": ("TrainPipelineSparseDist", {"enqueue_batch_after_forward": True}),
    "Fused, current stream": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "current"}),
    "Fused, lookup last": ("TrainPipelineFusedSparseDist", {"embedding_lookup_after_data_dist": True}),
    "SparseDist, postprocessing": ("TrainPipelineSparseDist", {"pipeline_postproc": True}),
    "SparseDist, inputs cleared": ("TrainPipelineSparseDist", {"free_features_storage_early": True}),
}
TOLERANCE = 1e-6  # relative, of each loss
REUSED = "buffer reused before its reader ended"


def _pipeline(name: str, options: dict[str, Any], device: str = "npu", **arguments: Any) -> Call:
    return Call(RUNS + "pipeline", {"name": name, "options": options, "device_type": device, **arguments}, 2)


def _calls() -> dict[str, Call]:
    calls = {f"plain {device}": Call(RUNS + "plain", {"device_type": device}, 2) for device in ("cpu", "npu")}
    for label, (name, options) in (SYNCHRONOUS | OTHERS).items():
        calls[f"{label} npu"] = _pipeline(name, options)
    for label, (name, options) in OTHERS.items():
        calls[f"{label} cpu"] = _pipeline(name, options, "cpu")
    for label, streams in STAGES.items():
        calls[f"{label} npu"] = Call(RUNS + "staged", {"device_type": "npu", "streams": streams}, 2)
    for codec in CODECS:
        sharded = {"sharding": "table_wise", "communication": codec}
        for device in ("cpu", "npu"):
            calls[f"{codec} {device}"] = Call(RUNS + "plain", {"device_type": device, **sharded}, 2)
        calls[f"{codec} fused npu"] = _pipeline("TrainPipelineFusedSparseDist", {}, **sharded)
    calls["stock SparseDist"] = _pipeline("TrainPipelineSparseDist", {}, stock="pipelines")
    calls["stock SemiSync"] = _pipeline("TrainPipelineSemiSync", {}, stock="pipelines")
    calls["stock Eval"] = _pipeline(*OTHERS["Eval fused, lookup ahead"], stock="collective results")
    for sharding in SHARDINGS:
        calls[f"checkpoint {sharding}"] = Call(RUNS + "checkpoint", {"device_type": "npu", "sharding": sharding}, 2)
    calls["stock checkpoint"] = Call(
        RUNS + "checkpoint", {"device_type": "npu", "sharding": "table_wise", "stock": True}, 2
    )
    calls["loader"] = Call(RUNS + "loader", {"device_type": "npu", "persistent": True}, 2)
    calls["streams"] = Call(RUNS + "streams_of_pipelines", {}, 1)
    calls["subclass"] = Call(RUNS + "subclass_of_a_pipeline", {}, 2)
    return calls


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> dict[str, Outcome]:
    """Every call, once."""
    calls = _calls()
    return dict(zip(calls, ranks.run(list(calls.values()), timeout=220), strict=True))


def _losses(outcome: Outcome) -> list[list[float]]:
    return [rank["losses"] for rank in outcome.result()]


def _races(outcome: Outcome) -> list[list[str]]:
    return [rank["races"] for rank in outcome.result()]


def _assert_close(left: list[list[float]], right: list[list[float]], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


def test_the_plain_loop_on_npu_has_the_losses_of_the_cpu(outcomes: dict[str, Outcome]) -> None:
    _assert_close(_losses(outcomes["plain npu"]), _losses(outcomes["plain cpu"]))


@pytest.mark.parametrize("label", [*SYNCHRONOUS, *STAGES])
def test_a_pipeline_on_npu_equals_the_plain_loop_there_bit_by_bit(label: str, outcomes: dict[str, Outcome]) -> None:
    assert _losses(outcomes[f"{label} npu"]) == _losses(outcomes["plain npu"])


@pytest.mark.parametrize("label", OTHERS)
def test_a_pipeline_on_npu_has_its_own_losses_on_cpu(label: str, outcomes: dict[str, Outcome]) -> None:
    _assert_close(_losses(outcomes[f"{label} npu"]), _losses(outcomes[f"{label} cpu"]))


@pytest.mark.parametrize("label", [*SYNCHRONOUS, *OTHERS, *STAGES, *(f"{codec} fused" for codec in CODECS)])
def test_no_use_of_memory_is_unordered(label: str, outcomes: dict[str, Outcome]) -> None:
    assert _races(outcomes[f"{label} npu"]) == [[], []]


def test_each_pipeline_has_its_streams(outcomes: dict[str, Outcome]) -> None:
    (streams,) = outcomes["streams"].result()
    assert streams == {
        "Base": ["memcpy"],
        "SparseDist": ["memcpy", "data_dist"],
        "Lite": ["memcpy"],
        "Fused": ["memcpy", "data_dist"],
        "Fused new": ["memcpy", "data_dist", "emb_lookup"],
        "Fused current": ["memcpy", "data_dist"],
        "SemiSync": ["memcpy", "data_dist"],
        "Prefetch": ["memcpy", "data_dist", "prefetch"],
        "Eval": ["memcpy", "data_dist"],
        "stock": [],
    }


def test_a_users_subclass_gets_the_streams_of_its_parent(outcomes: dict[str, Outcome]) -> None:
    assert [rank["has_streams"] for rank in outcomes["subclass"].result()] == [True, True]
    assert _losses(outcomes["subclass"]) == _losses(outcomes["plain npu"])


def test_stock_runs_without_overlap_and_says_nothing(outcomes: dict[str, Outcome]) -> None:
    assert _losses(outcomes["stock SparseDist"]) == _losses(outcomes["plain npu"])


def test_stock_semi_sync_fails_on_npu(outcomes: dict[str, Outcome]) -> None:
    assert "CUDA" in outcomes["stock SemiSync"].error or "NVIDIA" in outcomes["stock SemiSync"].error


def test_stock_gives_the_memory_of_a_collectives_result_away_too_early(outcomes: dict[str, Outcome]) -> None:
    assert {race.partition(":")[0] for race in _races(outcomes["stock Eval"])[0]} == {REUSED}


@pytest.mark.parametrize("codec", CODECS)
def test_communication_in_half_precision_works_on_npu(codec: str, outcomes: dict[str, Outcome]) -> None:
    npu = _losses(outcomes[f"{codec} npu"])
    assert _losses(outcomes[f"{codec} fused npu"]) == npu
    # A rounding of the format per step, which falls differently where the sums of the CPU differ in their last bit. For
    # gloo, TorchRec takes FP16 instead of BF16.
    rounding = 2.0**-11 if codec == "FP16" else 2.0**-8
    _assert_close(npu, _losses(outcomes[f"{codec} cpu"]), rounding * len(npu[0]))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_checkpoint_is_saved_and_loaded_on_npu(sharding: str, outcomes: dict[str, Outcome]) -> None:
    states = outcomes[f"checkpoint {sharding}"].result()
    for rank, state in enumerate(states):
        assert state["differ"] == []
        assert state["devices"] == [f"npu:{rank}"]
        trained, loaded = state["losses"]
        assert trained == loaded
    # Of three tables, and two dense values on each rank.
    assert [state["shards"] for state in states] == ([2 + 2, 1 + 2] if sharding == "table_wise" else [3 + 2, 3 + 2])


def test_stock_fails_to_load_tables_that_live_on_another_rank(outcomes: dict[str, Outcome]) -> None:
    assert "CUDA" in outcomes["stock checkpoint"].error or "NVIDIA" in outcomes["stock checkpoint"].error


def test_batches_come_pinned_from_a_loaders_persistent_workers(outcomes: dict[str, Outcome]) -> None:
    for rank, plain in zip(outcomes["loader"].result(), _losses(outcomes["plain npu"]), strict=True):
        assert rank["pinned"]
        assert rank["losses"][: len(plain)] == plain
        assert len(rank["losses"]) == 2 * len(plain)


#: Where TorchRec makes the host wait in every step: for lengths per key, and to send and receive all-to-all sizes.
HOST_SYNCS_OF_TORCHREC = (
    "torchrec/distributed/dist_data.py",
    "torchrec/distributed/embedding_sharding.py",
    "torchrec/distributed/train_pipeline/runtime_forwards.py",
    "torchrec/sparse/jagged_tensor.py",
)


@pytest.mark.parametrize("label", ["Base", "SparseDist", "Lite", "Fused", "SemiSync from 0", "Prefetch", "Staged"])
def test_the_host_waits_only_where_torchrec_makes_it(label: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[f"{label} npu"].result():
        places = {place.partition(" at ")[2].partition(":")[0] for place in rank["host_syncs"]}
        assert places <= set(HOST_SYNCS_OF_TORCHREC), json.dumps(rank["host_syncs"], indent=1)


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_every_option_keeps_the_losses_and_the_order(sharding: str, ranks: RankPool) -> None:
    options = SYNCHRONOUS | MORE_SYNCHRONOUS
    calls = [_pipeline(name, choice, sharding=sharding) for name, choice in options.values()]
    calls += [Call(RUNS + "checkpoint", {"device_type": "npu", "sharding": sharding}, 2)]
    plain = Call(RUNS + "plain", {"device_type": "npu", "sharding": sharding}, 2)
    expected, *found, checkpoint = ranks.run([plain, *calls], timeout=220)
    for label, outcome in zip(options, found, strict=True):
        assert _losses(outcome) == _losses(expected), label
        assert _races(outcome) == [[], []], label
    assert [state["differ"] for state in checkpoint.result()] == [[], []]
