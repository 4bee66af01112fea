"""What a part of the benchmark hands back: figures by their names in the JSON object, and the same for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from benchmarks import harness
from benchmarks.attention.memory import StepMemory
from benchmarks.harness import Drift, Ratio, Timing

T = TypeVar("T")
BIASES = {"both biases": ("", True), "no bias": ("_nobias", False)}
"""How HSTU is measured: the end of the figure's name, and whether there is a bias."""

Aim = tuple[Literal[">=", "<="], float]
"""What the project wants of a figure."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    cap: int = 2048
    batch: int = 8
    heads: int = 8
    dim: int = 64
    caps: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Caps over which the cost per pair is measured."""
    long_row: int = 8192
    """Length of the row at which the workspace is measured."""
    short_batch: int = 256
    """Rows of the batch of short rows."""
    tokens: int = 16_384
    """Tokens of the dense neighbours."""
    rounds: int = 3
    """Turns in which a padded step of seconds takes part; what is fast gets twice as many and one."""
    threads: int = 2
    seed: int = 0
    implementation: str | None = None
    compiled: bool = True
    """Whether the baseline is also measured under torch.compile."""
    attempts: int = 2
    """How often a measurement is made at most while the machine drifts."""

    @property
    def fast_rounds(self) -> int:
        """Turns of what takes less than a second."""
        return 2 * self.rounds + 1


@dataclass
class Report:
    """Figures of one kernel."""

    kernel: str
    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    """What, figure, quartiles or a remark, aim."""
    details: list[tuple[str, tuple[str, ...], list[tuple[object, ...]]]] = field(default_factory=list)
    """Further tables: title, header, rows."""
    drifts: list[Drift] = field(default_factory=list)

    def steadily(self, what: str, measure: Callable[[], T], options: Options) -> T:
        """Measures, again while the machine drifts, and keeps how it drifted."""
        print(f"{self.kernel}: {what}", file=sys.stderr, flush=True)
        result, drift = harness.steadily(measure, attempts=options.attempts)
        self.drifts.append(drift)
        return result

    def figure(
        self,
        key: str,
        what: str,
        value: float,
        *,
        aim: Aim | None = None,
        remark: str = "",
    ) -> None:
        """Adds a figure."""
        self.figures[key] = value
        shown = f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.3g}"
        self.rows.append((what, shown, remark, f"{aim[0]} {aim[1]:,}" if aim else ""))

    def ratio(self, key: str, what: str, ratio: Ratio, *, aim: Aim | None = None) -> None:
        """Adds a ratio with its quartiles."""
        remark = f"{ratio.lower:.3g} .. {ratio.upper:.3g}"
        self.figure(key, what, ratio.median, aim=aim, remark=remark)
        self.figures.setdefault("quartiles", {})[key] = [ratio.lower, ratio.upper]

    def memory_saved(self, ours: StepMemory, padded: StepMemory) -> None:
        """Adds what a step needs less than the padded one."""
        self.figures |= {"bytes_added": ours.added, "bytes_added_padded": padded.added, "bytes_results": ours.results}
        self.figure(
            *("memory_saving_vs_padded", "memory saved, of what a step adds", 1 - ours.added / padded.added),
            aim=(">=", 0.95),
            remark=f"{ours.added / 2**20:,.0f} of {padded.added / 2**20:,.0f} MiB",
        )

    def seconds(self, timings: Mapping[str, Timing]) -> None:
        """Keeps the times of every turn for the record."""
        kept = {name: list(timing.seconds) for name, timing in timings.items()}
        self.figures.setdefault("seconds", {}).update(kept)

    def print(self, title: str) -> None:
        """Prints the tables, and how steady the machine was."""
        harness.print_table(title, ("", "measured", "quartiles or detail", "aim"), self.rows)
        for detail in self.details:
            harness.print_table(*detail)
        for drift in self.drifts:
            print(f"  {drift}")


def times_faster(slow: Timing, fast: Timing) -> Ratio:
    """How many times as long the slow one takes, turn by turn."""
    return Ratio.of(slow.seconds, fast.seconds)


def rate(flops: float, timing: Timing) -> list[float]:
    """FLOP/s of each turn."""
    return [flops / seconds for seconds in timing.seconds]


def share(flops: float, timing: Timing, yardstick: Sequence[float]) -> Ratio:
    """Rate of useful work as a share of a yardstick's FLOP/s in the same turn."""
    return Ratio.of(rate(flops, timing), yardstick)
