"""A tiny store and configuration, and the command line started on them as a user or a launcher starts it.

Starting a process costs seconds of imports, so `run_commands` runs many commands one after the other in one process per
rank, forked where the libraries are imported. Each command meets in a corner of the launcher's store of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests import forked

USERS = 61  # 5 global batches of 12 and one of a single sample, which leaves the second of two ranks without any
STEPS_PER_EPOCH = 6
TIMEOUT = 240.0  # seconds of a launch, many times what it takes: the cores may be busy

CONFIG = """\
output: run
data:
  store: store
  workers: 0
model:
  dim: 16
  blocks: 2
  heads: 2
  qk_dim: 8
  value_dim: 8
  max_length: 16
negatives:
  count: 16
optimizer:
  learning_rate: 0.01
  table_learning_rate: 0.1
training:
  epochs: 16
  patience: 2
  global_batch_size: 12
  checkpoint_every: 4
"""


class Outcome(NamedTuple):
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def write_inputs(folder: Path) -> None:
    """Writes `log.txt` (user, item, time; a walk with noise, so that there is something to learn) and `tiny.yaml`."""
    random = np.random.default_rng(0)
    lines = []
    for user in range(USERS):
        item, time = int(random.integers(0, 40)), 1_000_000
        for _ in range(int(random.integers(6, 24))):
            item, time = (item + 3 + int(random.integers(0, 4))) % 40, time + int(random.integers(1, 5000))
            lines.append(f"{1000 + 7 * user} {500 + 3 * item} {time}")
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    (folder / "tiny.yaml").write_text(CONFIG)


def histories(folder: Path) -> dict[int, list[int]]:
    """Raw items of each raw user of `log.txt`, in order."""
    found: dict[int, list[int]] = {}
    for line in (folder / "log.txt").read_text().splitlines():
        user, item, _ = map(int, line.split())
        found.setdefault(user, []).append(item)
    return found


def launch(
    program: list[str], *, ranks: int | None, folder: Path, timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in `folder`, under torchrun where `ranks` is given."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *launcher, *program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def turbogr(*arguments: str, ranks: int | None, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user types it."""
    return launch(["-m", "turbogr_plugin.cli", *arguments], ranks=ranks, folder=folder)


def run_commands(commands: dict[str, list[str]], *, ranks: int | None, folder: Path) -> dict[str, list[Outcome]]:
    """Runs commands one after the other in one process per rank; returns the outcomes of all ranks by command."""
    (folder / "commands.json").write_text(json.dumps(list(commands.values())))
    done = forked.run_program([str(Path(__file__)), "commands.json"], ranks=ranks, folder=folder, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-8000:]
    of_ranks = [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in range(ranks or 1)]
    return {
        name: [Outcome(*outcome) for outcome in outcomes] for name, *outcomes in zip(commands, *of_ranks, strict=True)
    }


def run_here(*arguments: str) -> Outcome:
    """Runs a command in this process."""
    from turbogr_plugin.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def records(run: Path, name: str = "train_log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def losses(run: Path) -> np.ndarray:
    """Losses by step; the steps are 1, 2, 3, ... without a gap or a repetition."""
    logged = records(run)
    assert [record["step"] for record in logged] == list(range(1, len(logged) + 1))
    return np.array([record["loss"] for record in logged])


def metrics(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.json").read_text())


def _serve(commands: list[list[str]]) -> None:
    """One rank of `run_commands`."""
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    outcomes = []
    start = dist.init_process_group
    for number, command in enumerate(commands):

        def start_apart(*arguments: Any, number: int = number, **options: Any) -> None:
            if "store" not in options:  # a launcher's: the keys of former process groups are in its store
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                options["store"] = dist.PrefixStore(f"command-{number}", dist.TCPStore(host, port, is_master=False))
                options["rank"], options["world_size"] = rank, int(os.environ["WORLD_SIZE"])
            start(*arguments, **options)

        dist.init_process_group = start_apart
        outcomes.append(run_here(*command))
    Path(f"outcomes-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    _serve(json.loads(Path(sys.argv[1]).read_text()))
