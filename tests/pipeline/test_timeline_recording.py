"""Recording a timeline: on all threads, over a run's end, one at a time, and by the pipeline itself."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler as torch_profiler
from torch.profiler import record_function

from tests.pipeline import small_model
from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.pipeline import TrainPipelineFineGrained
from turbogr_plugin.pipeline.stage_spans import Kind
from turbogr_plugin.pipeline.timeline_recording import TimelineRecording

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    with process_group(CPU, timeout=timedelta(seconds=20)):
        yield


def work(seconds: float, batch: int) -> None:
    """A stage on another thread that computes, waits and sends."""
    with record_function(f"## lookup {batch} ##"):
        torch.ones(64, 64).mm(torch.ones(64, 64))
        time.sleep(seconds)
        dist.all_reduce(torch.ones(1000))


def run(recording: TimelineRecording, calls: int) -> None:
    """A pipeline of a dense stage here and a sparse one on a thread that lives longer than the recording."""
    todo, done, go = threading.Event(), threading.Event(), [True]

    def lane() -> None:
        while todo.wait() and go[0]:
            todo.clear()
            work(0.001, 1)
            done.set()

    thread = threading.Thread(target=lane)
    thread.start()
    try:
        for number in range(calls):
            with recording.step():
                todo.set()
                # The pipeline's own mark of a step is none of the recording's.
                with record_function(f"## step {number} ##"):
                    with record_function(f"## dense_forward {number + 20} ##"), record_function("compute"):
                        time.sleep(0.002)
                    assert done.wait(10)
                done.clear()
            time.sleep(0.003)
    finally:
        go[0] = False
        todo.set()
        thread.join()


@pytest.mark.usefixtures("_one_rank")
def test_a_recording_sees_stages_and_collectives_of_threads_that_were_there_before() -> None:
    recording = TimelineRecording(
        3, CPU, compute=["compute"], lane_of_stage={"dense_forward": "dense"}, numbered_by="dense_forward"
    )
    assert not recording.done
    run(recording, 6)
    assert recording.done
    timeline = recording.timeline()
    assert timeline.numbers == (21, 22, 23)  # the first call and those after the fourth are not counted
    by_lane = {lane: {span.name for span in timeline.spans if span.lane == lane} for lane in timeline.lanes}
    assert {timeline.lanes[lane]: names & {"dense_forward", "lookup"} for lane, names in by_lane.items()}["dense"] == {
        "dense_forward"
    }
    assert sum("lookup" in names for names in by_lane.values()) == 1
    inside = [span for span in timeline.spans if span.kind is Kind.COMMUNICATION]
    assert len(inside) == 3 and {span.name for span in inside} == {"gloo:all_reduce"}
    for step in timeline.steps:
        assert step.compute >= 0.002 and step.communication > 0
        assert step.duration >= 0.005  # until the next call, of the last one, too
        assert step.compute_share + step.exposed_share + step.other_share == pytest.approx(1, abs=1e-9)
    assert recording.timeline() is timeline


@pytest.mark.usefixtures("_one_rank")
def test_a_run_that_ends_within_the_recording_leaves_the_steps_before() -> None:
    recording = TimelineRecording(9, CPU)
    run(recording, 2)
    with recording.step(number=17):
        work(0.001, 1)
    with pytest.raises(StopIteration), recording.step():
        raise StopIteration
    assert recording.done and recording.timeline().numbers == (0, 17)
    assert recording.timeline().counted == "the operators on the host, as the trace has no kernels"
    assert all(step.compute > 0 for step in recording.timeline().steps)


def test_a_recording_without_a_step_says_so() -> None:
    recording = TimelineRecording(1, CPU)
    with recording.step():
        pass
    with pytest.raises(RuntimeError, match="no step was recorded: the first of 1 calls is not counted"):
        recording.timeline()
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        TimelineRecording(0, CPU)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_timeline_of_the_fine_grained_pipeline_has_its_stages_in_their_lanes(staleness: int) -> None:
    model = small_model.sharded(CPU)
    pipeline: Any = TrainPipelineFineGrained(model, small_model.dense_optimizer(model), CPU, staleness=staleness)
    source = iter(small_model.batches(12))
    pipeline.progress(source)
    recording = pipeline.timeline(4)
    while not recording.done:
        pipeline.progress(source)
    timeline = recording.timeline()
    pipeline.detach()
    first = timeline.numbers[0]
    assert timeline.numbers == (first, first + 1, first + 2, first + 3)
    found: dict[str, set[str]] = {}
    for each in timeline.spans:
        if each.kind is Kind.STAGE and each.name in {stage.name for stage in pipeline.schedule.stages}:
            found.setdefault(timeline.lanes[each.lane], set()).add(each.name)
    lanes: dict[str, set[str]] = {}
    for stage in pipeline.schedule.stages:
        lanes.setdefault(stage.lane, set()).add(stage.name)
    assert found == lanes
    assert {each.name for each in timeline.spans if each.kind is Kind.COMMUNICATION}
    assert timeline.mean.compute > 0


@pytest.mark.usefixtures("_one_rank")
def test_a_second_timeline_is_refused_until_the_first_is_over() -> None:
    model = small_model.sharded(CPU)
    pipeline: Any = TrainPipelineFineGrained(model, small_model.dense_optimizer(model), CPU, staleness=1)
    source = iter(small_model.batches(12))
    first = pipeline.timeline(2)
    for calls in (0, 1, 3):  # not begun; in the middle; before the call that ends it
        while first._calls < calls:
            pipeline.progress(source)
        with pytest.raises(RuntimeError, match=r"is not over: .*stop\(\)"):
            pipeline.timeline(1)
    pipeline.progress(source)
    assert first.done and not torch_profiler._is_profiler_enabled
    ended = pipeline.timeline(5)
    pipeline.progress(source)
    ended.stop()
    last = pipeline.timeline(1)
    while not last.done:
        pipeline.progress(source)
    assert len(first.timeline().numbers) == 2 and len(last.timeline().numbers) == 1
    pipeline.close()


@pytest.mark.usefixtures("_one_rank")
def test_closing_a_pipeline_ends_its_recording() -> None:
    model = small_model.sharded(CPU)
    pipeline: Any = TrainPipelineFineGrained(model, small_model.dense_optimizer(model), CPU)
    source = iter(small_model.batches(5))
    recording = pipeline.timeline(9)
    for _ in range(3):
        pipeline.progress(source)
    pipeline.close()
    assert recording.done and not torch_profiler._is_profiler_enabled
    assert len(recording.timeline().numbers) == 2


def test_a_recording_does_not_begin_while_another_profiler_runs() -> None:
    first, second = TimelineRecording(1, CPU), TimelineRecording(1, CPU)
    with first.step():
        pass
    with pytest.raises(RuntimeError, match="another profiler is running"), second.step():
        raise AssertionError("the block of a call that is refused runs")
    first.stop()
    for _ in range(3):
        with second.step():
            torch.ones(3).add(1)
    assert second.done and second.timeline().numbers == (0,)


def test_a_recording_that_nobody_holds_leaves_no_profiler_running() -> None:
    recording = TimelineRecording(5, CPU)
    with recording.step():
        pass
    assert torch_profiler._is_profiler_enabled
    del recording
    gc.collect()
    assert not torch_profiler._is_profiler_enabled


def test_a_recording_that_was_stopped_never_begins() -> None:
    recording = TimelineRecording(1, CPU)
    recording.stop()
    assert recording.done
    with recording.step():
        assert not torch_profiler._is_profiler_enabled
