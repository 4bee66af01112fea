"""From a Triton kernel to scheduled HIVM, the last form before an Ascend device binary, without CANN.

Two compilers of the real toolchain run one after the other, as triton-ascend's own pipeline runs them:

    Triton source --triton-adapter--> linalg IR --bishengir-compile--> scheduled HIVM (cube and vector parts, fixed
    addresses in the on-chip buffers, synchronisation)

Left out: `hivmc`, which makes the device binary and comes with CANN only. A placeholder takes its call and hands back
what it was given (without one bishengir takes the failure for its own and tries other options, five times slower);
`--save-temps` keeps the module.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ascendnpuir
from triton._C.libtriton import ir
from triton.backends import ascend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

_BIN = Path(ascendnpuir.__file__).parent / "bin"
TOOLS = (
    _BIN / "bishengir-compile",
    _BIN / "bishengir-compile-a5",
    Path(ascend.__file__).with_name("triton-adapter-opt"),
)
# The module that bishengir keeps when all its passes are through.
_SCHEDULED = "module.hivm.opt.mlir"


# Stands in for hivmc: says a version, and makes the "object file" by copying its input.
_PLACEHOLDER = """#!/bin/sh
[ "$1" = --version ] && echo "hivmc 1.2.0" && exit 0
while [ $# -gt 0 ]; do
  case "$1" in -o) shift; out=$1;; *.mlir) in=$1;; esac
  shift
done
cp "$in" "${out%.o}.o"
"""


class LoweringError(RuntimeError):
    """A compiler refused a kernel, or compiled it only after giving up an optimisation for want of on-chip memory."""


@dataclass(frozen=True)
class Kernel:
    """One kernel at one tile shape.

    Attributes:
        function: the `@triton.jit` function.
        signature: type of each run-time argument, such as "*fp16" or "i32".
        constants: value of each `tl.constexpr` argument, tile shapes among them.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]


def linalg_ir(kernel: Kernel, soc: str = "Ascend910B3", **options: Any) -> str:
    """What triton-ascend hands to bishengir: linalg, memref and scf operations."""
    backend = make_backend(GPUTarget("npu", soc, 0))
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel.function, signature=dict(kernel.signature), constants=dict(kernel.constants))
    module = source.make_ir(parsed, backend.get_codegen_implementation(), backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed)
    metadata = {"hash": "gate", "target": GPUTarget("npu", soc, 0), **parsed.__dict__}
    try:
        return stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace")[:4000]
        raise LoweringError(f"triton-adapter refused {kernel.function.__name__}: {said}") from None


def scheduled_hivm(linalg: str, soc: str) -> str:
    """What bishengir hands to hivmc.

    Raises:
        LoweringError: refused, or compiled only on a retry.
    """
    compiler = _BIN / ("bishengir-compile-a5" if soc.startswith("Ascend950") else "bishengir-compile")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ttadapter.mlir")
        # triton-ascend takes this attribute out before it calls bishengir, too.
        source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))
        for name in ("hivmc", "hivmc-a5"):
            placeholder = Path(folder, name)
            placeholder.write_text(_PLACEHOLDER)
            placeholder.chmod(0o755)
        command = [str(compiler), str(source), f"--target={soc}", "--enable-auto-multi-buffer=True"]
        command += ["--enable-auto-bind-sub-block=True", "--enable-hfusion-compile=true"]
        command += ["--enable-hivm-compile=true"] if compiler.name == "bishengir-compile" else []
        command += ["--enable-triton-kernel-compile=true", f"--save-temps={folder}/kept", "-o", f"{folder}/kernel.o"]
        path = f"{folder}:{os.environ['PATH']}"
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=300, env=dict(os.environ, PATH=path)
        )
        scheduled = Path(folder, "kept", _SCHEDULED)
        said = run.stdout + run.stderr
        if (
            run.returncode
            or not scheduled.exists()
            or "overflow" in said.lower()
            or "[NOTE]" in said
            or "error:" in said
        ):
            raise LoweringError(f"{compiler.name} --target={soc} ended with {run.returncode}: {said[:4000]}")
        return scheduled.read_text()
