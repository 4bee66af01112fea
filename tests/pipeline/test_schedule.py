"""The schedule is a table that a user can read, add to and reorder, and that refuses what cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from turbogr_plugin.pipeline import schedule as schedules
from turbogr_plugin.pipeline.schedule import DENSE_FORWARD, LOAD, LOOKUP, LOOKUP_EXACT, Schedule, Stage
from turbogr_plugin.pipeline.train_pipeline_fine_grained import TrainPipelineFineGrained


def _nothing(_context: Any) -> None:
    pass


def _names(schedule: Schedule) -> list[str]:
    return [stage.name for stage in schedule.stages]


@pytest.mark.parametrize("place", [schedules, TrainPipelineFineGrained], ids=["module", "class"])
def test_the_docstring_shows_the_table_that_runs(place: Any) -> None:
    lines = [line.strip() for line in place.__doc__.splitlines()]
    shown = [line.strip() for line in str(Schedule()).splitlines()]
    start = lines.index(shown[0])
    assert lines[start : start + len(shown)] == shown


def test_a_stage_goes_where_it_is_put() -> None:
    stage = Stage(name="count", lane="load", ahead=1, waits_for=(LOAD,), work=_nothing)
    assert _names(Schedule().with_stage(stage))[-1] == "count"
    before, after = (Schedule().with_stage(stage, **{place: LOOKUP}) for place in ("before", "after"))
    assert _names(before).index("count") == _names(before).index(LOOKUP) - 1
    assert _names(after).index("count") == _names(after).index(LOOKUP) + 1
    assert _names(Schedule()) == [name for name in _names(before) if name != "count"]


def test_a_known_stage_moves_and_keeps_what_it_is() -> None:
    moved = Schedule().with_stage(Schedule()[LOAD], after=DENSE_FORWARD)
    assert _names(moved).index(LOAD) == _names(moved).index(DENSE_FORWARD) + 1
    assert sorted(_names(moved)) == sorted(_names(Schedule()))
    assert moved[LOAD] == Schedule()[LOAD]


def test_modules_that_stay_exact_have_a_lookup_of_their_own() -> None:
    schedule = Schedule().with_exact_lookup()
    assert LOOKUP_EXACT in schedule[DENSE_FORWARD].waits_for
    assert not schedule[LOOKUP_EXACT].stale and schedule[LOOKUP].stale
    assert schedule.with_exact_lookup() == schedule
    assert LOOKUP_EXACT not in str(Schedule())


def _without(name: str) -> Schedule:
    return Schedule(tuple(stage for stage in Schedule().stages if stage.name != name))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule((*Schedule().stages, Schedule()[LOAD])), "different names"),
        (lambda: _without(LOOKUP), "lacks lookup"),
        (lambda: Schedule().with_stage(Stage(name="a", lane="dense")), "'a' must have work"),
        (lambda: Schedule().with_stage(Stage(name=LOAD, lane="load", work=_nothing)), "takes no work"),
        (
            lambda: Schedule().with_stage(Stage(name="a", lane="dense", waits_for=("b",), work=_nothing)),
            "waits for 'b'",
        ),
        (lambda: Schedule().with_stage(Stage(name=LOOKUP, lane="sparse")), "must wait for wait_features"),
        (
            lambda: Schedule().with_wait("load", "lookup"),
            "wait for each other: load -> lookup -> wait_features -> feature_dist -> load",
        ),
        (lambda: Schedule().with_stage(Schedule()[LOAD], before=LOOKUP, after=LOOKUP), "before or after"),
        (lambda: Schedule().with_stage(Schedule()[LOAD], before="b"), "before must be another of"),
        (lambda: Stage(name="a", lane="moon"), "lane of stage 'a' must be one of"),  # type: ignore[arg-type]
        (lambda: Stage(name="a", lane="load", ahead=-1), "ahead of stage 'a'"),
        (lambda: Stage(name="a", lane="load", ahead=True), "ahead of stage 'a'"),
    ],
)
def test_what_cannot_run_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_work_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="work of stage 'a'"):
        Stage(name="a", lane="load", work=3)  # type: ignore[arg-type]
