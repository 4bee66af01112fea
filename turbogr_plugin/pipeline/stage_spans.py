"""Spans of a profiled run: which stage, operator, collective and kernel ran from when to when, and where.

They are read from the trace that `torch.profiler` writes (Chrome's trace format), so any pipeline can be looked at that
was profiled on all threads, TorchRec's own included. A range is a stage if it is named as TorchRec names its stages,
`## <stage> <batch> ##` or `## <stage> ##`; `## step <n> ##` is one call of progress (so is the profiler's own mark,
`ProfilerStep#<n>`).

What is communication: the ranges `gloo:<collective>`, from issue to completion, the wait for the slowest rank included
(of sends and receives that are not collectives gloo ends the range when they are waited for, not when they arrive); on
devices the kernels of NCCL and HCCL, not the calls that enqueue them.

Left out: what the spans mean together (timeline.py), and counters, flows and memory of the trace.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "step"
AFTER_STEPS = "after the steps"
"""The range of a call of progress after those that are counted: where the last of them ends."""
_RANGE = re.compile(r"## (?P<stage>\S.*?)(?: (?P<batch>\d+))? ##|ProfilerStep#(?P<step>\d+)")
_HOST_COLLECTIVE = "gloo:"
_DEVICE_COLLECTIVES = ("nccl", "hccl", "hcom_")
#: Operators by which the host issues a collective or waits for it, and the autograd engine's frames around operators.
_NO_COMPUTE = ("c10d::", "_c10d_functional::", "c10d_functional::", "autograd::", "torch::autograd::")


class Kind(enum.Enum):
    """What a span is."""

    STEP = "step"
    """One call of progress; its batch is the number of the call."""
    STAGE = "stage"
    """A range `## <stage> <batch> ##`."""
    RANGE = "range"
    """Any other range that someone has named."""
    COMMUNICATION = "communication"
    OPERATOR = "operator"
    """An operator on the host."""
    KERNEL = "kernel"
    """A kernel on the device that is no communication."""
    COPY = "copy"
    """A copy or fill on the device."""


@dataclass(frozen=True)
class Span:
    """Something that ran from `start` to `end`."""

    kind: Kind
    name: str
    """Of a stage without the marks and the batch."""
    start: float
    """Seconds since the first span of the trace."""
    end: float
    lane: str
    """The thread or stream: unique in the trace."""
    batch: int | None = None

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start


def spans_of_file(path: Path) -> list[Span]:
    """Spans of a trace in a file; see `spans_of_trace`."""
    with path.open(encoding="utf-8") as file:
        return spans_of_trace(json.load(file))


def spans_of_trace(trace: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Span]:
    """Spans of a trace of torch.profiler, by start.

    Args:
        trace: the object of the file, or its list of events.

    Returns:
        The complete events (`ph` = X) that are a span of some kind; the profiler's calls into a device's runtime, its
        own bookkeeping and operators that only issue or wait for collectives are none.

    Raises:
        ValueError: the object has no `traceEvents`.
    """
    if isinstance(trace, Mapping):
        if "traceEvents" not in trace:
            raise ValueError(f"trace must have the key traceEvents, got {sorted(trace)}.")
        events: Iterable[Any] = trace["traceEvents"]
    else:
        events = trace
    complete = [event for event in events if event.get("ph") == "X"]
    origin = min((float(event["ts"]) for event in complete), default=0.0)
    spans = [span for event in complete if (span := _span(event, origin)) is not None]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _span(event: Mapping[str, Any], origin: float) -> Span | None:
    name, category = str(event["name"]), event.get("cat")
    batch: int | None = None
    kind: Kind | None = None
    if category == "user_annotation":
        marked = _RANGE.fullmatch(name)
        if marked:
            number = marked["batch"] or marked["step"]
            batch = None if number is None else int(number)
            name = marked["stage"] or STEP
            kind = Kind.STEP if name == STEP else Kind.STAGE
        elif name.startswith(_HOST_COLLECTIVE):
            kind = Kind.COMMUNICATION
        elif not name.startswith(_DEVICE_COLLECTIVES):
            kind = Kind.RANGE
    elif category == "cpu_op":
        # Only the operators of a library have a namespace: what has none is a Python function of autograd, which may
        # hold a whole collective.
        if "::" in name and not name.startswith(_NO_COMPUTE):
            kind = Kind.OPERATOR
    elif category == "kernel":
        kind = Kind.COMMUNICATION if name.lower().startswith(_DEVICE_COLLECTIVES) else Kind.KERNEL
    elif category in ("gpu_memcpy", "gpu_memset"):
        kind = Kind.COPY
    if kind is None:
        return None
    start = (float(event["ts"]) - origin) / 1e6
    return Span(kind, name, start, start + float(event.get("dur", 0.0)) / 1e6, f"{event['pid']}/{event['tid']}", batch)
