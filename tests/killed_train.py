"""`turbogr train` that is killed on the way: python killed_train.py RANK step|checkpoint STEP ARGUMENTS...

    step S         SIGKILL of that rank when S training steps are done in this process
    checkpoint S   SIGKILL of that rank in the checkpoint of step S, after its own file and before the index

The rank kills itself, with the signal that nothing can catch, at a place that is hit every time.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from turbogr_plugin.cli import main


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_after_steps(steps: int) -> None:
    from turbogr_plugin.pipeline import TrainPipelineFineGrained

    original, done = TrainPipelineFineGrained.progress, 0

    def progress(*arguments: Any) -> Any:
        nonlocal done
        if done == steps:
            _kill()
        done += 1
        return original(*arguments)

    TrainPipelineFineGrained.progress = progress  # type: ignore[method-assign]


def _kill_in_checkpoint(step: int) -> None:
    from turbogr_plugin.training.safetensors_storage import SafetensorsWriter

    original = SafetensorsWriter.write_data

    def write_data(writer: SafetensorsWriter, *arguments: Any) -> Any:
        written = original(writer, *arguments)
        if writer.path.name == f".step-{step:08d}.tmp":
            _kill()
        return written

    SafetensorsWriter.write_data = write_data  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, place, step = sys.argv[1:4]
    if os.environ.get("RANK", "0") == rank:
        {"step": _kill_after_steps, "checkpoint": _kill_in_checkpoint}[place](int(step))
    sys.exit(main(["train", *sys.argv[4:]]))
