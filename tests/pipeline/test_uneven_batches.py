"""Ranks whose loaders end at different times, batches of no sample, further epochs, and evaluation in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.npu.ranks import Call, RankPool
from tests.pipeline import uneven_model

pytestmark = pytest.mark.timeout(180)
RUNS = "tests.pipeline.uneven_runs"
# A rank that ends first, one of empty and one-row batches, one that has a single batch; the last steps of all are few.
SIZES = [[3, 2, 1, 3, 2, 4, 2], [3, 1, 0, 2], [2], [4, 4, 1, 4, 0]]
STEPS = max(map(len, SIZES))
PADDED = [of_rank + [0] * (STEPS - len(of_rank)) for of_rank in SIZES]
# None ends before the third step.
STOPPING = [[3, 2, 1, 3, 2, 4, 2], [3, 1, 0], [2, 0, 1, 4], [4, 4, 1, 4, 0]]
SHORT = [of_rank[:3] for of_rank in STOPPING]
ALL = ["bags", "sequences"]
CASES: dict[str, tuple[list[str], int | None]] = {
    "bags": (["bags"], None),
    "sequences": (["sequences"], None),
    "both, groups of 2": (ALL, 2),
    "both, groups of 1": (ALL, 1),
}


STALE = ("bags", "both, groups of 2")


def _calls() -> dict[str, Call]:
    """`<case>: <loop or choice> <sizes> <staleness>`."""
    calls = {}

    def add(case: str, way: str, given: str, staleness: int = 0) -> None:
        kinds, group = CASES[case]
        arguments: dict[str, Any] = {"kinds": kinds, "group": group, "sizes": globals()[given]}
        name = f"{case}: {way} {given} {staleness}"
        if way == "plain":
            calls[name] = Call(f"{RUNS}:plain", arguments, 4)
        else:
            arguments |= {"when_exhausted": way, "staleness": staleness}
            calls[name] = Call(f"{RUNS}:pipelined", arguments, 4)

    for case in CASES:
        for way, given in (("plain", "PADDED"), ("fill", "SIZES"), ("plain", "SHORT"), ("stop", "STOPPING")):
            add(case, way, given)
    for case in STALE:
        for way, given in (("fill", "PADDED"), ("fill", "SIZES"), ("stop", "SHORT"), ("stop", "STOPPING")):
            add(case, way, given, staleness=1)
    shared = {"kinds": ALL, "sizes": SIZES, "when_exhausted": "fill", "own_group": False}
    calls["one group for all"] = Call(f"{RUNS}:pipelined", shared, 4)
    calls["groups of their own"] = Call(f"{RUNS}:pipelined", {**shared, "own_group": True}, 4)
    return calls


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> dict[str, list[Any]]:
    calls = _calls()
    return {name: each.result() for name, each in zip(calls, ranks.run(list(calls.values()), timeout=110), strict=True)}


def _same(one: list[Any], other: list[Any]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["weights"] == theirs["weights"]


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_have_ended_fill_up_with_empty_batches_until_all_have(
    found: dict[str, list[Any]], case: str
) -> None:
    own = found[f"{case}: fill SIZES 0"]
    assert [len(each["losses"]) for each in own] == [STEPS] * 4
    _same(own, found[f"{case}: plain PADDED 0"])


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_stop_with_the_first_that_has_no_batch(found: dict[str, list[Any]], case: str) -> None:
    own = found[f"{case}: stop STOPPING 0"]
    assert [len(each["losses"]) for each in own] == [3] * 4
    _same(own, found[f"{case}: plain SHORT 0"])


@pytest.mark.parametrize("case", STALE)
def test_with_staleness_a_loader_that_ends_gives_what_one_of_empty_batches_or_a_shorter_one_gives(
    found: dict[str, list[Any]], case: str
) -> None:
    _same(found[f"{case}: fill SIZES 1"], found[f"{case}: fill PADDED 1"])
    _same(found[f"{case}: stop STOPPING 1"], found[f"{case}: stop SHORT 1"])
    assert [len(each["losses"]) for each in found[f"{case}: stop STOPPING 1"]] == [3] * 4


def test_a_pipeline_that_has_ended_says_so_again(found: dict[str, list[Any]]) -> None:
    for name, of_ranks in found.items():
        if "plain" not in name:
            assert [each["again"] for each in of_ranks] == [[]] * 4, name


def test_staleness_makes_a_difference_here(found: dict[str, list[Any]]) -> None:
    for case in STALE:
        assert found[f"{case}: fill SIZES 0"][0]["losses"] != found[f"{case}: fill SIZES 1"][0]["losses"]


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_mean_over_the_samples_of_all_ranks_however_they_are_spread(
    found: dict[str, list[Any]], case: str
) -> None:
    kinds, group = CASES[case]
    losses, weights = uneven_model.of_one_process(kinds, PADDED)
    own = found[f"{case}: fill SIZES 0"]
    shown = torch.tensor([each["losses"] for each in own]).double().sum(0)
    torch.testing.assert_close(shown, torch.tensor(losses).double(), rtol=1e-5, atol=1e-6)
    for each in own:
        for name, values in each["weights"].items():
            table, _, place = name.partition("[")
            row, column = (int(part.strip(" :]")) for part in place.split(",")) if place else (0, 0)
            rows = torch.tensor(values).double()
            whole = weights[table]
            part = whole[row : row + rows.size(0), column : column + rows.size(1)] if place else whole
            torch.testing.assert_close(rows.view_as(part), part, rtol=1e-5, atol=1e-6)
    assert group is None or len(own) % group == 0


def test_the_sparse_side_in_the_callers_thread_gives_the_same(found: dict[str, list[Any]]) -> None:
    _same(found["one group for all"], found["groups of their own"])


def test_a_rank_that_cannot_make_empty_batches_is_named_by_all_before_they_start_on_one(ranks: RankPool) -> None:
    run = f"{RUNS}:without_an_empty_batch"
    calls = [
        Call(run, {"sizes": [[2, 2], []], "fails": False}, 2),
        Call(run, {"sizes": [[2], [2, 2, 1]], "fails": True}, 2),
    ]
    nothing, failing = ranks.run(calls)
    for error in nothing.errors:
        assert "RankFailure: rank 1 failed: its iterator has given no batch" in error
    for error in failing.errors:
        assert "RankFailure: rank 0 failed: ValueError: no empty batch here" in error


@pytest.mark.parametrize("staleness", [0, 1])
def test_after_a_start_that_failed_and_reset_all_ranks_start_as_for_the_first_time(
    ranks: RankPool, staleness: int
) -> None:
    nothing, other, good = [[2, 2], []], [[], [2, 1]], [[3, 2, 1], [2]]
    run, same = f"{RUNS}:started_again", {"staleness": staleness}
    calls = [
        Call(run, {"starts": [good], **same}, 2),
        Call(run, {"starts": [nothing, other, good], **same}, 2),  # one rank has no batch, then the other
        Call(run, {"starts": [[[2], [2, 2, 1]], other], "no_empty_batch_in": 0, **same}, 2),
        Call(run, {"starts": [good, good], "no_batch_in": 0, **same}, 2),
    ]
    fresh, swapped, no_empty_one, failing = (each.result() for each in ranks.run(calls))
    given_none = "rank {} failed: its iterator has given no batch, of which"
    for rank in range(2):
        assert all(swapped[rank][start].startswith(given_none.format(1 - start)) for start in (0, 1))
        assert swapped[rank][2] == failing[rank][1] == fresh[rank][0]
        assert failing[rank][0] == "rank 0 failed: ValueError: no batch here"
        assert no_empty_one[rank][0] == "rank 0 failed: ValueError: no empty batch here"
        assert no_empty_one[rank][1].startswith(given_none.format(0))


def test_after_a_reset_ranks_tell_each_other_of_later_failures_and_not_of_the_former(ranks: RankPool) -> None:
    (outcome,) = ranks.run([Call(f"{RUNS}:failing_twice", {}, 2)])
    for first, second in outcome.result():
        assert first.endswith("the first") and second.endswith("the second")


def test_a_forward_pass_that_raises_stop_iteration_is_no_end_of_the_data(ranks: RankPool) -> None:
    (outcome,) = ranks.run([Call(f"{RUNS}:stopping_in_the_forward_pass")])
    assert outcome.result() == [["RuntimeError", "stage dense_forward of batch 0 raised StopIteration"]]


# Epochs and evaluation, on two ranks.

UNEVEN = [[3, 2, 1, 3, 2], [3, 1, 0]]
EVALUATIONS = [[3, 1, 2], [2]]


@pytest.fixture(scope="module")
def further(ranks: RankPool) -> dict[str, list[Any]]:
    calls = {}
    for way in ("stop", "fill"):
        for staleness in (0, 1):
            arguments = {"sizes": [UNEVEN] * 3, "when_exhausted": way, "staleness": staleness}
            for workers in (0, 1):
                name = f"epochs, {way}, {staleness}, {workers} workers"
                calls[name] = Call(f"{RUNS}:epochs", {**arguments, "workers": workers}, 2)
            lists = {**arguments, "workers": 0, "same_loader": False}
            calls[f"epochs, {way}, {staleness}, lists"] = Call(f"{RUNS}:epochs", lists, 2)
    for group in (None, 1):
        for staleness in (0, 1, 2):
            arguments = {
                "sizes": UNEVEN,
                "evaluations": EVALUATIONS,
                "every": 2,
                "staleness": staleness,
                "group": group,
            }
            name = f"evaluated, {group}, {staleness}"
            calls[name] = Call(f"{RUNS}:evaluated_between_steps", arguments, 2)
            calls[f"not {name}"] = Call(f"{RUNS}:evaluated_between_steps", {**arguments, "evaluates": False}, 2)
    return {name: each.result() for name, each in zip(calls, ranks.run(list(calls.values()), timeout=110), strict=True)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("way", ["stop", "fill"])
def test_a_loader_serves_one_epoch_after_the_other_also_with_workers_that_live_on(
    further: dict[str, list[Any]], way: str, staleness: int, workers: int
) -> None:
    own = further[f"epochs, {way}, {staleness}, {workers} workers"]
    steps = {"stop": 3, "fill": 5}[way]
    assert [[len(epoch) for epoch in each["losses"]] for each in own] == [[steps] * 3] * 2
    _same(own, further[f"epochs, {way}, {staleness}, lists"])


@pytest.mark.parametrize("group", [None, 1])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_evaluation_between_steps_changes_no_training_and_gets_no_batch_of_it(
    further: dict[str, list[Any]], staleness: int, group: int | None
) -> None:
    own = further[f"evaluated, {group}, {staleness}"]
    _same(own, further[f"not evaluated, {group}, {staleness}"])
    for each in own:
        assert [len(losses) for losses in each["evaluations"]] == [3, 3]
        assert each["evaluations"] == each["themselves"]
