from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turbogr_plugin.training.curves import draw_curves
from turbogr_plugin.training.run_folder import RunFolder, read_lines, write_atomically


def _steps(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "epoch": 1 + step // 5, "loss": 1 / step, "tokens": 10} for step in range(first, last + 1)]


def _validation(step: int) -> dict[str, Any]:
    metrics = {"ndcg@10": 0.01 * step, "hr@10": 0.02 * step}
    return {"step": step, "epoch": step // 5, "filtered": metrics, "unfiltered": metrics}


def _run(path: Path, first: int, last: int, *, resume_step: int = 0) -> None:
    folder = RunFolder(path, resume_step=resume_step)
    for step in range(first, last + 1):
        folder.log_steps(_steps(step, step))
        if step % 5 == 0:
            folder.log_validation(_validation(step))
    folder.close()


def test_records_come_back_in_order(tmp_path: Path) -> None:
    _run(tmp_path / "run", 1, 12)
    assert read_lines(tmp_path / "run" / "train_log.jsonl") == _steps(1, 12)
    assert read_lines(tmp_path / "run" / "validation.jsonl") == [_validation(5), _validation(10)]


def test_records_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, resume_step=0)
    folder.log_steps(_steps(1, 3))
    folder.log_validation(_validation(3))
    assert read_lines(tmp_path / "train_log.jsonl") == _steps(1, 3)
    assert read_lines(tmp_path / "validation.jsonl") == [_validation(3)]
    folder.close()


@pytest.mark.parametrize("resume_step", [1, 5, 7, 10, 12])
def test_a_resumed_run_leaves_the_logs_of_one_that_was_never_cut(tmp_path: Path, resume_step: int) -> None:
    _run(tmp_path / "whole", 1, 15)
    _run(tmp_path / "cut", 1, 12)
    _run(tmp_path / "cut", resume_step + 1, 15, resume_step=resume_step)
    for name in ("train_log.jsonl", "validation.jsonl"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.parametrize("left", [1, 10, -2, -1])
def test_a_line_cut_off_by_a_kill_is_left_out_and_resumed_over(tmp_path: Path, left: int) -> None:
    _run(tmp_path, 1, 9)
    log = tmp_path / "train_log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:8]) + lines[8][:left])
    whole = 9 if left == -1 else 8  # without its newline alone, a record is complete
    assert read_lines(log) == _steps(1, whole)
    _run(tmp_path, 10, 11, resume_step=9)
    assert read_lines(log) == _steps(1, whole) + _steps(10, 11)


def test_a_new_run_in_a_used_folder_starts_empty_logs(tmp_path: Path) -> None:
    _run(tmp_path, 1, 12)
    _run(tmp_path, 1, 2)
    assert read_lines(tmp_path / "train_log.jsonl") == _steps(1, 2)
    assert read_lines(tmp_path / "validation.jsonl") == []


def test_a_log_that_is_missing_has_no_records(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "train_log.jsonl") == []


def test_the_end_of_a_run_leaves_summary_ranks_picture_and_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", resume_step=0)
    folder.log_steps(_steps(1, 120))
    folder.log_validation(_validation(60))
    folder.log_validation(_validation(120))
    summary = {"best_step": 120, "test": {"filtered": {"ndcg@10": 0.5}, "unfiltered": {"ndcg@10": 0.25}}}
    users, filtered, unfiltered = np.array([3, 2**62]), np.array([1, 7]), np.array([2, 9])
    folder.finish(summary, users, filtered, unfiltered)
    path = tmp_path / "run"
    assert json.loads((path / "metrics.json").read_text()) == summary
    with np.load(path / "test_ranks.npz", allow_pickle=False) as ranks:
        assert ranks["users"].tolist() == [3, 2**62]
        assert (ranks["filtered"].tolist(), ranks["unfiltered"].tolist()) == ([1, 7], [2, 9])
    assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in path.iterdir()) == [
        "curves.png",
        "metrics.json",
        "tensorboard",
        "test_ranks.npz",
        "train_log.jsonl",
        "validation.jsonl",
    ]
    scalars = _scalars(path / "tensorboard")
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, 121))
    assert scalars["validation/ndcg@10"] == [(60, pytest.approx(0.6)), (120, pytest.approx(1.2))]
    assert scalars["test/ndcg@10"] == [(120, 0.5)]


def test_the_events_of_a_resumed_run_replace_those_after_its_step(tmp_path: Path) -> None:
    _run(tmp_path, 1, 12)
    _run(tmp_path, 8, 9, resume_step=7)
    assert [step for step, _ in _scalars(tmp_path / "tensorboard")["train/loss"]] == list(range(1, 10))


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_curves_are_drawn_of_a_run_without_records(tmp_path: Path) -> None:
    draw_curves([], [], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomically(path, b"first, and long")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]
