"""The C++ kernels compile for aarch64, the hosts of Ascend machines. Nothing is run: no such machine is at hand."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from turbogr_plugin.kernels.cpu import build

COMPILER = shutil.which("aarch64-linux-gnu-g++") or shutil.which("aarch64-linux-gnu-g++-12")
SOURCES = sorted(source for family in build.families() for source in build.SOURCE_FOLDER.glob(f"{family}*.cpp"))


@pytest.mark.full
@pytest.mark.skipif(COMPILER is None, reason="lane aarch64: needs the cross compiler g++-aarch64-linux-gnu")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kernels_compile_for_aarch64(source: Path) -> None:
    assert COMPILER is not None
    headers = Path(torch.__file__).parent / "include"
    includes = [headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [
        COMPILER,
        *build.compiler_flags("DEFAULT", bf16=False),
        "-fsyntax-only",
        "-DTORCH_EXTENSION_NAME=turbogr_kernel",
        *(f"-I{folder}" for folder in includes),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
