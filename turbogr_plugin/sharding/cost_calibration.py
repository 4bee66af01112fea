"""The cost model from measured step times: seconds = overhead + linear · ΣL + quadratic · ΣL², fitted over steps.

    times = StepTimes()
    times.record(batch_lengths, seconds)        # of this rank's compute in a step, without waiting for others
    calibrated = times.fit(RankExchange(device))
    plan = LookaheadPlan(calibrated.cost.of(lengths), ...)

No coefficient is negative: where the best fit has one below 0, it is 0 and the others are fitted again. Steps far off
the fit (the first ones, a pause of the machine) are left out, twice. Left out: time that depends on anything but
lengths, such as lookups of hot rows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from turbogr_plugin.backend.rank_exchange import RankExchange
from turbogr_plugin.errors import InputError
from turbogr_plugin.sharding.sequence_cost import SequenceCost

FEWEST_STEPS = 8
"""Steps below which nothing is fitted."""
_OUTLIER = 5.0
"""Median absolute deviations from the fit beyond which a step is left out."""
_LEAST_VARIATION = 0.02
"""Spread of the steps' tokens, as a share of their mean, below which lengths explain nothing."""


@dataclass(frozen=True, kw_only=True)
class CalibratedCost:
    """A cost model in seconds and how well it fits."""

    cost: SequenceCost
    "Seconds of a sequence."
    overhead: float
    "Seconds of a step without tokens."
    error: float
    "Median of |predicted - measured| / measured over the steps that were kept."
    steps: int
    "Steps that were kept."
    left_out: int
    "Steps far off the fit."

    def __str__(self) -> str:
        return (
            f"{self.cost.linear:.4g} s · L + {self.cost.quadratic:.4g} s · L², {self.overhead:.4g} s per step "
            f"(error {self.error:.1%}, {self.steps} steps, {self.left_out} left out)"
        )


class StepTimes:
    """Step times of this rank beside the lengths of its samples."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []

    def record(self, lengths: ArrayLike, seconds: float) -> None:
        """Adds a step.

        Args:
            lengths: [n] of the samples of this rank.
            seconds: that this rank computed; time in which it waited for others must not be in it.

        Raises:
            ValueError: a negative length, or seconds that are not positive.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds must be positive, got {seconds}")
        tokens = SequenceCost.tokens().of(lengths)
        self._rows.append((float(tokens.sum()), float((tokens * tokens).sum()), seconds))

    def fit(self, exchange: RankExchange | None = None) -> CalibratedCost:
        """Fits the steps of all ranks.

        Args:
            exchange: of the ranks that fit together; a collective. All get the fit of the first, to the bit. None fits
                the steps of this rank alone.

        Raises:
            InputError: too few steps, or steps too much alike to tell the coefficients.
        """
        rows = torch.tensor(self._rows, dtype=torch.float64).reshape(-1, 3)
        if exchange is None:
            return fit_step_times(rows.numpy())
        gathered = torch.cat([part.cpu() for part in exchange.gather_rows(rows.to(exchange.device))]).numpy()
        fitted = fit_step_times(gathered)
        # Least squares may round differently on another kind of machine, and plans must agree to the bit.
        own = torch.tensor(
            [[fitted.cost.linear, fitted.cost.quadratic, fitted.overhead]], dtype=torch.float64, device=exchange.device
        )
        linear, quadratic, overhead = exchange.gather_rows(own, [1] * exchange.world_size)[0][0].tolist()
        return CalibratedCost(
            cost=SequenceCost(linear=linear, quadratic=quadratic),
            overhead=overhead,
            error=fitted.error,
            steps=fitted.steps,
            left_out=fitted.left_out,
        )


def fit_step_times(rows: NDArray[np.float64]) -> CalibratedCost:
    """Fits measured steps.

    Args:
        rows: [steps, 3] sum of the lengths, sum of their squares, seconds.

    Raises:
        InputError: too few steps, or steps too much alike to tell the coefficients.
    """
    if len(rows) < FEWEST_STEPS:
        raise InputError(f"{len(rows)} steps were recorded; calibration needs at least {FEWEST_STEPS}")
    tokens = rows[:, 0]
    if tokens.std() < _LEAST_VARIATION * tokens.mean() or tokens.mean() == 0:
        raise InputError(
            f"the recorded steps have {tokens.mean():.0f} tokens with a spread of {tokens.std():.0f}: too much alike "
            "to tell what a token costs; record steps of the fixed batch, or of several batch sizes"
        )
    if np.linalg.cond(rows[:, :2] / rows[:, :2].max(axis=0)) > 1e3:
        raise InputError(
            "the recorded steps have sequences of one length: linear and quadratic cost cannot be told apart; record "
            "steps with sequences of different lengths"
        )
    kept = np.ones(len(rows), dtype=bool)
    coefficients = _fit_from_zero(rows)
    for _ in range(2):
        off = np.abs(_predicted(rows, coefficients) - rows[:, 2])
        kept = off <= _OUTLIER * max(float(np.median(off)), 1e-6 * float(np.median(rows[:, 2])))
        coefficients = _fit_from_zero(rows[kept])
    overhead, linear, quadratic = coefficients
    if linear == quadratic == 0:
        raise InputError(
            "the recorded times do not grow with the lengths: they cannot be balanced by a cost of lengths"
        )
    error = np.abs(_predicted(rows[kept], coefficients) / rows[kept, 2] - 1)
    return CalibratedCost(
        cost=SequenceCost(linear=float(linear), quadratic=float(quadratic)),
        overhead=float(overhead),
        error=float(np.median(error)),
        steps=int(kept.sum()),
        left_out=int((~kept).sum()),
    )


def _predicted(rows: NDArray[np.float64], coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    return coefficients[0] + rows[:, :2] @ coefficients[1:]


def _fit_from_zero(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """[overhead, linear, quadratic] of least squared error, none negative: the best of all choices of what is 0."""
    inputs = np.column_stack([np.ones(len(rows)), rows[:, :2]])
    scale = np.maximum(inputs.max(axis=0), 1.0)
    best, least = np.zeros(3), float((rows[:, 2] ** 2).sum())
    for some in itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3)):
        chosen = list(some)
        found = np.linalg.lstsq(inputs[:, chosen] / scale[chosen], rows[:, 2], rcond=None)[0]
        if found.min() < 0:
            continue
        coefficients = np.zeros(3)
        coefficients[chosen] = found / scale[chosen]
        error = float(((_predicted(rows, coefficients) - rows[:, 2]) ** 2).sum())
        if error < least:
            best, least = coefficients, error
    return best
