"""What all ranks raise when one fails; the ranks are processes of their own and rank 0 hosts the store."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from tests.pipeline import failing_ranks
from turbogr_plugin.pipeline.rank_failure import Failures, RankFailure, reason_of

REASON = "ValueError: row 7 of rank {} is bad: 中"


@pytest.mark.parametrize("failing", [0, pytest.param(2, marks=pytest.mark.full)])
def test_all_ranks_raise_the_message_of_the_rank_that_fails(tmp_path: Path, failing: int) -> None:
    left = failing_ranks.run(tmp_path, failing_ranks.fail_before_a_collective, world_size=3, failing=failing)
    own = left.pop(failing)
    assert own == {"raised": "ValueError", "message": REASON.format(failing).partition(": ")[2], "cause": "NoneType"}
    for other in left:
        assert (other["raised"], other["rank"]) == ("RankFailure", failing)
        assert other["message"] == f"rank {failing} failed: " + REASON.format(failing)
        assert other["cause"] == "RuntimeError"  # what the collective said is kept


def test_ranks_whose_collective_times_out_raise_the_message_of_the_rank_that_did_not_join(tmp_path: Path) -> None:
    steps = failing_ranks.fail_before_a_collective
    left = failing_ranks.run(tmp_path, steps, world_size=3, patience=4, failing=1, stays=1)
    assert left[1]["raised"] == "ValueError"
    assert [left[rank]["message"] for rank in (0, 2)] == ["rank 1 failed: " + REASON.format(1)] * 2


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_no_rank_hangs_when_one_is_killed(tmp_path: Path, killed: int) -> None:
    steps = failing_ranks.fail_before_a_collective
    left = failing_ranks.run(tmp_path, steps, world_size=3, failing=killed, killed=True)
    assert left[killed] is None
    others = [each for rank, each in enumerate(left) if rank != killed]
    assert all(other["raised"] in ("RuntimeError", "RankFailure") for other in others)
    assert any(other["raised"] == "RuntimeError" for other in others)  # there is no message but what a collective says


@pytest.mark.parametrize(
    ("where", "failing", "own_group"),
    [
        ("dense_forward", 0, True),
        ("lane", 1, True),
        ("lookup", 1, False),
        pytest.param("lane", 0, True, marks=pytest.mark.full),
        pytest.param("lookup", 0, True, marks=pytest.mark.full),
        pytest.param("dense_forward", 1, False, marks=pytest.mark.full),
        pytest.param("lane", 1, False, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_in_a_step_ends_the_training_of_all_with_its_message(
    tmp_path: Path, where: str, failing: int, own_group: bool
) -> None:
    left = failing_ranks.run(
        tmp_path, failing_ranks.train, world_size=2, failing=failing, where=where, own_group=own_group
    )
    own = left.pop(failing)
    assert (own["raised"], f"ValueError: {own['message']}") == ("ValueError", REASON.format(failing))
    assert left[0]["message"] == f"rank {failing} failed: " + REASON.format(failing)


@pytest.mark.parametrize(("step", "failing", "own_group"), [(0, 1, True), (3, 0, False)])
def test_a_loader_that_fails_ends_all_ranks_before_they_start_on_its_batch(
    tmp_path: Path, step: int, failing: int, own_group: bool
) -> None:
    # The ranks agree on it: nobody has to wait for a timeout, or for the end of the rank that failed, which stays.
    left = failing_ranks.run(
        tmp_path,
        failing_ranks.train,
        world_size=2,
        failing=failing,
        where="loader",
        step=step,
        own_group=own_group,
        stays=failing,
    )
    for each in left:
        assert (each["raised"], each["rank"]) == ("RankFailure", failing)
        assert each["message"] == f"rank {failing} failed: " + REASON.format(failing)
    assert left[failing]["cause"] == "ValueError"


@pytest.mark.parametrize("where", ["dense_forward", pytest.param("lane", marks=pytest.mark.full)])
def test_no_rank_hangs_when_one_is_killed_in_a_step(tmp_path: Path, where: str) -> None:
    arguments = {"failing": 1, "where": where, "killed": True}
    left = failing_ranks.run(tmp_path, failing_ranks.train, world_size=3, **arguments)
    assert left[1] is None
    assert all(left[rank]["raised"] in ("RuntimeError", "RankFailure") for rank in (0, 2))


@pytest.fixture
def of_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], list[Failures]]:
    """Makes the Failures of three ranks, here in one process, on a store."""

    def made(store: Store) -> list[Failures]:
        found = []
        for rank in range(3):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda: 3)
            found.append(Failures(store, patience=0))
        return found

    return made


def test_the_first_of_two_ranks_that_fail_is_named_by_all_but_itself(
    of_ranks: Callable[[Store], list[Failures]],
) -> None:
    first, second, third = of_ranks(HashStore())
    own, others = ValueError("cause"), RuntimeError("closed")
    assert first.explain(own) is own
    first.report(0, own)
    second.report(1, others)
    assert first.explain(own) is own
    for each in (second, third):
        assert str(each.explain(others)) == "rank 0 failed: ValueError: cause"
        assert each.explain(others).__cause__ is others


def test_the_failure_of_an_earlier_pipeline_is_not_taken_for_one_of_the_next(
    of_ranks: Callable[[Store], list[Failures]],
) -> None:
    store, error = HashStore(), RuntimeError("mine")
    earlier, later = of_ranks(store), of_ranks(store)
    earlier[0].report(0, ValueError("of the earlier"))
    assert isinstance(earlier[1].explain(error), RankFailure)
    assert later[1].explain(error) is error
    later[1].report(1, error)
    assert str(later[2].explain(error)) == "rank 1 failed: RuntimeError: mine"


def test_a_store_that_is_gone_leaves_a_rank_its_own_exception(
    of_ranks: Callable[[Store], list[Failures]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = of_ranks(HashStore())
    monkeypatch.setattr(PrefixStore, "check", _gone)
    monkeypatch.setattr(PrefixStore, "compare_set", _gone)
    error = ValueError("mine")
    first.report(0, error)
    assert second.explain(error) is error


def _gone(*arguments: object) -> None:
    raise dist.DistNetworkError("gone")


def test_a_single_process_raises_what_it_raised() -> None:
    failures, error = Failures(None), ValueError("mine")
    with failures.watched():
        failures.report(0, error)
        assert failures.explain(error) is error
    failures.close()


def test_a_world_of_one_starts_no_thread_and_writes_nothing_to_the_store() -> None:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        keys, threads = store.num_keys(), threading.active_count()
        failures = Failures(store)
        with failures.watched():
            failures.report(0, ValueError("mine"))
        assert (store.num_keys(), threading.active_count()) == (keys, threads)
    finally:
        dist.destroy_process_group()


def test_a_failure_of_another_rank_is_neither_explained_nor_reported_again() -> None:
    told = RankFailure(3, reason_of(KeyError("x")))
    assert str(told) == "rank 3 failed: KeyError: 'x'"
    assert Failures(None).explain(told) is told
    again = pickle.loads(pickle.dumps(told))
    assert (again.rank, again.reason, str(again)) == (told.rank, told.reason, str(told))
