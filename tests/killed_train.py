"""`turbogr train` that is killed on the way: python killed_train.py RANK step|checkpoint NUMBER ARGUMENTS...

    step N         SIGKILL of that rank when N training steps are done
    checkpoint N   SIGKILL of that rank in the N-th checkpoint written, after its own file and before the index

The rank kills itself, with the signal that nothing can catch, at a place that is hit every time.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from turbogr_plugin.cli import main


def _kill_at_call(owner: type, method: str, number: int, *, after: bool) -> None:
    original = getattr(owner, method)
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, counted)


if __name__ == "__main__":
    rank, place, number = sys.argv[1:4]
    if os.environ.get("RANK", "0") == rank:
        if place == "step":
            from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

            _kill_at_call(TrainPipelineSparseDist, "progress", int(number) + 1, after=False)
        else:
            from turbogr_plugin.training.safetensors_storage import SafetensorsWriter

            _kill_at_call(SafetensorsWriter, "write_data", int(number), after=True)
    sys.exit(main(["train", *sys.argv[4:]]))
