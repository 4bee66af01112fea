"""Memory that one step adds, in a process of its own: the peak of the resident size above what it is before the step.

    python -m benchmarks.attention.memory CASE THREADS      CASE as JSON; prints one JSON object

The inputs exist before, the output and the gradients are held until after the peak is read, so they count. A small step
comes first: libraries, thread stacks and generated code are no memory of the step. Then freed memory is given back to
the system (malloc_trim) and the recorded peak is set to the present size (/proc/self/clear_refs, Linux).
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.attention.problems import Case, problem, runner
from turbogr_plugin.kernels.cpu import jagged_attention
from turbogr_plugin.kernels.dispatch import taken

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one step."""

    added: int
    """At the peak, above what was there before the step."""
    results: int
    """Of the output and the gradients, which are part of it."""
    counted: int | None = None
    """What the C++ itself counted as its workspace, all threads together; None where something else ran."""

    @property
    def workspace(self) -> int:
        """What is neither input, output nor gradient."""
        return max(0, self.added - self.results)


def measure(case: Case, *, threads: int) -> StepMemory:
    """Runs `case` once in a process of its own.

    Raises:
        RuntimeError: the process failed; its message is part of the text.
    """
    command = [sys.executable, "-m", "benchmarks.attention.memory", json.dumps(asdict(case)), str(threads)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"the step of {case} failed with exit code {child.returncode}:\n{child.stderr[-2000:]}")
    return StepMemory(**json.loads(child.stdout.splitlines()[-1]))


def _resident(kind: str) -> int:
    """Bytes: VmRSS, now, or VmHWM, the peak."""
    found = re.search(rf"^{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _step(case: Case) -> StepMemory:
    small = tuple(min(length, 70) for length in case.lengths[:2])
    runner(replace(case, lengths=small))()
    step = problem(case).step
    counts = case.kernel == "hstu" and "cpu" in {one["implementation"] for one in taken().get("jagged_attention", [])}
    if counts:
        jagged_attention.workspace_bytes()  # from here on
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _resident("VmRSS")
    results = step()
    added = _resident("VmHWM") - before
    return StepMemory(
        added=added,
        results=sum(result.numel() * result.element_size() for result in results),
        counted=jagged_attention.workspace_bytes() if counts else None,
    )


def main() -> None:
    """The process of one step."""
    fields = json.loads(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(asdict(_step(Case(**(fields | {"lengths": tuple(fields["lengths"])}))))))


if __name__ == "__main__":
    main()
