"""What all ranks learn of each other's next batch."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tests.npu.ranks import Call, RankPool
from turbogr_plugin.errors import InputError
from turbogr_plugin.pipeline.rank_failure import RankFailure, RankInputError
from turbogr_plugin.pipeline.step_agreement import BatchStatus, StepAgreement, failed_with

CPU = torch.device("cpu")
HAS, EXHAUSTED, FAILED, BAD = (int(status) for status in BatchStatus)
STATUSES = [
    [HAS, HAS, HAS, HAS],
    [HAS, EXHAUSTED, HAS, HAS],
    [HAS, EXHAUSTED, FAILED, FAILED],
    [EXHAUSTED, EXHAUSTED, EXHAUSTED, EXHAUSTED],
    [HAS, BAD, FAILED, BAD],
]
MODULE = "tests.pipeline.agreement_runs"


def _message(rank: int) -> str:
    return f"rank {rank} 中 \\udcff" * 3


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> dict[str, list[Any]]:
    calls = {
        "cpu": Call(f"{MODULE}:told", {"statuses": STATUSES, "device": "cpu"}, 4),
        "npu": Call(f"{MODULE}:told", {"statuses": STATUSES, "device": "npu"}, 4),
        "some": Call(f"{MODULE}:told", {"statuses": STATUSES, "device": "cpu", "group": [1, 3]}, 4),
        "late": Call(f"{MODULE}:told_to_a_late_rank", {}, 2),
    }
    return {name: each.result() for name, each in zip(calls, ranks.run(list(calls.values())), strict=True)}


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_all_ranks_learn_the_status_of_each_and_the_message_of_the_first_that_failed(
    found: dict[str, list[Any]], device: str
) -> None:
    for rank in range(4):
        answers = [STATUSES[0], STATUSES[1], [2, _message(2), False], STATUSES[3], [1, _message(1), True]]
        assert found[device][rank]["answers"] == answers


def test_only_a_failure_takes_more_than_one_message(found: dict[str, list[Any]]) -> None:
    sizes_and_text = 2
    failures = 2
    assert found["cpu"][0]["collectives"] == len(STATUSES) + failures * sizes_and_text


def test_ranks_are_named_by_their_number_in_the_world_and_listed_by_that_in_the_group(
    found: dict[str, list[Any]],
) -> None:
    for rank in (1, 3):
        assert found["some"][rank]["answers"] == [
            [HAS, HAS],
            [EXHAUSTED, HAS],
            [3, _message(3), False],
            [EXHAUSTED, EXHAUSTED],
            [1, _message(1), True],
        ]


def test_no_rank_has_an_answer_before_the_last_has_come(found: dict[str, list[Any]]) -> None:
    assert found["late"] == [[HAS, EXHAUSTED]] * 2


def test_a_single_process_agrees_with_itself() -> None:
    agreement = StepAgreement(None, CPU)
    assert agreement.exchange(BatchStatus.HAS_BATCH) == [BatchStatus.HAS_BATCH]
    with pytest.raises(RankFailure, match="rank 0 failed: no such file"):
        agreement.exchange(BatchStatus.FAILED, "no such file")


def test_bad_input_is_told_without_its_type_and_is_bad_input_for_whoever_catches_it() -> None:
    status, message = failed_with(InputError("line 3: no number"))
    with pytest.raises(InputError, match=r"^rank 0 failed: line 3: no number$") as raised:
        StepAgreement(None, CPU).exchange(status, message)
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), RankInputError)
    assert failed_with(OSError("gone")) == (BatchStatus.FAILED, "OSError: gone")


def test_a_status_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="4 is not a valid BatchStatus"):
        StepAgreement(None, CPU).exchange(4)  # type: ignore[arg-type]
