"""Lanes work off what they get in order, see the world of whoever handed it out, and end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from turbogr_plugin.backend.streams import HostStream
from turbogr_plugin.pipeline.lanes import CallersLane, StageRun, ThreadLane

CPU = torch.device("cpu")
PATIENCE = 20.0

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    made = ThreadLane("test", CPU, HostStream())
    yield made
    made.close()


def test_work_is_done_in_order_in_another_thread(lane: ThreadLane) -> None:
    seen: list[tuple[int, int]] = []
    runs = [lane.submit(lambda at=at: seen.append((at, threading.get_ident())), []) for at in range(50)]  # type: ignore[misc]
    for run in runs:
        run.wait()
    assert [at for at, _ in seen] == list(range(50))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1


def test_work_starts_when_what_it_needs_is_done(lane: ThreadLane) -> None:
    other, gate, seen = ThreadLane("other", CPU, HostStream()), threading.Event(), []
    first = other.submit(lambda: (gate.wait(PATIENCE), seen.append("first")), [])  # type: ignore[arg-type,return-value]
    second = lane.submit(lambda: seen.append("second"), [first])
    assert not second.done()
    gate.set()
    second.wait()
    assert seen == ["first", "second"]
    other.close()


def test_an_exception_reaches_those_who_wait_and_all_that_follows(lane: ThreadLane) -> None:
    def fail() -> None:
        raise ValueError("it broke")

    seen: list[int] = []
    other = ThreadLane("other", CPU, HostStream())
    failed = lane.submit(fail, [])
    behind = lane.submit(lambda: seen.append(1), [])
    elsewhere = other.submit(lambda: seen.append(2), [failed])
    for run in (failed, behind, elsewhere):
        with pytest.raises(ValueError, match="it broke"):
            run.wait()
    assert seen == []
    other.close()


def test_a_lane_in_the_callers_thread_raises_what_its_work_raises() -> None:
    def fail() -> None:
        raise ValueError("it broke")

    for lane in (CallersLane(CPU), CallersLane(CPU, HostStream())):
        with pytest.raises(ValueError, match="it broke"):
            lane.submit(fail, [])


def _state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled(),
    )


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.enable_grad(),
    ],
    ids=["no_grad", "inference", "autocast", "autocast-uncached", "grad"],
)
def test_work_sees_the_modes_of_whoever_handed_it_out(mode: Any, lane: ThreadLane) -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(_state())

    outside = _state()
    with mode:
        inside = _state()
        run = lane.submit(look, [])
    lane.submit(look, []).wait()
    run.wait()
    assert seen == [inside, outside]


def test_a_lane_ends_when_it_has_worked_off_what_it_has() -> None:
    lane, seen = ThreadLane("test", CPU, HostStream()), []
    runs: list[StageRun] = [lane.submit(lambda at=at: seen.append(at), []) for at in range(20)]  # type: ignore[misc]
    lane.close(timeout=PATIENCE)
    assert not lane._thread.is_alive()
    assert seen == list(range(20)) and all(run.done() for run in runs)
