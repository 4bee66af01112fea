"""How a plan was chosen: per size of groups the memory, the bytes, the predicted times, and why the others lost.

It prints under the plan and is kept in the plan's file. Bytes are those of the rank that has most of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from turbogr_plugin.sharding.step_prediction import StepPrediction


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One size of groups."""

    group_size: int
    groups: int
    memory_needed: int
    """Bytes of tables and what goes with them, on the rank with most."""
    memory_allowed: int
    """Bytes that this rank has for them."""
    missing: dict[int, int] = field(default_factory=dict)
    """Bytes that do not fit, by rank of a group."""
    prediction: StepPrediction | None = None
    """None where it does not fit."""
    all_to_all_bytes: float = 0.0
    """Per rank and step, inside and between fast domains."""
    exchange_bytes: float = 0.0
    between_domains_bytes: float = 0.0
    """Of both, what one rank sends out of its fast domain, in the mean over ranks."""
    algorithms: dict[str, int] = field(default_factory=dict)
    """How many tables exchange gradients in which way."""
    types: dict[str, int] = field(default_factory=dict)
    """How many tables have which sharding type."""
    proposals: int = 0
    verdict: str = ""
    """"chosen", or why not."""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.prediction is not None


#: Bytes on an Ethernet link per byte of TCP payload: frames of 1,514 bytes carry 1,448, and an acknowledgement of 66
#: bytes answers every second frame of the other direction.
TCP_FRAMING = (1_514 + 66 / 2) / 1_448


def sent_over_link(
    candidate: Candidate, *, ranks: int, world: int, dense_bytes: float = 0.0, framing: float = 1.0
) -> float:
    """Bytes per step that one fast domain sends to the others, as an interface counts them.

    Args:
        candidate: of a report.
        ranks: of the domain.
        world: all ranks.
        dense_bytes: gradients of the dense part, whose all-reduce runs as one ring over all ranks.
        framing: bytes on the link per byte of payload; `TCP_FRAMING` over Ethernet.
    """
    return framing * (ranks * candidate.between_domains_bytes + 2 * (world - 1) / world * dense_bytes)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """All sizes that were looked at."""

    candidates: list[Candidate]
    """Largest groups first."""
    notes: list[str] = field(default_factory=list)
    """What the figures leave out or assume for this model and topology."""
    seconds: float = field(default=0.0, compare=False)
    """That planning took."""

    def lines(self) -> list[str]:
        """The report as a table, a line of reason per size, and the notes."""
        head = (
            "group",
            "groups",
            "GB/rank",
            "of",
            "lookup",
            "all-to-all",
            "exchange",
            "all-reduce",
            "dense",
            "step ms",
            "MB out",
        )
        rows = [head, *(_row(candidate) for candidate in self.candidates)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        reasons = [
            f"{candidate.group_size:>6} x {candidate.groups:<5} {candidate.verdict}"
            + (f" ({_counts(candidate.types)})" if candidate.types else "")
            for candidate in self.candidates
        ]
        return [
            "Sizes of groups: times in ms per step of the slowest rank, MB out: per rank and step between fast domains",
            *table,
            *reasons,
            *(f"note: {note}" for note in self.notes),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PlanReport:
        """Reads what `as_json` gives."""
        candidates = []
        for candidate in values["candidates"]:
            prediction = candidate["prediction"]
            candidates.append(
                Candidate(
                    **{
                        **candidate,
                        "missing": {int(rank): missing for rank, missing in candidate["missing"].items()},
                        "prediction": None if prediction is None else StepPrediction(**prediction),
                    }
                )
            )
        return cls(candidates=candidates, notes=values["notes"], seconds=values["seconds"])


def _row(candidate: Candidate) -> tuple[str, ...]:
    memory = (f"{candidate.memory_needed / 1e9:.3g}", f"{candidate.memory_allowed / 1e9:.3g}")
    size = (str(candidate.group_size), str(candidate.groups), *memory)
    found = candidate.prediction
    if found is None:
        return (*size, *("-",) * 7)
    times = (found.lookup, found.all_to_all, found.exchange, found.all_reduce, found.dense, found.step)
    return (*size, *(f"{1e3 * value:.3f}" for value in times), f"{candidate.between_domains_bytes / 1e6:.2f}")


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items(), key=lambda each: -each[1]))
