"""What the processes of tests/forked.py start from is sound to fork: one thread, and nothing of this plugin."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked


def _tell(file: str) -> None:
    ours = [name for name in sys.modules if name.startswith("turbogr_plugin")]
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    loaded = [name for name in forked.LIBRARIES if name not in sys.modules]
    told = {"ours": ours, "threads of the server": threads, "missing": loaded, "here": os.environ["HERE"]}
    Path(file).write_text(json.dumps(told))
    print("out", flush=True)
    os.write(2, b"err\n")


def test_the_server_has_one_thread_and_none_of_the_plugin(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    process = forked.start(_tell, "told.json", folder=tmp_path, out=out, err=err, environment={"HERE": "yes"})
    process.join(60)
    assert process.exitcode == 0, err.read_text()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told == {"ours": [], "threads of the server": 1, "missing": [], "here": "yes"}
    assert (out.read_text(), err.read_text()) == ("out\n", "err\n")


PROGRAM = """
import os, sys, time
if os.environ.get("RANK") == "1":
    sys.exit(sys.argv[1])
time.sleep(float(sys.argv[2]))
"""


def test_a_rank_that_fails_ends_the_others_and_a_late_one_is_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = str(tmp_path / "program.py")
    failed = forked.run_program([program, "this one", "60"], ranks=2, folder=tmp_path, timeout=50)
    assert (failed.returncode, failed.stderr) == (1, "this one\n")
    with pytest.raises(TimeoutError, match=r"program\.py.* is not done in 0\.1 seconds"):
        forked.run_program([program, "", "60"], ranks=None, folder=tmp_path, timeout=0.1)
