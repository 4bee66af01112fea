"""Runs the C++ kernels under AddressSanitizer: python -m tests.kernels.cpu.sanitized [FAMILY ...].

The kernels are built with it, as libraries of their own, and called forward and backward at all shapes of
attention_shapes.py, dense_shapes.py and lookup_shapes.py, in the types that they serve. Pieces of a kernel's workspace
have poisoned gaps between them, so that running over the end of one is found, too. Not seen are reads and writes inside
the matrix products: oneDNN makes that code at run time.

AddressSanitizer must be the first library of a process, so this one starts itself again with it.
"""

from __future__ import annotations

import os
import subprocess
import sys


def _environment() -> dict[str, str]:
    """Of a process with AddressSanitizer's runtime loaded before everything else."""
    runtime = subprocess.run(
        [os.environ.get("CXX", "g++"), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    # The interpreter never frees all that it allocates: leaks are not looked for.
    return {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=1"}


def _calls(family: str) -> int:
    import torch

    from tests.kernels.attention_cases import inputs, with_gradients
    from tests.kernels.cpu import dense_shapes, lookup_shapes
    from tests.kernels.cpu.attention_shapes import CASES, FUXI_CASES
    from turbogr_plugin.kernels.cpu import build

    build.load(family, sanitize=True)
    if family in dense_shapes.FAMILIES:
        return dense_shapes.run_all(family)
    if family == "jagged_lookup":  # its extension serves all parts of the lookup
        return lookup_shapes.run_all()
    cases = CASES if family == "jagged_attention" else FUXI_CASES
    calls = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for case in cases:
            x = inputs(case, dtype)
            with_gradients(x, x.call(implementation="cpu"))
            calls += 1
    return calls


def main() -> int:
    """Returns the exit code of the process that made the calls."""
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        return subprocess.run([sys.executable, "-m", __spec__.name, *sys.argv[1:]], env=_environment()).returncode
    from turbogr_plugin.kernels.cpu.build import families

    for family in sys.argv[1:] or families():
        print(f"{family}: {_calls(family)} calls, forward and backward, without a finding", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
