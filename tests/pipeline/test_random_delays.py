"""Whatever comes late at random, on whichever rank: nothing hangs or is left behind, and results stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu.ranks import Call, RankPool

pytestmark = pytest.mark.timeout(180)
RUNS = "tests.pipeline.delayed_runs"
STEPS, SEED, LONGEST = 60, 20260801, 0.004
#: ranks, ranks in a group (None: no groups), whether the tables have a process group of their own, staleness
CASES: dict[str, tuple[int, int | None, bool, int]] = {
    "exact": (2, None, True, 0),
    "stale by 1": (2, None, True, 1),
    "stale by 1, in the caller's thread": (2, None, False, 1),
    "stale by 1, two groups of 1": (2, 1, True, 1),
    "stale by 2, two groups of 2": (4, 2, True, 2),
}

USUAL = ("exact", "stale by 1", "stale by 2, two groups of 2")


def _calls(name: str, steps: int, longest: float) -> list[Call]:
    """Without a pipeline, without delays, and with them."""
    ranks, group, own_group, staleness = CASES[name]
    same: dict[str, Any] = {"steps": steps, "seed": SEED, "group": group}
    own = {**same, "own_group": own_group, "staleness": staleness}
    return [
        Call(f"{RUNS}:without_pipeline", same, ranks),
        Call(f"{RUNS}:pipelined", {**own, "longest": 0.0}, ranks),
        Call(f"{RUNS}:pipelined", {**own, "longest": longest}, ranks),
    ]


def _check(name: str, steps: int, plain: list[Any], prompt: list[Any], late: list[Any]) -> None:
    _, group, _, staleness = CASES[name]
    for loop, without, own in zip(plain, prompt, late, strict=True):
        assert own["ended"]
        assert len(own["losses"]) == steps
        assert (own["losses"], own["weights"]) == (without["losses"], without["weights"])
        assert (own["losses"] == loop["losses"]) == (staleness == 0)
        assert staleness or own["weights"] == loop["weights"]
        for place in ("loader", "unique", "feature distribution of bags", "all-to-all", "reduce", "dense backward"):
            assert own["delays"].get(place, 0) > steps / 20, place
        assert group is None or own["delays"].get("messages", 0) + own["delays"].get("gather", 0) > 0


def _check_alive(late: list[Any], *, tensors: int, megabytes: float) -> None:
    """From the first look on: lanes, buffers and caches are there then."""
    for own in late:
        first, *further = own["alive"]
        for each in further:
            assert each["tensors"] <= first["tensors"] + tensors, own["alive"]
            assert each["megabytes"] <= first["megabytes"] + megabytes, own["alive"]
            assert each["threads"] <= first["threads"], own["alive"]
            assert each["files"] <= first["files"], own["alive"]


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> dict[str, list[list[Any]]]:
    calls = [call for name in USUAL for call in _calls(name, STEPS, LONGEST)]
    results = [each.result() for each in ranks.run(calls, timeout=170)]
    return {name: results[3 * at : 3 * at + 3] for at, name in enumerate(USUAL)}


@pytest.mark.parametrize("name", USUAL)
def test_random_delays_change_no_loss_and_no_weight(found: dict[str, list[list[Any]]], name: str) -> None:
    _check(name, STEPS, *found[name])


@pytest.mark.parametrize("name", USUAL)
def test_no_step_leaves_a_tensor_behind(found: dict[str, list[list[Any]]], name: str) -> None:
    # A tensor per step would be 15 between two looks; a batch of no sample has as many as others, or a few less.
    _check_alive(found[name][2], tensors=10, megabytes=200)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_a_thousand_steps_with_random_delays_end_with_the_same_weights_and_memory(ranks: RankPool, name: str) -> None:
    steps = 1000
    plain, prompt, late = (each.result() for each in ranks.run(_calls(name, steps, LONGEST), timeout=1100))
    _check(name, steps, plain, prompt, late)
    _check_alive(late, tensors=10, megabytes=8)
