"""The trainer with each of its pipelines, on two ranks that run all commands one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import runs
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.pipelines import PipelineConfig

pytestmark = pytest.mark.timeout(2 * runs.TIMEOUT)

EPOCHS = 2
#: Options of each run; the rates of `tiny.yaml` do not change, those of the runs with "warm" do at every step.
RUNS: dict[str, list[str]] = {
    "warm base": ["--pipeline.kind", "base"],
    "warm sparse_dist": ["--pipeline.kind", "sparse_dist"],
    "warm fine_grained": ["--pipeline.kind", "fine_grained"],
    "warm stale": ["--pipeline.staleness", "1"],
    "semi_sync": ["--pipeline.kind", "semi_sync", "--pipeline.staleness", "1"],
    "stale": ["--pipeline.staleness", "1", "--profile", "2"],
    "semi_sync from 3": ["--pipeline.kind", "semi_sync", "--pipeline.staleness", "1", "--pipeline.start_batch", "3"],
    "stale from 3": ["--pipeline.staleness", "1", "--pipeline.start_batch", "3"],
    "chosen": [
        *("--pipeline.staleness", "1", "--pipeline.start_batch", "3", "--pipeline.staleness_limit", "0.9"),
    ],
    "chosen exact": [
        *("--pipeline.staleness", "1", "--pipeline.start_batch", "3", "--pipeline.staleness_limit", "1e-6"),
    ],
    "exact": [],
}


@pytest.fixture(scope="module")
def folder(tiny: Path) -> tuple[Path, dict[str, list[runs.Outcome]]]:
    """The folder of the runs, and their outcomes."""
    commands = {}
    for name, options in RUNS.items():
        warm = ["--optimizer.warmup_steps", "9"] if name.startswith("warm") else []
        common = ["--training.epochs", str(EPOCHS), "--training.patience", "0"]
        output = f"pipeline-{name.replace(' ', '-')}"
        commands[name] = ["train", "--config", "tiny.yaml", "--output", output, *common, *warm, *options]
    # A run that ended with its first epoch goes on.
    resumed = [*commands["warm stale"], "--output", "pipeline-warm-resumed"]
    commands["one epoch"] = [*resumed, "--training.epochs", "1"]
    commands["resumed"] = [*resumed, "--resume"]
    outcomes = runs.run_commands(commands, ranks=2, folder=tiny)
    for name, of_ranks in outcomes.items():
        assert all(outcome.code == 0 for outcome in of_ranks), f"{name}: {of_ranks[0].err[-4000:]}"
    return tiny, outcomes


def _losses(folder: tuple[Path, Any], name: str) -> np.ndarray:
    found = runs.losses(folder[0] / f"pipeline-{name.replace(' ', '-')}")
    assert len(found) == EPOCHS * runs.STEPS_PER_EPOCH
    return found


def _validations(folder: tuple[Path, Any], name: str) -> list[dict[str, Any]]:
    return runs.records(folder[0] / f"pipeline-{name.replace(' ', '-')}", "validation.jsonl")


@pytest.mark.parametrize("other", ["warm base", "warm sparse_dist"])
def test_without_staleness_all_pipelines_train_to_the_same_bits(folder: tuple[Path, Any], other: str) -> None:
    np.testing.assert_array_equal(_losses(folder, "warm fine_grained"), _losses(folder, other))
    assert _validations(folder, "warm fine_grained") == _validations(folder, other)


@pytest.mark.parametrize("start", ["", " from 3"])
def test_with_staleness_1_ours_is_torchrecs_semi_sync_to_the_bit(folder: tuple[Path, Any], start: str) -> None:
    stale = _losses(folder, f"stale{start}")
    np.testing.assert_array_equal(stale, _losses(folder, f"semi_sync{start}"))
    assert _validations(folder, f"stale{start}") == _validations(folder, f"semi_sync{start}")
    exact = _losses(folder, "exact")
    first = {"": 1, " from 3": 3}[start]  # the first batch whose lookup misses an update
    np.testing.assert_array_equal(stale[:first], exact[:first])
    assert stale[first] != exact[first]


def test_a_run_resumed_at_the_end_of_an_epoch_is_the_same_also_with_staleness(folder: tuple[Path, Any]) -> None:
    np.testing.assert_array_equal(_losses(folder, "warm resumed"), _losses(folder, "warm stale"))
    assert _validations(folder, "warm resumed") == _validations(folder, "warm stale")


def test_tables_are_chosen_by_their_collisions_and_the_choice_is_told(folder: tuple[Path, Any]) -> None:
    exact, chosen = _losses(folder, "exact"), _losses(folder, "chosen")
    np.testing.assert_array_equal(_losses(folder, "chosen exact"), exact)
    np.testing.assert_array_equal(chosen[:4], exact[:4])
    assert chosen[4] != exact[4]
    for name, verdict in (("chosen", "stale"), ("chosen exact", "exact")):
        told = folder[1][name][0].err
        assert "alpha over 3 steps" in told
        (line,) = [line for line in told.splitlines() if "item_table  alpha" in line]
        assert f"  {verdict}: alpha tau = " in line
        assert folder[1][name][1].err.count("alpha") == 0


def test_a_profiled_run_leaves_its_timeline(folder: tuple[Path, Any]) -> None:
    written = folder[0] / "pipeline-stale" / "timeline"
    assert {file.name for file in written.iterdir()} == {"timeline.json", "timeline_trace.json", "timeline.png"}
    record = json.loads((written / "timeline.json").read_text())
    assert [step["step"] for step in record["steps"]] == [6, 7]
    assert "timeline in " in folder[1]["stale"][0].err
    assert not (folder[0] / "pipeline-exact" / "timeline").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": -1}, "pipeline.staleness must be at least 0, got -1"),
        ({"kind": "base", "staleness": 1}, "pipeline.staleness must be 0 with pipeline.kind base"),
        ({"kind": "semi_sync"}, "pipeline.staleness must be 1 with pipeline.kind semi_sync"),
        ({"staleness_limit": 0.05}, "chooses tables for a staleness of at least 1"),
        ({"staleness": 1, "staleness_limit": 0.05}, "start_batch of at least 2"),
        ({"staleness": 1, "start_batch": 9, "staleness_limit": -1.0}, "staleness_limit must be positive"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PipelineConfig(**options)
