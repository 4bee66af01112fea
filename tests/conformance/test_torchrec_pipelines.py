"""Known failing inputs of TorchRec's train pipelines, on both devices.

Two of them are how TorchRec is made and get no cure here: a pipeline that has seen the end of an iterator, and ranks
with different numbers of batches. Their tests hold what it does, for the pipeline that mends it to be compared with.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu.ranks import Call, RankPool

CASES = "tests.conformance.torchrec_cases:"

devices = pytest.mark.parametrize("device_type", ["cpu", "npu"])


@devices
@pytest.mark.parametrize(
    ("pipeline", "same_iterator", "steps"),
    [
        ("TrainPipelineSparseDist", False, [4, 4]),
        # A DataLoader with persistent_workers gives the same iterator again: the second epoch gets nothing.
        # https://github.com/meta-pytorch/torchrec/pull/2327, /issues/1778, /issues/2670
        ("TrainPipelineSparseDist", True, [4, 0]),
        ("TrainPipelineFusedSparseDist", True, [4, 0]),
        ("TrainPipelineBase", False, [4, 0]),  # until its reset() is called
    ],
)
def test_an_exhausted_pipeline_goes_on_with_a_new_iterator_only(
    ranks: RankPool, device_type: str, pipeline: str, same_iterator: bool, steps: list[int]
) -> None:
    arguments = {"pipeline": pipeline, "device_type": device_type, "same_iterator": same_iterator}
    assert ranks.run([Call(CASES + "epochs", arguments)])[0].result() == [steps]


@devices
def test_ranks_with_different_numbers_of_batches_wait_for_each_other_in_vain(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/4158; the collectives of this test give up after two seconds.
    outcome = ranks.run([Call(CASES + "unequal_batches", {"device_type": device_type}, 2)])[0].result()
    assert any("Timed out" in rank["waited in vain"] for rank in outcome)
    assert [rank["steps"] for rank in outcome] == [2, 2]  # of 4 and 3


def _drawn(ranks: RankPool, device_type: str, pipeline: str, **options: Any) -> list[dict[str, Any]]:
    arguments = {"pipeline": pipeline, "device_type": device_type, "options": options}
    found: list[dict[str, Any]] = ranks.run([Call(CASES + "drawn_batches", arguments, 2)])[0].result()
    return found


@devices
def test_the_prefetching_pipeline_draws_each_batch_once(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/4503; mended by pipeline/adaptations/prefetch_refill.py. There the
    # second prefetch also spoils a cache between device and host, which npu and CPU do not have.
    prefetching = _drawn(ranks, device_type, "PrefetchTrainPipelineSparseDist", execute_all_batches=False)
    plain = _drawn(ranks, device_type, "TrainPipelineSparseDist", execute_all_batches=False)
    assert [rank["drawn"] for rank in prefetching] == [list(range(3, 13))] * 2  # 12 batches, two always in flight
    for ours, theirs in zip(prefetching, plain, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)


@devices
def test_prefetching_shares_no_memory_unordered_with_the_distribution(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/4191 and /3306: the nearest case without that cache. On npu every
    # use of memory on two streams is checked.
    prefetching = _drawn(ranks, device_type, "PrefetchTrainPipelineSparseDist", execute_all_batches=True)
    plain = _drawn(ranks, device_type, "TrainPipelineBase")
    assert [rank["races"] for rank in prefetching] == [[], []]
    for ours, theirs in zip(prefetching, plain, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)


@devices
def test_semi_sync_shares_no_memory_unordered(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/2731: "using extra streams runs into subtle data races".
    found = _drawn(ranks, device_type, "TrainPipelineSemiSync", start_batch=2)
    assert [rank["races"] for rank in found] == [[], []]
    assert [len(rank["losses"]) for rank in found] == [12, 12]


@devices
def test_strict_semi_sync_refuses_an_optimizer_that_owns_its_embeddings(ranks: RankPool, device_type: str) -> None:
    # https://github.com/meta-pytorch/torchrec/pull/2739
    messages = ranks.run([Call(CASES + "shared_parameters", {"device_type": device_type}, 2)])[0].result()
    assert all("optimizer share parameters" in message for message in messages)
