"""`make ascend`: compiles every Triton kernel for Ascend, runs what triton-ascend made of it, says what that proves.

The last line is "N lowered, N executed, 0 skipped": modules that bishengir scheduled for a SoC without running out of
on-chip memory, and compiled kernels whose results agreed with the reference.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

# torch must not load torch_npu, should it be there: it does not live without CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import pytest

from tests.ascend import execution, lowering

HERE = Path(__file__).parent
COVERAGE = """\
What this covers: the kernels' source, triton-ascend's lowering to linalg (run on x86 against the plain PyTorch
reference), and that bishengir schedules each kernel within the on-chip memory of Ascend910B3, Ascend910_9392 and
Ascend950PR_9589.
What it does not cover: whether bishengir's tiling, scheduling and synchronisation keep the meaning of what was run;
hivmc, which makes the device binary; rounding and speed of the device; races between programs (here they run in
order, on one core)."""


class Tally:
    """Counts what passed, and everything that is no pass."""

    def __init__(self) -> None:
        self.lowered = self.executed = self.skipped = 0
        self._before = 0

    def pytest_runtest_setup(self) -> None:
        self._before = execution.executed()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.skipped += report.skipped
        if report.when != "call" or not report.passed:
            return
        self.lowered += dict(report.user_properties).get("lowered", 0)
        if "test_planted_faults" not in report.nodeid:
            self.executed += execution.executed() - self._before


def main() -> int:
    """The exit status of the tests; 1 also where one was skipped."""
    missing = [str(path) for path in (*lowering.TOOLS, *execution.TOOLS) if not path.exists()]
    if missing:
        print(f"tools are missing: {', '.join(missing)}; remove .venv-ascend and run `make ascend` again")
        return 1
    start = time.monotonic()
    tally = Tally()
    root = str(HERE.parent.parent)
    arguments = [str(HERE), "-c", str(HERE / "pytest.ini"), "--rootdir", root, "--confcutdir", str(HERE)]
    # Triton would take kernels of an earlier run from its cache, and hide a compiler that has gone.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        status = int(pytest.main([*arguments, *sys.argv[1:]], plugins=[tally]))
    print(COVERAGE)
    print(f"took {time.monotonic() - start:.0f} s")
    print(f"{tally.lowered} lowered, {tally.executed} executed, {tally.skipped} skipped")
    return status or int(tally.skipped > 0)


if __name__ == "__main__":
    sys.exit(main())
