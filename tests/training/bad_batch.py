"""`turbogr train` whose loader finds bad input: python bad_batch.py RANK STEP ARGUMENTS...

Each rank leaves its outcome in `bad-batch-RANK.json`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests import runs
from turbogr_plugin.data.batch import SequenceBatch
from turbogr_plugin.data.loader import TrainingSteps
from turbogr_plugin.errors import InputError


class BadSteps(TrainingSteps):
    """Steps of which one cannot be read; workers of the loader find the class by its name."""

    def __init__(self, bad: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bad = bad

    def __getitem__(self, step: int) -> SequenceBatch:
        if step == self._bad:
            raise InputError(f"step {step} has no users")
        return super().__getitem__(step)


if __name__ == "__main__":
    from tests.training import bad_batch
    from turbogr_plugin.training import trainer

    rank, own = sys.argv[1], os.environ.get("RANK", "0")
    if own == rank:
        trainer.TrainingSteps = functools.partial(bad_batch.BadSteps, int(sys.argv[2]))  # type: ignore[misc,assignment]
    Path(f"bad-batch-{own}.json").write_text(json.dumps(runs.run_here("train", *sys.argv[3:])))
