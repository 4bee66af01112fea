"""Training on two ranks with samples balanced over them, by the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import runs

OPTIONS = ["--training.epochs", "2", "--training.log_every", "1"]
METHODS = ("none", "reallocation", "lookahead")


@pytest.fixture(scope="module")
def trained(tiny: Path) -> dict[str, list[runs.Outcome]]:
    """A run by each method, and two that go on on one rank."""
    commands = {
        method: [
            *("train", "--config", "tiny.yaml", "--output", f"balanced-{method}", *OPTIONS),
            *("--balance.method", method, "--balance.window", "4"),
        ]
        for method in METHODS
    }
    return runs.run_commands(commands, ranks=2, folder=tiny)


@pytest.mark.timeout(180)
def test_reallocation_leaves_the_losses_and_lookahead_the_number_of_samples(
    tiny: Path, trained: dict[str, list[runs.Outcome]]
) -> None:
    for method in METHODS:
        assert [outcome.code for outcome in trained[method]] == [0, 0], trained[method][0].err
    losses = {method: runs.losses(tiny / f"balanced-{method}") for method in METHODS}
    # To rounding: the losses of a step are summed in another order.
    assert np.abs(losses["reallocation"] / losses["none"] - 1).max() < 2e-5
    tokens = {
        method: sum(record["tokens"] for record in runs.records(tiny / f"balanced-{method}")) for method in METHODS
    }
    assert tokens["none"] == tokens["reallocation"] == tokens["lookahead"]


@pytest.mark.timeout(180)
def test_lookahead_is_not_gone_on_with_on_another_number_of_ranks(
    tiny: Path, trained: dict[str, list[runs.Outcome]]
) -> None:
    resume = ["train", "--config", "tiny.yaml", "--output", "balanced-lookahead", "--training.epochs", "3", "--resume"]
    commands = {
        "one rank": [*resume, "--balance.method", "lookahead", "--balance.window", "4"],
        "another method": [*resume, "--balance.method", "reallocation", "--balance.window", "4"],
    }
    outcomes = runs.run_commands(commands, ranks=None, folder=tiny)
    assert {outcome[0].code for outcome in outcomes.values()} == {2}
    assert "balanced by another plan: ranks was 2 and is 1" in outcomes["one rank"][0].err
    assert "balance.method was lookahead and is reallocation" in outcomes["another method"][0].err
