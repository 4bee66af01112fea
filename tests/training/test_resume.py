"""A run that loses a rank to SIGKILL, in an epoch and in a checkpoint, ends as the run that was never killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import runs
from turbogr_plugin.training.checkpoints import latest_checkpoint
from turbogr_plugin.training.safetensors_storage import read_index

pytestmark = pytest.mark.timeout(4 * runs.TIMEOUT)
Kills = dict[str, "subprocess.CompletedProcess[str]"]


def _hidden(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob(".*"))


def test_a_killed_rank_ends_the_launch_with_an_error(kills: Kills) -> None:
    for place in ("in an epoch", "in a checkpoint"):
        assert kills[place].returncode not in (0, 2), place
        assert "Signal 9 (SIGKILL)" in kills[place].stderr, place


def test_a_kill_in_an_epoch_leaves_the_last_checkpoint(tiny: Path, kills: Kills) -> None:
    found = latest_checkpoint(tiny / "killed-early/checkpoints")
    assert found is not None
    assert found.step == 24  # killed after step 26; checkpoints every 4 steps and at the end of the epochs of 6
    assert _hidden(tiny / "killed-early") == []


def test_a_kill_in_a_checkpoint_leaves_the_one_before_it(tiny: Path, kills: Kills) -> None:
    found = latest_checkpoint(tiny / "killed-late/checkpoints")
    assert found is not None
    assert "resumed at step 24" in kills["in a checkpoint"].stderr
    assert found.step == 54
    assert _hidden(tiny / "killed-late") == [".step-00000056.tmp"]
    half = {path.name for path in (tiny / "killed-late/checkpoints/.step-00000056.tmp").iterdir()}
    assert "rank-00000.safetensors" in half
    assert "index.json" not in half
    assert "resumed at step 54" in kills["to the end"].stderr
    read_index(found.path)  # complete


@pytest.mark.usefixtures("two_ranks")
def test_resumed_runs_have_the_losses_of_the_run_that_was_never_killed(tiny: Path, kills: Kills) -> None:
    assert kills["to the end"].returncode == 0, kills["to the end"].stderr[-4000:]
    np.testing.assert_array_equal(runs.losses(tiny / "killed"), runs.losses(tiny / "two"))
    assert runs.records(tiny / "killed", "validation.jsonl") == runs.records(tiny / "two", "validation.jsonl")
    assert _hidden(tiny / "killed") == []


@pytest.mark.usefixtures("two_ranks", "kills")
def test_early_stopping_and_the_best_checkpoint_survive_two_resumes(tiny: Path) -> None:
    killed, never_killed = runs.metrics(tiny / "killed"), runs.metrics(tiny / "two")
    assert never_killed["stopped_early"]
    kept = latest_checkpoint(tiny / "killed-late/checkpoints")
    assert kept is not None
    assert kept.extra["position"]["stale"] > 0  # killed while validations without a better one were being counted
    for of_run in (killed, never_killed):
        del of_run["seconds"]
    assert killed == never_killed


@pytest.mark.usefixtures("two_ranks")
def test_another_number_of_ranks_goes_on(tiny: Path, one_rank: dict[str, runs.Outcome]) -> None:
    outcome = one_rank["resume what two ranks left"]
    assert outcome.code == 0, outcome.err
    assert "resumed at step 24" in outcome.err
    resumed, never_killed = runs.losses(tiny / "killed-to-one-rank"), runs.losses(tiny / "two")
    assert len(resumed) == len(never_killed)
    difference = np.abs(resumed / never_killed - 1)
    print(f"largest relative difference {difference.max():.1e}")
    assert difference[:24].max() == 0
    assert difference.max() <= 1e-5


def test_a_finished_run_says_so_and_only_tests_again(tiny: Path, one_rank: dict[str, runs.Outcome]) -> None:
    before, after = one_rank["train from config.yaml"], one_rank["resume after the end"]
    assert (before.code, after.code) == (0, 0), after.err
    assert "resumed at step 12: training is done, testing again" in after.err
    assert after.out == before.out
    assert len(runs.losses(tiny / "anew")) == 12


def test_a_second_run_into_the_folder_is_refused_on_every_rank(two_ranks: dict[str, list[runs.Outcome]]) -> None:
    for outcome in two_ranks["train again"]:
        assert outcome.code == 2
        assert outcome.out == ""
    assert "pass --resume to go on" in two_ranks["train again"][0].err


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("another model", ["cannot be resumed", "model.dim was 16 and is 24"]),
        ("other heads", ["cannot be resumed", "model.heads was 2 and is 4; model.qk_dim was 8 and is 4"]),
        ("other batches", ["training.global_batch_size was 12 and is 10"]),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    tiny: Path, one_rank: dict[str, runs.Outcome], command: str, parts: list[str]
) -> None:
    outcome = one_rank[command]
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    for part in ["turbogr train: two/checkpoints/step-", *parts]:
        assert part in line
    assert len(runs.losses(tiny / "two")) >= 50  # the logs of the run are untouched


def test_a_full_disk_is_one_message_and_leaves_the_earlier_checkpoint(
    tiny: Path, one_rank: dict[str, runs.Outcome], small_disk: Path | None
) -> None:
    if small_disk is None:
        pytest.skip("mounting a small disk needs the rights of root")
    outcome = one_rank["full disk"]
    assert outcome.code == 2, outcome.err
    complaints = [line for line in outcome.err.splitlines() if not line.startswith("epoch ")]
    assert len(complaints) == 1, outcome.err
    assert complaints[0].startswith("turbogr train: ")
    assert "No space left on device" in complaints[0]
    found = latest_checkpoint(small_disk / "run/checkpoints")
    assert found is not None
    read_index(found.path)
    assert _hidden(small_disk / "run") == []


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_are_written_at_epoch_ends_without_validation_too(tiny: Path) -> None:
    assert [record["epoch"] for record in runs.records(tiny / "seldom", "validation.jsonl")] == [2, 3]
    kept = sorted(path.name for path in (tiny / "seldom/checkpoints").iterdir())
    assert kept == ["best", "step-00000006", "step-00000012", "step-00000018"]


@pytest.mark.usefixtures("one_rank")
def test_bf16_training_follows_the_fp32_losses(tiny: Path) -> None:
    low, full = runs.losses(tiny / "seldom"), runs.losses(tiny / "one")[: 3 * runs.STEPS_PER_EPOCH]
    assert not np.array_equal(low, full)
    np.testing.assert_allclose(low, full, rtol=0.02)


def test_resuming_where_there_is_nothing_says_that_it_starts_anew(one_rank: dict[str, runs.Outcome]) -> None:
    assert one_rank["resume of nothing"].code == 0
    assert "no checkpoint in of-nothing/checkpoints: starting anew" in one_rank["resume of nothing"].err


def test_a_run_that_stopped_early_goes_on_with_more_patience(tiny: Path, one_rank: dict[str, runs.Outcome]) -> None:
    outcome = one_rank["resume with more patience"]
    assert outcome.code == 0, outcome.err
    assert len(runs.losses(tiny / "two")) < 16 * runs.STEPS_PER_EPOCH
    assert len(runs.losses(tiny / "patient")) == 17 * runs.STEPS_PER_EPOCH
