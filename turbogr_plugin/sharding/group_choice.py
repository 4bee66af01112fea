"""Which size of groups, and why not the others, in words with their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turbogr_plugin.sharding.group_candidates import GroupCandidate
from turbogr_plugin.sharding.plan_report import Candidate, PlanReport


def choose(candidates: Sequence[GroupCandidate], minimum_gain: float) -> tuple[GroupCandidate | None, list[Candidate]]:
    """The size to take, and all of them with their verdicts.

    The largest group that fits is the base, since it holds fewest replicas; a smaller one has to beat what is chosen so
    far by `minimum_gain` of the step.

    Args:
        candidates: largest group first.
        minimum_gain: share of the step.
    """
    best: GroupCandidate | None = None
    for candidate in candidates:
        step = candidate.report.prediction
        if step is None:
            continue
        if (
            best is None
            or best.report.prediction is None
            or step.step < best.report.prediction.step * (1 - minimum_gain)
        ):
            best = candidate
    verdicts = [replace(each.report, verdict=_verdict(each, best, minimum_gain)) for each in candidates]
    return best, verdicts


def refusal(candidates: Sequence[GroupCandidate], others: Sequence[GroupCandidate], report: PlanReport) -> str:
    """What is missing, and the nearest plan that would fit.

    Args:
        candidates: sizes that were asked for, none of which fits.
        others: all other sizes of the topology.
        report: of the candidates.
    """
    nearest = min(candidates, key=lambda each: max(each.report.missing.values(), default=0))
    found = nearest.report
    lines = [f"no plan for {found.groups} group(s) of {found.group_size} ranks"]
    if found.missing:
        lines[0] += (
            f": the tables need {_gb(found.memory_needed)} on the fullest rank, which has "
            f"{_gb(found.memory_allowed)} for them"
        )
        lines.append(f"missing: {_by_rank(found.missing)}")
    else:
        lines.append(found.verdict)
    fitting = [each.report for each in others if each.report.fits]
    if fitting:
        smallest = min(fitting, key=lambda each: each.group_size)
        lines.append(
            f"the smallest group that fits is {smallest.group_size} (needs {_gb(smallest.memory_needed)} of "
            f"{_gb(smallest.memory_allowed)} per rank): group_size={smallest.group_size}"
        )
    elif all(each.report.missing for each in (*candidates, *others)):
        largest = max((*candidates, *others), key=lambda each: each.report.group_size).report
        shortage = max(largest.missing.values(), default=0)
        more = f"{_gb(shortage)} more memory per rank (a smaller storage reservation, activation or batch)"
        if largest.memory_allowed:
            ranks = largest.group_size * -(-largest.memory_needed // largest.memory_allowed)
            more = f"about {ranks} ranks, or {more}"
        lines.append(
            f"no group fits: with all {largest.group_size} ranks in one group {_gb(shortage)} are missing per rank; "
            f"{more} would do"
        )
    return "\n".join([*lines, *report.lines()])


def _verdict(candidate: GroupCandidate, best: GroupCandidate | None, minimum_gain: float) -> str:
    own = candidate.report
    if candidate is best:
        return "chosen"
    if own.prediction is None:
        return own.verdict or f"does not fit: {_by_rank(own.missing)} missing"
    assert best is not None and best.report.prediction is not None
    mine, taken = own.prediction, best.report.prediction
    parts = {
        "all-to-all": mine.all_to_all - taken.all_to_all,
        "exchange": mine.exchange - taken.exchange,
        "lookup and update": mine.lookup - taken.lookup,
    }
    told = ", ".join(f"{name} {1e3 * value:+.3f} ms" for name, value in parts.items())
    moved = own.between_domains_bytes - best.report.between_domains_bytes
    reason = f"{told}; {moved / 1e6:+.2f} MB per rank between fast domains"
    if mine.step < taken.step:
        gain = 1 - mine.step / taken.step
        return (
            f"saves {gain:.1%} of the step, less than minimum_gain {minimum_gain:.0%} asks of more replicas: {reason}"
        )
    return f"slower by {mine.step / taken.step - 1:.1%}: {reason}"


def _by_rank(missing: dict[int, int]) -> str:
    """Equal shortages of consecutive ranks in one term, the first eight terms."""
    terms: list[tuple[int, int, int]] = []
    for rank, size in sorted(missing.items()):
        if terms and terms[-1][1] == rank - 1 and terms[-1][2] == size:
            terms[-1] = (terms[-1][0], rank, size)
        else:
            terms.append((rank, rank, size))
    told = [
        f"{_gb(size)} on rank {a}" if a == b else f"{_gb(size)} on each of ranks {a} to {b}" for a, b, size in terms
    ]
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
