"""Where the time of a step goes: compute, communication, what of it is exposed, and the rest.

These are the columns of the paper's Table 6. All are lengths of unions of spans on one clock, so nothing counts twice
that runs on two threads or streams at once:

    compute                 the time in which something is computed
    communication           the time in which a collective is under way, the wait for the slowest rank included
    exposed communication   what of it no compute covers
    other                   neither (the paper's "free"): the host's own work, copies, waits for the loader

compute + exposed + other is the step. What counts as compute:

    on a device      kernels other than those of collectives
    on the host      operators on any thread, lookup and update of tables included, as on a device. The ranges of the
                     dense stages would count more: DDP's wait for its all-reduce lies within the backward's.
    by choice        ranges of given names, where the dense part is no operator (a timed wait, say)

The steps follow each other without a gap: each lasts until the next one begins. Left out: recording
(timeline_recording.py) and the picture (timeline_picture.py).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turbogr_plugin.pipeline.span_unions import Union, difference, length, stacked, union, within
from turbogr_plugin.pipeline.stage_spans import AFTER_STEPS, Kind, Span

COLUMNS = ("compute", "communication", "exposed communication", "other")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, or of several in the mean."""

    duration: float
    compute: float
    communication: float
    exposed: float
    """Communication that no compute covers."""
    other: float

    @property
    def compute_share(self) -> float:
        """Of the step; the three shares compute, exposed and other add up to 1."""
        return self.compute / self.duration

    @property
    def communication_share(self) -> float:
        """Of the step, hidden or not."""
        return self.communication / self.duration

    @property
    def exposed_share(self) -> float:
        """Of the step."""
        return self.exposed / self.duration

    @property
    def other_share(self) -> float:
        """Of the step."""
        return self.other / self.duration

    @property
    def hidden_share(self) -> float:
        """Of communication: what compute covers (1 without communication)."""
        return 1 - self.exposed / self.communication if self.communication else 1.0

    def record(self) -> dict[str, float]:
        """Milliseconds and shares, for JSON."""
        seconds = {f"{name}_ms": value * 1e3 for name, value in asdict(self).items()}
        shares = ("compute_share", "communication_share", "exposed_share", "other_share", "hidden_share")
        return {**seconds, **{name: getattr(self, name) for name in shares}}


@dataclass(frozen=True)
class Timeline:
    """The steps of a profiled run."""

    spans: tuple[Span, ...]
    """From the first step to the last, by start."""
    numbers: tuple[int, ...]
    """Of the steps."""
    starts: tuple[float, ...]
    """Where each step begins and, last, where the last one ends; seconds."""
    steps: tuple[StepTimes, ...]
    compute: Union
    """When something is computed."""
    communication: Union
    """When a collective is under way."""
    counted: str
    """What counts as compute."""
    lanes: Mapping[str, str] = field(default_factory=dict)
    """Names of lanes, for people."""

    @classmethod
    def of_spans(
        cls,
        spans: Sequence[Span],
        *,
        compute: Sequence[str] | None = None,
        lane_of_stage: Mapping[str, str] | None = None,
    ) -> Timeline:
        """The timeline of a run's spans.

        Args:
            spans: of one process, with at least one step.
            compute: names of the stages and ranges that count as compute; None: kernels if there are any, else
                operators.
            lane_of_stage: stage -> name of the lane that runs it, to name threads by.

        Raises:
            ValueError: no step, or none of the names of `compute` is in the spans.
        """
        marks = sorted((span for span in spans if span.kind is Kind.STEP), key=lambda span: span.start)
        if not marks:
            raise ValueError('spans must have at least one step, a range named "## step <n> ##", and have none.')
        after = [span.start for span in spans if span.kind is Kind.RANGE and span.name == AFTER_STEPS]
        starts = [*(mark.start for mark in marks), min(after, default=marks[-1].end)]
        computing, counted = _counted(spans, compute)
        busy = within(union((span.start, span.end) for span in computing), starts[0], starts[-1])
        sent = (span for span in spans if span.kind is Kind.COMMUNICATION)
        communication = within(union((span.start, span.end) for span in sent), starts[0], starts[-1])
        shown = tuple(span for span in spans if span.end > starts[0] and span.start < starts[-1])
        return cls(
            spans=tuple(sorted(shown, key=lambda span: (span.start, -span.end))),
            numbers=tuple(at if mark.batch is None else mark.batch for at, mark in enumerate(marks)),
            starts=tuple(starts),
            steps=tuple(step_times(busy, communication, start, end) for start, end in itertools.pairwise(starts)),
            compute=busy,
            communication=communication,
            counted=counted,
            lanes=_lane_names(shown, marks[0].lane, lane_of_stage or {}),
        )

    @property
    def mean(self) -> StepTimes:
        """Of a step: its shares are those of the whole time."""
        sums = [sum(values) / len(self.steps) for values in zip(*(_seconds(step) for step in self.steps), strict=True)]
        return StepTimes(*sums)

    @property
    def exposed(self) -> Union:
        """When communication is exposed."""
        return difference(self.communication, self.compute)

    @property
    def other(self) -> Union:
        """When nothing is computed and no collective is under way."""
        return difference([(self.starts[0], self.starts[-1])], union([*self.compute, *self.communication]))

    def table(self) -> str:
        """The paper's Table 6 of this run, in the mean of its steps: milliseconds and shares."""
        mean = self.mean
        values = (mean.compute, mean.communication, mean.exposed, mean.other)
        lines = [f"{len(self.steps)} steps of {mean.duration * 1e3:.2f} ms; compute is {self.counted}"]
        lines += [
            f"  {name:<21}  {value * 1e3:9.2f} ms  {value / mean.duration:7.2%}"
            for name, value in zip(COLUMNS, values, strict=True)
        ]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        steps = [{"step": at, **step.record()} for at, step in zip(self.numbers, self.steps, strict=True)]
        return {"compute_is": self.counted, "mean": self.mean.record(), "steps": steps}

    def write_record(self, path: Path) -> None:
        """Writes `record` as JSON."""
        path.write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")

    def write_trace(self, path: Path) -> None:
        """Writes a trace for ui.perfetto.dev or chrome://tracing: lanes, collectives, and where the time goes."""
        path.write_text(json.dumps({"traceEvents": trace_events(self), "displayTimeUnit": "ms"}), encoding="utf-8")

    def write_picture(self, path: Path, *, steps: int = 4) -> None:
        """Draws the last `steps` steps as a PNG."""
        from turbogr_plugin.pipeline.timeline_picture import draw_timeline

        draw_timeline(self, path, steps=steps)

    def write(self, folder: Path) -> None:
        """Writes timeline.json, timeline_trace.json and timeline.png into a folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        self.write_record(folder / "timeline.json")
        self.write_trace(folder / "timeline_trace.json")
        self.write_picture(folder / "timeline.png")


def step_times(compute: Union, communication: Union, start: float, end: float) -> StepTimes:
    """Times of the step from `start` to `end`, seconds."""
    busy, sent = within(compute, start, end), within(communication, start, end)
    return StepTimes(
        duration=end - start,
        compute=length(busy),
        communication=length(sent),
        exposed=length(difference(sent, busy)),
        other=length(difference([(start, end)], union([*busy, *sent]))),
    )


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Events of a trace in Chrome's format; one thread per lane, so that what is on one never overlaps by halves."""
    lanes: dict[str, list[tuple[str, float, float]]] = {
        "time": [
            *(("compute", *part) for part in timeline.compute),
            *(("exposed communication", *part) for part in timeline.exposed),
            *(("other", *part) for part in timeline.other),
        ]
    }
    sent = [span for span in timeline.spans if span.kind is Kind.COMMUNICATION]
    for row, span in zip(stacked([(span.start, span.end) for span in sent]), sent, strict=True):
        lanes.setdefault(f"communication {row + 1}", []).append((span.name, span.start, span.end))
    for span in timeline.spans:
        if span.kind is not Kind.COMMUNICATION:
            name = span.name if span.batch is None else f"{span.name} {span.batch}"
            lanes.setdefault(timeline.lanes[span.lane], []).append((name, span.start, span.end))
    events: list[dict[str, Any]] = []
    for at, (lane, parts) in enumerate(lanes.items()):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": at, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": at, "args": {"sort_index": at}})
        events += [
            {"ph": "X", "name": name, "pid": 0, "tid": at, "ts": start * 1e6, "dur": (end - start) * 1e6}
            for name, start, end in parts
        ]
    return events


def _counted(spans: Sequence[Span], names: Sequence[str] | None) -> tuple[list[Span], str]:
    """The spans that count as compute, and what they are."""
    if names is not None:
        chosen = [span for span in spans if span.kind in (Kind.STAGE, Kind.RANGE) and span.name in names]
        if not chosen:
            here = sorted({span.name for span in spans if span.kind in (Kind.STAGE, Kind.RANGE)})
            raise ValueError(f"compute must name stages or ranges of the run ({', '.join(here)}), got {list(names)}.")
        return chosen, f"the range{'s' * (len(names) > 1)} {', '.join(names)}"
    kernels = [span for span in spans if span.kind is Kind.KERNEL]
    if kernels:
        return kernels, "the kernels on the device"
    return [
        span for span in spans if span.kind is Kind.OPERATOR
    ], "the operators on the host, as the trace has no kernels"


def _lane_names(spans: Sequence[Span], caller: str, lane_of_stage: Mapping[str, str]) -> dict[str, str]:
    """Lane -> a name of its own: of the lanes whose stages it runs, else what kind of lane it is."""
    names: dict[str, str] = {}
    for lane in dict.fromkeys(span.lane for span in spans):
        here = [span for span in spans if span.lane == lane]
        stages = [lane_of_stage[span.name] for span in here if span.name in lane_of_stage and span.kind is Kind.STAGE]
        if stages:
            name = " + ".join(dict.fromkeys(stages))
        elif lane == caller:
            name = "caller"
        elif any(span.kind in (Kind.KERNEL, Kind.COPY) for span in here):
            name = f"stream {lane.rpartition('/')[2]}"
        else:
            name = f"thread {lane.rpartition('/')[2]}"
        names[lane] = name if name not in names.values() else f"{name} ({lane.rpartition('/')[2]})"
    return names


def _seconds(step: StepTimes) -> tuple[float, ...]:
    return step.duration, step.compute, step.communication, step.exposed, step.other
