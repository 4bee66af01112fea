"""The picture of a timeline: lanes as rows, stages as coloured bars with their batch, exposed communication in red.

The lowest row tells where the time goes: compute, exposed communication, or neither. Left out: operators and kernels
one by one, for which there is the trace (Timeline.write_trace).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbogr_plugin.pipeline.span_unions import Interval, Union, difference, stacked, union, within
from turbogr_plugin.pipeline.stage_spans import Kind, Span

if TYPE_CHECKING:
    from turbogr_plugin.pipeline.timeline import Timeline

COMPUTE, HIDDEN, EXPOSED, OTHER = "#4c956c", "#9db4c0", "#d62828", "#e9e5dc"
#: The dense stages are green, the sparse ones blue to violet, loading is ochre; stages of other names follow in turn.
STAGES = {
    "load": "#d9b44a",
    "feature_dist": "#7fb3d5",
    "wait_features": "#b8d4e8",
    "lookup": "#2e6fa7",
    "lookup_exact": "#5b8fc0",
    "dense_forward": "#74a57f",
    "dense_backward": "#3b7a57",
    "dense_optimizer": "#b5cf9f",
    "embedding_backward": "#7b5ea7",
    "sync_embeddings": "#b39ddb",
}
#: TorchRec's names of what its own pipelines do.
TORCHREC = {
    "copy_batch_to_gpu": "load",
    "inplace_copy_batch_to_gpu": "load",
    "wait_for_batch": "wait_features",
    "dmp_collection_sync": "sync_embeddings",
    "start_sparse_data_dist": "feature_dist",
    "wait_sparse_data_dist": "wait_features",
    "start_embedding_lookup": "lookup",
    "forward": "dense_forward",
    "backward": "dense_backward",
    "optimizer": "dense_optimizer",
    "emb_backward": "embedding_backward",
}
OTHERS = ("#8d99ae", "#cb997e", "#a5a58d", "#6c757d", "#e0a899", "#c3b299", "#95a3a6", "#d8c99b", "#b08968", "#7f7f7f")
INK = "#222222"
_ROW = 0.42
"""Inches of a row."""
_LETTER = 0.0065
"""Share of the picture's width that a letter of a label takes."""
_LEGEND_LETTERS = 180
"""Of a line of the legend."""


@dataclass(frozen=True)
class Bar:
    """A bar of the picture; seconds."""

    start: float
    end: float
    name: str
    """In the legend."""
    label: str = ""
    """On the bar, where there is room."""


@dataclass(frozen=True)
class Row:
    """A row of the picture."""

    name: str
    bars: list[Bar]
    lane: bool = False
    """Whether it shows stages."""


def draw_timeline(timeline: Timeline, path: Path, *, steps: int = 4) -> None:
    """Draws the last steps of a timeline as a PNG.

    Args:
        timeline: to draw.
        path: file to write.
        steps: to show, so many as there are at most.

    Raises:
        ValueError: steps is less than 1.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    shown = min(steps, len(timeline.steps))
    begin, end = timeline.starts[-1 - shown], timeline.starts[-1]
    rows = rows_of(timeline, begin, end)
    figure = Figure(figsize=(12, 1.9 + _ROW * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = colours_of(rows)
    for at, row in enumerate(rows):
        _draw_row(axes, at, row, colours, begin, end)
    # Through all rows, so that one sees which stage runs while nothing hides the communication.
    exposed = _milliseconds(timeline.exposed, begin, end)
    axes.broken_barh(exposed, (-0.75, len(rows) + 0.3), color=EXPOSED, alpha=0.13, linewidth=0, zorder=0)
    for at in range(shown):
        start = (timeline.starts[-1 - shown + at] - begin) * 1e3
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=4)
        axes.text(start, -0.72, f" step {timeline.numbers[at - shown]}", ha="left", va="bottom", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes.set(
        xlim=(0, (end - begin) * 1e3),
        ylim=(len(rows) - 0.45, -0.75),
        xlabel="milliseconds (numbers on bars are batches)",
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    mean = timeline.mean
    axes.set_title(
        f"step {mean.duration * 1e3:.1f} ms   compute {mean.compute_share:.1%}   "
        f"exposed communication {mean.exposed_share:.1%}   other {mean.other_share:.1%}   "
        f"({mean.hidden_share:.0%} of the communication hidden; mean of {len(timeline.steps)} "
        f"step{'s' * (len(timeline.steps) > 1)})",
        fontsize=10,
        loc="left",
        pad=16,
    )
    _legend(figure, colours)
    figure.savefig(path)


def rows_of(timeline: Timeline, begin: float, end: float) -> list[Row]:
    """The rows from `begin` to `end`, downwards.

    They are the lanes that run stages, the caller's first and then the busiest, the device's streams, collectives, and
    where the time goes.
    """
    spans = [span for span in timeline.spans if span.end > begin and span.start < end]
    rows = []
    busy_in: dict[str, float] = {}
    for span in spans:
        if span.kind is Kind.STAGE:
            busy_in[span.lane] = busy_in.get(span.lane, 0.0) + span.duration
    callers = {span.lane for span in spans if span.kind is Kind.STEP}
    for lane in sorted(busy_in, key=lambda lane: (lane not in callers, -busy_in[lane])):
        stages = [span for span in spans if span.lane == lane and span.kind is Kind.STAGE]
        rows.append(Row(timeline.lanes[lane], [_stage_bar(span) for span in _outermost(stages)], lane=True))
    for lane in dict.fromkeys(span.lane for span in spans if span.kind is Kind.KERNEL):
        busy = union((span.start, span.end) for span in spans if span.lane == lane and span.kind is Kind.KERNEL)
        rows.append(Row(timeline.lanes[lane], [Bar(*part, "compute") for part in busy]))
    sent = [span for span in spans if span.kind is Kind.COMMUNICATION]
    in_row = stacked([(span.start, span.end) for span in sent])
    for number in range(max(in_row, default=-1) + 1):
        here = [span for row, span in zip(in_row, sent, strict=True) if row == number]
        bars = [Bar(span.start, span.end, "hidden communication", span.name.partition(":")[2]) for span in here]
        parts = [(span.start, span.end) for span in here]
        seen = difference(union(parts), timeline.compute)
        bars += [Bar(*part, "exposed communication") for part in seen]
        rows.append(Row("communication" if number == 0 else "", bars))
    shares: list[tuple[str, Union]] = [
        ("compute", timeline.compute),
        ("exposed communication", timeline.exposed),
        ("other", timeline.other),
    ]
    rows.append(Row("where the time goes", [Bar(*part, name) for name, parts in shares for part in parts]))
    return rows


def colours_of(rows: Sequence[Row]) -> dict[str, str]:
    """Name in the legend -> colour, in the order of appearance."""
    known = {
        **STAGES,
        **{name: STAGES[stage] for name, stage in TORCHREC.items()},
        "compute": COMPUTE,
        "hidden communication": HIDDEN,
        "exposed communication": EXPOSED,
        "other": OTHER,
    }
    names = dict.fromkeys(bar.name for row in rows for bar in row.bars)
    strangers = [name for name in names if name not in known]
    known |= {name: OTHERS[at % len(OTHERS)] for at, name in enumerate(strangers)}
    return {name: known[name] for name in names}


def _outermost(stages: Sequence[Span]) -> list[Span]:
    """The stages of a lane, by start, without those within another one: TorchRec marks the parts of its own, too."""
    kept: list[Span] = []
    for stage in stages:
        if not kept or stage.end > kept[-1].end:
            kept.append(stage)
    return kept


def _stage_bar(span: Span) -> Bar:
    return Bar(span.start, span.end, span.name, "" if span.batch is None else str(span.batch))


def _draw_row(axes: Any, at: int, row: Row, colours: dict[str, str], begin: float, end: float) -> None:
    """Draws the bars, cut to the picture; of two that overlap the name that appears later is on top."""
    # Of a stage that is too short for its bar at least a line is seen; shares are drawn as they are.
    hairline = 0.6 if row.lane else 0
    for name in dict.fromkeys(bar.name for bar in row.bars):
        bars = [bar for bar in row.bars if bar.name == name]
        # One call for all: of operators there are thousands.
        parts = _milliseconds([(bar.start, bar.end) for bar in bars], begin, end)
        axes.broken_barh(parts, (at - 0.36, 0.72), color=colours[name], linewidth=hairline, zorder=2)
        ink = "white" if _dark(colours[name]) else INK
        for bar in bars:
            for start, width in _milliseconds([(bar.start, bar.end)], begin, end):
                if bar.label and width / 1e3 / (end - begin) > _LETTER * (len(bar.label) + 1):
                    axes.text(
                        start + width / 2, at, bar.label, ha="center", va="center", fontsize=7.5, color=ink, zorder=3
                    )


def _milliseconds(parts: Sequence[Interval], begin: float, end: float) -> list[tuple[float, float]]:
    """(start, width) in milliseconds since `begin`, cut to the picture."""
    return [((start - begin) * 1e3, (stop - start) * 1e3) for start, stop in within(parts, begin, end)]


def _dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _legend(figure: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in colours.items()]
    columns = max(1, min(7, _LEGEND_LETTERS // (4 + max(len(name) for name in colours))))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
