"""Bad input that a loader finds in the middle of training: one message and exit code 2 on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked, runs

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("ranks", "workers", "message"),
    [(1, 1, "step 3 has no users"), (2, 1, "rank 1 failed: step 3 has no users")],
)
def test_bad_input_of_one_loader_ends_training_with_one_line_and_code_2_on_every_rank(
    tiny: Path, ranks: int, workers: int, message: str
) -> None:
    program = [str(Path(__file__).with_name("bad_batch.py")), str(ranks - 1), "3", "--config", "tiny.yaml"]
    options = ["--output", f"bad-{ranks}", "--data.workers", str(workers), "--training.log_every", "1"]
    done = forked.run_program(
        [*program, *options], ranks=ranks if ranks > 1 else None, folder=tiny, timeout=runs.TIMEOUT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = [runs.Outcome(*json.loads((tiny / f"bad-batch-{rank}.json").read_text())) for rank in range(ranks)]
    assert [outcome.code for outcome in outcomes] == [2] * ranks
    assert outcomes[0].err.splitlines()[-1] == f"turbogr train: {message}"
    assert "Traceback" not in outcomes[0].err
    for rank in range(1, ranks):  # rank 0 speaks for all; the launcher's report has it of each
        assert outcomes[rank].err == ""
        told = json.loads((tiny / f"error-{rank}.json").read_text())
        assert told["message"]["message"] == f"turbogr train: {message}"
