"""Where the time of a step goes: the arithmetic against counted ticks, the parser, and what is written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr_plugin.pipeline.span_unions import difference, length, stacked, union, within
from turbogr_plugin.pipeline.stage_spans import AFTER_STEPS, Kind, Span, spans_of_trace
from turbogr_plugin.pipeline.timeline import StepTimes, Timeline, step_times, trace_events
from turbogr_plugin.pipeline.timeline_picture import Bar, Row, colours_of, draw_timeline, rows_of

TICKS = 40
INTERVALS = st.lists(st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(sorted).map(tuple), max_size=12)


def ticks(intervals: Any) -> set[int]:
    """The whole ticks that at least one interval covers, counted one by one."""
    return {tick for tick in range(TICKS) if any(start <= tick and tick + 1 <= end for start, end in intervals)}


@given(INTERVALS)
def test_a_union_covers_each_tick_once_in_sorted_pieces_that_do_not_touch(intervals: Any) -> None:
    covered = union(intervals)
    assert ticks(covered) == ticks(intervals) and length(covered) == len(ticks(intervals))
    assert all(start < end for start, end in covered)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(covered))


@given(INTERVALS, INTERVALS)
def test_a_difference_is_what_the_second_union_leaves_of_the_first(first: Any, second: Any) -> None:
    left = difference(union(first), union(second))
    assert ticks(left) == ticks(first) - ticks(second) and length(left) == len(ticks(left))
    assert left == union(left)


@given(INTERVALS)
def test_stacked_intervals_share_no_row_while_they_overlap_and_take_as_few_rows_as_overlap_at_once(
    intervals: Any,
) -> None:
    intervals = sorted(interval for interval in intervals if interval[0] < interval[1])
    rows = stacked(intervals)
    deepest = max((sum(start <= tick < end for start, end in intervals) for tick in range(TICKS)), default=0)
    assert max(rows, default=-1) + 1 == deepest
    for row in range(deepest):
        here = [interval for at, interval in zip(rows, intervals, strict=True) if at == row]
        assert sum(end - start for start, end in here) == len(ticks(here))


@given(INTERVALS, INTERVALS, st.integers(0, TICKS - 1), st.integers(1, TICKS))
def test_the_times_of_a_step_are_counted_ticks_and_its_shares_add_up_to_one(
    compute: Any, communication: Any, start: int, duration: int
) -> None:
    end = min(TICKS, start + duration)
    step = step_times(union(compute), union(communication), start, end)
    window = set(range(start, end))
    busy, sent = ticks(compute) & window, ticks(communication) & window
    assert (step.duration, step.compute, step.communication) == (end - start, len(busy), len(sent))
    assert (step.exposed, step.other) == (len(sent - busy), len(window - busy - sent))
    assert step.compute_share + step.exposed_share + step.other_share == pytest.approx(1, abs=1e-12)


def span(kind: Kind, name: str, start: float, end: float, lane: str = "1/1", batch: int | None = None) -> Span:
    """A span as a trace would give it."""
    return Span(kind, name, start, end, lane, batch)


def two_steps() -> list[Span]:
    """Steps of 10 s and 20 s on a clock that starts at 100."""
    return [
        span(Kind.STEP, "step", 100, 108, batch=7),
        span(Kind.STEP, "step", 110, 119, batch=8),
        span(Kind.RANGE, AFTER_STEPS, 130, 140),
        span(Kind.STAGE, "dense_forward", 101, 106, batch=7),
        span(Kind.OPERATOR, "aten::mm", 101, 104),
        span(Kind.OPERATOR, "aten::t", 103, 105),
        span(Kind.STAGE, "lookup", 101, 109, "1/2", 8),
        span(Kind.COMMUNICATION, "gloo:all_to_all", 104, 107, "1/9"),
        span(Kind.COMMUNICATION, "gloo:all_to_all", 106, 112, "1/9"),
        span(Kind.OPERATOR, "fbgemm::lookup", 111, 113, "1/2"),
        span(Kind.COMMUNICATION, "gloo:all_reduce", 99, 100.5, "1/9"),
        span(Kind.OPERATOR, "aten::mm", 131, 139),
    ]


def test_steps_follow_each_other_without_a_gap_until_the_call_after_them() -> None:
    timeline = Timeline.of_spans(two_steps())
    assert timeline.numbers == (7, 8) and timeline.starts == (100, 110, 130)
    assert timeline.steps[0] == StepTimes(duration=10, compute=4, communication=6.5, exposed=5.5, other=0.5)
    assert timeline.steps[1] == StepTimes(duration=20, compute=2, communication=2, exposed=1, other=17)
    assert timeline.mean == StepTimes(duration=15, compute=3, communication=4.25, exposed=3.25, other=8.75)
    assert timeline.mean.compute_share == 6 / 30 and timeline.mean.hidden_share == pytest.approx(1 - 3.25 / 4.25)
    assert length(timeline.exposed) == 6.5 and length(timeline.other) == 17.5


def test_the_last_step_ends_by_itself_where_no_call_follows() -> None:
    timeline = Timeline.of_spans([each for each in two_steps() if each.name != AFTER_STEPS])
    assert timeline.starts == (100, 110, 119)


def test_compute_is_the_ranges_that_are_named_else_kernels_else_operators() -> None:
    spans = two_steps()
    assert Timeline.of_spans(spans).counted == "the operators on the host, as the trace has no kernels"
    named = Timeline.of_spans(spans, compute=["dense_forward"])
    assert named.counted == "the range dense_forward" and named.compute == [(101, 106)]
    kernels = [*spans, span(Kind.KERNEL, "gemm", 102, 103, "0/7"), span(Kind.COPY, "Memcpy HtoD", 104, 106, "0/8")]
    assert Timeline.of_spans(kernels).counted == "the kernels on the device"
    assert Timeline.of_spans(kernels).compute == [(102, 103)]


def test_names_that_no_range_has_and_a_run_without_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compute must name .*dense_forward, lookup.*got \['dense'\]"):
        Timeline.of_spans(two_steps(), compute=["dense"])
    with pytest.raises(ValueError, match="at least one step"):
        Timeline.of_spans([each for each in two_steps() if each.kind is not Kind.STEP])


def event(name: str, category: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
    """A complete event of a trace, microseconds."""
    return {"ph": "X", "name": name, "cat": category, "pid": 5, "tid": thread, "ts": start, "dur": duration}


def test_a_trace_gives_stages_collectives_operators_and_kernels_and_nothing_else() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 5, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "pid": 5, "tid": 1, "ts": 1.0},
        event("gloo:all_to_all", "user_annotation", 5e12 + 30, 40, 9),
        event("## step 12 ##", "user_annotation", 5e12 + 10, 90),
        event("ProfilerStep#3", "user_annotation", 5e12 + 10, 80),
        event("## dense_forward 12 ##", "user_annotation", 5e12 + 20, 10),
        event("## wait_for_batch ##", "user_annotation", 5e12 + 15, 1),
        event("## start_sparse_data_dist 13 ##", "user_annotation", 5e12 + 16, 1),
        event("compute", "user_annotation", 5e12 + 17, 1),
        event("aten::mm", "cpu_op", 5e12 + 21, 2),
        event("c10d::alltoall_base_", "cpu_op", 5e12 + 24, 2),
        event("_c10d_functional::wait_tensor", "cpu_op", 5e12 + 24, 2),
        event("All2AllSequenceBackward", "cpu_op", 5e12 + 26, 2),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 5e12 + 26, 2),
        event("nccl:all_to_all", "user_annotation", 5e12 + 40, 2),
        event("nccl:all_to_all", "gpu_user_annotation", 5e12 + 40, 2),
        event("cudaLaunchKernel", "cuda_runtime", 5e12 + 41, 1),
        event("ampere_sgemm", "kernel", 5e12 + 42, 1, 7),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "kernel", 5e12 + 43, 1, 20),
        event("hcom_alltoallv_", "kernel", 5e12 + 44, 1, 20),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 5e12 + 45, 1, 8),
    ]
    found = spans_of_trace({"traceEvents": events})
    assert [(each.kind, each.name, each.batch, each.lane) for each in found] == [
        (Kind.STEP, "step", 12, "5/1"),
        (Kind.STEP, "step", 3, "5/1"),
        (Kind.STAGE, "wait_for_batch", None, "5/1"),
        (Kind.STAGE, "start_sparse_data_dist", 13, "5/1"),
        (Kind.RANGE, "compute", None, "5/1"),
        (Kind.STAGE, "dense_forward", 12, "5/1"),
        (Kind.OPERATOR, "aten::mm", None, "5/1"),
        (Kind.COMMUNICATION, "gloo:all_to_all", None, "5/9"),
        (Kind.KERNEL, "ampere_sgemm", None, "5/7"),
        (Kind.COMMUNICATION, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", None, "5/20"),
        (Kind.COMMUNICATION, "hcom_alltoallv_", None, "5/20"),
        (Kind.COPY, "Memcpy HtoD (Pinned -> Device)", None, "5/8"),
    ]
    assert found[0].start == 0 and found[7].start == pytest.approx(20e-6) and found[7].duration == pytest.approx(40e-6)
    assert spans_of_trace(reversed(events)) == found
    with pytest.raises(ValueError, match=r"traceEvents, got \['events'\]"):
        spans_of_trace({"events": []})


def test_the_trace_for_perfetto_nests_on_each_lane_and_its_time_adds_up(tmp_path: Path) -> None:
    timeline = Timeline.of_spans(two_steps(), lane_of_stage={"dense_forward": "dense", "lookup": "sparse"})
    timeline.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == trace_events(timeline)
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert sorted(names.values()) == ["communication 1", "communication 2", "dense", "sparse", "time"]
    for lane in names:
        open_until: list[float] = []
        here = [each for each in events if each["ph"] == "X" and each["tid"] == lane]
        for each in sorted(here, key=lambda each: (each["ts"], -each["dur"])):
            while open_until and open_until[-1] <= each["ts"]:
                open_until.pop()
            # aten::t reaches out of aten::mm only because this test made it so.
            assert not open_until or each["ts"] + each["dur"] <= open_until[-1] or each["name"] == "aten::t"
            open_until.append(each["ts"] + each["dur"])
    where = [each for each in events if each["ph"] == "X" and names[each["tid"]] == "time"]
    assert sum(each["dur"] for each in where) == pytest.approx(30e6)


def test_numbers_trace_and_picture_are_written(tmp_path: Path) -> None:
    timeline = Timeline.of_spans(two_steps())
    timeline.write(tmp_path / "new" / "folder")
    written = {file.name: file for file in (tmp_path / "new" / "folder").iterdir()}
    assert sorted(written) == ["timeline.json", "timeline.png", "timeline_trace.json"]
    assert written["timeline.png"].read_bytes().startswith(b"\x89PNG")
    record = json.loads(written["timeline.json"].read_text())
    assert [step["step"] for step in record["steps"]] == [7, 8] and record["mean"]["exposed_ms"] == 3250
    shares = [record["mean"][f"{name}_share"] for name in ("compute", "exposed", "other")]
    assert sum(shares) == pytest.approx(1)
    table = timeline.table().splitlines()
    assert [line.split("  ")[1] for line in table[1:]] == ["compute", "communication", "exposed communication", "other"]
    assert "20.00%" in table[1] and "3250.00 ms" in table[3]


def test_the_picture_has_the_callers_lane_first_and_where_the_time_goes_last(tmp_path: Path) -> None:
    timeline = Timeline.of_spans(two_steps(), lane_of_stage={"dense_forward": "dense", "lookup": "sparse"})
    rows = rows_of(timeline, 100, 130)
    assert [row.name for row in rows] == ["dense", "sparse", "communication", "", "where the time goes"]
    exposed = {(bar.start, bar.end) for row in rows[2:4] for bar in row.bars if bar.name == "exposed communication"}
    assert union(exposed) == union([*timeline.exposed, (99, 100)])  # what lies before the first step is cut when drawn
    assert length(within([(bar.start, bar.end) for bar in rows[-1].bars], 100, 130)) == 30
    assert set(colours_of(rows)) == {bar.name for row in rows for bar in row.bars}
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        draw_timeline(timeline, tmp_path / "none.png", steps=0)


def test_the_picture_leaves_out_the_parts_of_a_stage() -> None:
    spans = [
        *two_steps(),
        span(Kind.STAGE, "All2All_Seq_fwd", 102, 104, "1/2"),
        span(Kind.STAGE, "load", 109, 111, "1/2"),
    ]
    rows = rows_of(Timeline.of_spans(spans), 100, 130)
    assert [bar.name for bar in rows[1].bars] == ["lookup", "load"]


def test_torchrecs_own_stages_have_the_colours_of_what_they_do() -> None:
    rows = [Row("caller", [Bar(0, 1, "forward"), Bar(1, 2, "dense_forward"), Bar(2, 3, "new"), Bar(3, 4, "newer")])]
    colours = colours_of(rows)
    assert colours["forward"] == colours["dense_forward"]
    assert len({*colours.values()}) == 3


def test_a_step_that_only_computes_is_drawn_and_has_nothing_to_hide(tmp_path: Path) -> None:
    timeline = Timeline.of_spans([span(Kind.STEP, "step", 0, 4), span(Kind.OPERATOR, "aten::mm", 0, 4)])
    timeline.write(tmp_path)
    assert timeline.mean.compute_share == 1 and timeline.mean.hidden_share == 1
    assert timeline.exposed == timeline.other == []
