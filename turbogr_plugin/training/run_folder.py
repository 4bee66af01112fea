"""What a run leaves in its folder, written by rank 0.

    config.yaml         the resolved configuration
    train_log.jsonl     one line per step: step, epoch, loss of the global batch, tokens
    validation.jsonl    one line per validation: step, epoch, filtered and unfiltered metrics
    metrics.json        the summary, written at the end
    test_ranks.npz      users (raw ids), filtered and unfiltered rank of each test item
    curves.png          loss and validation metrics
    tensorboard/        the same as event files
    checkpoints/        see training/checkpoints.py

A resumed run drops the records after its checkpoint and appends to the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from turbogr_plugin.training.curves import draw_curves


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file aside and renames it, so that readers and kills never meet half of it."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(data)
    os.replace(aside, path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; none where it is missing. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class RunFolder:
    """The files of one run; see the module. Only rank 0 holds one."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Opens the folder for a run that goes on after `resume_step` (0: a new one); later records are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for name in ("train_log.jsonl", "validation.jsonl"):
            kept = [record for record in read_lines(path / name) if record["step"] <= resume_step]
            write_atomically(path / name, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._train = (path / "train_log.jsonl").open("a")
        self._validation = (path / "validation.jsonl").open("a")
        self._events = SummaryWriter(str(path / "tensorboard"), purge_step=resume_step + 1)

    def log_steps(self, records: Iterable[dict[str, Any]]) -> None:
        """Appends training steps."""
        for record in records:
            self._train.write(json.dumps(record) + "\n")
            self._events.add_scalar("train/loss", record["loss"], record["step"])
        self._train.flush()

    def log_validation(self, record: dict[str, Any]) -> None:
        """Appends a validation."""
        self._validation.write(json.dumps(record) + "\n")
        self._validation.flush()
        for name, value in record["filtered"].items():
            self._events.add_scalar(f"validation/{name}", value, record["step"])
        self._events.flush()

    def finish(self, summary: dict[str, Any], users: np.ndarray, filtered: np.ndarray, unfiltered: np.ndarray) -> None:
        """Writes the summary, the per-user test ranks and the picture."""
        aside = self.path / ".test_ranks.tmp.npz"
        np.savez_compressed(aside, users=users, filtered=filtered, unfiltered=unfiltered)
        os.replace(aside, self.path / "test_ranks.npz")
        steps, validations = (read_lines(self.path / name) for name in ("train_log.jsonl", "validation.jsonl"))
        draw_curves(steps, validations, self.path / "curves.png")
        for name, value in summary["test"]["filtered"].items():
            self._events.add_scalar(f"test/{name}", value, summary["best_step"])
        write_atomically(self.path / "metrics.json", (json.dumps(summary, indent=2) + "\n").encode())
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._train.close()
        self._validation.close()
        self._events.close()
