"""Records the calls of progress of a pipeline under torch.profiler, on all of its threads.

    recording = TimelineRecording(20, device)
    while not recording.done:
        with recording.step():
            pipeline.progress(batches)
    recording.timeline().write(folder)

`TrainPipelineFineGrained.timeline(steps)` does the same from within. The profiler runs for one call before those that
are counted and for one after them: a span is known only if it begins and ends under the profiler, and collectives of
neighbouring steps reach into the first and the last one. If the run ends before, what is there is counted.

A process has one profiler at a time: two that overlap end each other, and reading the first one then crashes. So a
recording does not begin while another one, or the user's own profiler, is running.

Without `profile_all_threads` torch's profiler sees the thread that started it and no other, and a collective that a
worker thread issues looks absent.

Left out: the profiler of torch_npu, a module of its own; on a device whose kernels torch.profiler does not see, what
the host does counts.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from turbogr_plugin.pipeline.schedule import Schedule
from turbogr_plugin.pipeline.stage_spans import AFTER_STEPS, STEP, Kind, Span, spans_of_file
from turbogr_plugin.pipeline.timeline import Timeline

_MARK = re.compile(r"recorded (?P<what>call|step) (?P<number>\d+)")


class TimelineRecording:
    """A recording of some steps, for any pipeline."""

    def __init__(
        self,
        steps: int,
        device: torch.device,
        *,
        compute: Sequence[str] | None = None,
        lane_of_stage: Mapping[str, str] | None = None,
        numbered_by: str | None = None,
    ) -> None:
        """Args:
            steps: to count.
            device: the pipeline's.
            compute: see `Timeline.of_spans`.
            lane_of_stage: see `Timeline.of_spans`; None: as TrainPipelineFineGrained's own stages.
            numbered_by: the stage whose batch is a step's number; None: they count from 0.

        Raises:
            ValueError: steps is less than 1.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}.")
        self._steps, self._compute = steps, compute
        own = {stage.name: stage.lane for stage in Schedule().stages}
        self._lane_of_stage: Mapping[str, str] = own if lane_of_stage is None else lane_of_stage
        self._numbered_by = numbered_by
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(
            activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )
        self._calls = 0
        self._counted = 0
        self._end: weakref.finalize[[], TimelineRecording] | None = None
        self._done = False
        self._timeline: Timeline | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more is recorded."""
        return self._done

    @contextlib.contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """Records the block as the next call; does nothing once all are recorded.

        Args:
            number: of the step, to be shown; None: see `numbered_by`.

        If the block raises (StopIteration at the end of the data), the recording ends with the steps before.

        Raises:
            RuntimeError: it would be the first call, and another profiler is running in this process.
        """
        if self.done:
            yield
            return
        if self._end is None:
            self._start()
        call, self._calls = self._calls, self._calls + 1
        counts = 1 <= call <= self._steps
        mark = f"recorded call {call - 1}" if number is None else f"recorded step {number}"
        try:
            with record_function(mark if call else "call before those recorded"):
                yield
        except BaseException:
            self.stop()
            raise
        self._counted += counts
        if call > self._steps:
            self.stop()

    def _start(self) -> None:
        if torch_profiler._is_profiler_enabled:
            raise RuntimeError(
                "a timeline cannot be recorded while another profiler is running in this process: end that one (the "
                "stop() of a recording), or begin when it is over."
            )
        self._profile.start()
        # Also for a recording that nobody holds any more: its profiler would slow down all that follows.
        self._end = weakref.finalize(self, self._profile.stop)
        self._end.atexit = False

    def stop(self) -> None:
        """Ends the recording with the steps that are there; one that has not begun never will."""
        self._done = True
        if self._end is not None:
            self._end()  # once

    def timeline(self) -> Timeline:
        """The steps that were recorded; ends the recording.

        Raises:
            RuntimeError: no step was recorded.
        """
        self.stop()
        if self._timeline is None:
            if not self._counted:
                raise RuntimeError(
                    f"no step was recorded: the first of {self._calls} calls is not counted, and a call that raises "
                    "is none."
                )
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "trace.json")
                self._profile.export_chrome_trace(str(file))
                spans = spans_of_file(file)
            self._timeline = Timeline.of_spans(
                _marked(spans, self._counted, self._numbered_by),
                compute=self._compute,
                lane_of_stage=self._lane_of_stage,
            )
        return self._timeline


def _marked(spans: Sequence[Span], counted: int, numbered_by: str | None) -> list[Span]:
    """The spans with the first `counted` of our own marks as the steps, in place of any that the pipeline makes.

    The mark of a call that raised comes after them, as does that of the call after the last one.
    """
    marks = [span for span in spans if _MARK.fullmatch(span.name)]
    rest = [span for span in spans if span.kind is not Kind.STEP and not _MARK.fullmatch(span.name)]
    steps = []
    for mark in marks:
        words = _MARK.fullmatch(mark.name)
        assert words is not None
        number: int | None = int(words["number"])
        if words["what"] == "call":
            within = (span for span in spans if span.name == numbered_by and mark.start <= span.start < mark.end)
            number = next((span.batch for span in within), number)
        steps.append(replace(mark, kind=Kind.STEP, name=STEP, batch=number))
    return [*rest, *steps[:counted], *(replace(mark, name=AFTER_STEPS) for mark in marks[counted:])]
