from __future__ import annotations

import numpy as np
import pytest

from tests.sharding.length_draws import DRAWS
from turbogr_plugin.errors import InputError
from turbogr_plugin.sharding.cost_calibration import StepTimes
from turbogr_plugin.sharding.sequence_cost import SequenceCost

TRUE = SequenceCost(linear=2e-6, quadratic=3e-10)
OVERHEAD = 0.004


def _recorded(cost: SequenceCost, *, noise: float, steps: int = 200, slow: int = 0, draw: str = "capped") -> StepTimes:
    generator = np.random.default_rng(0)
    times = StepTimes()
    for step in range(steps):
        lengths = DRAWS[draw](int(generator.integers(4, 12)), step)
        seconds = OVERHEAD + cost.of(lengths).sum()
        times.record(lengths, seconds * (1 + noise * generator.standard_normal()) * (10 if step < slow else 1))
    return times


def test_the_coefficients_are_found_from_exact_times() -> None:
    fitted = _recorded(TRUE, noise=0.0).fit()
    assert fitted.cost.linear == pytest.approx(TRUE.linear, rel=1e-6)
    assert fitted.cost.quadratic == pytest.approx(TRUE.quadratic, rel=1e-6)
    assert fitted.overhead == pytest.approx(OVERHEAD, rel=1e-6)
    assert fitted.error < 1e-9 and fitted.steps == 200 and fitted.left_out == 0


def test_noise_and_slow_steps_hardly_matter_for_the_balance() -> None:
    fitted = _recorded(TRUE, noise=0.03, slow=5, draw="lognormal").fit()
    assert fitted.left_out >= 5 and fitted.error < 0.04
    lengths = DRAWS["lognormal"](500, 9)
    ratio = fitted.cost.of(lengths) / TRUE.of(lengths)
    assert np.abs(ratio / np.median(ratio) - 1).max() < 0.1
    assert "s · L² " in str(fitted).replace("L²,", "L² ")


def test_no_coefficient_is_negative() -> None:
    fitted = _recorded(SequenceCost(linear=2e-6), noise=0.02).fit()
    assert fitted.cost.quadratic >= 0 and fitted.cost.linear >= 0 and fitted.overhead >= 0


def test_steps_that_tell_nothing_are_refused() -> None:
    times = StepTimes()
    for _ in range(7):
        times.record([10, 20], 0.1)
    with pytest.raises(InputError, match="7 steps were recorded; calibration needs at least 8"):
        times.fit()
    times.record([10, 20], 0.1)
    with pytest.raises(InputError, match="the recorded steps have 30 tokens with a spread of 0: too much alike"):
        times.fit()
    falling = StepTimes()
    for step in range(10):
        falling.record([100 * (step + 1)], 1.0 / (step + 1))
    with pytest.raises(InputError, match="do not grow with the lengths"):
        falling.fit()


def test_bad_records_are_refused() -> None:
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="seconds must be positive"):
            StepTimes().record([1], seconds)
    with pytest.raises(ValueError, match="lengths must be at least 0"):
        StepTimes().record([-1], 1.0)


def _alike(lengths: list[int], *, steps: int = 40) -> StepTimes:
    """Steps of different numbers of sequences, whose lengths are hardly different."""
    times = StepTimes()
    for step in range(steps):
        of_step = [lengths[(step + number) % len(lengths)] for number in range(4 + 5 * step % 13)]
        times.record(of_step, OVERHEAD + TRUE.of(of_step).sum())
    return times


@pytest.mark.parametrize("lengths", [[500], [500, 501], [4096, 4095, 4096]], ids=str)
def test_sequences_of_one_length_are_refused(lengths: list[int]) -> None:
    with pytest.raises(InputError, match="sequences of one length: linear and quadratic cost cannot be told apart"):
        _alike(lengths).fit()


@pytest.mark.parametrize("lengths", [[450, 550], [4096, 3600, 4096]], ids=str)
def test_sequences_of_somewhat_different_lengths_are_fitted(lengths: list[int]) -> None:
    fitted = _alike(lengths).fit()
    assert fitted.cost.linear == pytest.approx(TRUE.linear, rel=1e-4)
    assert fitted.cost.quadratic == pytest.approx(TRUE.quadratic, rel=1e-4)


@pytest.mark.parametrize("draw", DRAWS)
def test_usual_lengths_are_fitted(draw: str) -> None:
    fitted = _recorded(TRUE, noise=0.01, draw=draw).fit()
    lengths = DRAWS[draw](500, 9)
    assert fitted.cost.of(lengths).sum() == pytest.approx(TRUE.of(lengths).sum(), rel=0.1)


def test_steps_that_far_slower_ones_hide_are_left_out_too() -> None:
    times = StepTimes()
    for step in range(200):
        lengths = DRAWS["capped"](4 + step % 8, step)
        factor = 300 if step % 50 == 0 else 1.5 if step % 20 == 1 else 1
        times.record(lengths, factor * (OVERHEAD + TRUE.of(lengths).sum()))
    fitted = times.fit()
    assert fitted.left_out == 4 + 10
    assert fitted.cost.linear == pytest.approx(TRUE.linear, rel=1e-6)
    assert fitted.cost.quadratic == pytest.approx(TRUE.quadratic, rel=1e-6)
