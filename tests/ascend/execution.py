"""Runs kernels that triton-ascend has lowered, on x86: `kernel[grid](...)` as on a device, one program after another.

Triton's JIT calls the real triton-ascend pipeline up to the linalg IR that bishengir would receive. From there a mock
driver takes over: Debian's MLIR and LLVM 19 (the LLVM that bishengir is built on) turn the IR into a shared library,
and the launcher calls it once per program of the grid.

This checks the kernels' source and triton-adapter's lowering. It does not check what bishengir makes of the IR, nor the
rounding of the device, nor races: the grid runs in order on one core.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget

LLVM = Path(sys.prefix, "llvm/usr/lib")
TOOLS = tuple(LLVM / "llvm-19/bin" / name for name in ("mlir-opt", "mlir-translate", "opt", "llc"))
SOC = "Ascend910B3"
CORES = 3  # of the mock device: few, so that every program takes several pieces of work

# linalg on tensors -> loops on buffers -> LLVM's dialect.
_PASSES = """--convert-elementwise-to-linalg --linalg-generalize-named-ops --eliminate-empty-tensors
--empty-tensor-to-alloc-tensor --one-shot-bufferize=allow-return-allocs-from-loops=true --buffer-hoisting
--buffer-loop-hoisting --promote-buffers-to-stack=max-alloc-size-in-bytes=0 --convert-linalg-to-loops --lower-affine
--convert-scf-to-cf --convert-cf-to-llvm --convert-arith-to-llvm --convert-math-to-llvm --convert-index-to-llvm
--convert-math-to-libm --memref-expand --expand-strided-metadata --finalize-memref-to-llvm --convert-func-to-llvm
--lower-affine --convert-arith-to-llvm --reconcile-unrealized-casts"""


def _run(*command: str | Path) -> None:
    libraries = f"{LLVM}/llvm-19/lib:{LLVM}/x86_64-linux-gnu"
    environment = dict(os.environ, LD_LIBRARY_PATH=libraries) if str(command[0]).startswith(str(LLVM)) else None
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{done.stderr[-3000:]}")


def _plain_mlir(linalg: str) -> str:
    """The IR without the attributes that only bishengir knows."""
    lines = [re.sub(r" \{tt\.[^}]*\}", "", line) if "func.func" in line else line for line in linalg.split("\n")]
    without = re.sub(r"attributes \{[^}]*\} \{$", "{", "\n".join(lines), flags=re.MULTILINE)
    return re.sub(r" \{hivm\.\w+\}", "", without)


@cache
def _folder() -> Path:
    """Where compiled kernels live: as long as the process, so that no run rests on an earlier one's."""
    folder = tempfile.TemporaryDirectory(prefix="ascend-on-x86-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _runtime() -> Path:
    """The object with what compiled kernels call: copies of strided buffers, conversions to bfloat16."""
    target = _folder() / "runtime.o"
    _run("gcc", "-O2", "-fPIC", "-c", Path(__file__).with_name("runtime.c"), "-o", target)
    return target


def compiled(linalg: str, name: str) -> Any:
    """The function `name` of the IR, as x86 code."""
    source = _plain_mlir(linalg)
    base = _folder() / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    library = base.with_suffix(".so")
    if not library.exists():
        base.with_suffix(".mlir").write_text(source)
        mlir_opt, mlir_translate, opt, llc = TOOLS
        _run(mlir_opt, base.with_suffix(".mlir"), *_PASSES.split(), "-o", base.with_suffix(".low"))
        _run(mlir_translate, base.with_suffix(".low"), "--mlir-to-llvmir", "-o", base.with_suffix(".ll"))
        _run(opt, "-O2", base.with_suffix(".ll"), "-o", base.with_suffix(".bc"))
        code = ("-O2", "-filetype=obj", "-relocation-model=pic")
        _run(llc, *code, base.with_suffix(".bc"), "-o", base.with_suffix(".o"))
        _run("gcc", "-shared", "-o", library, base.with_suffix(".o"), _runtime(), "-lm", "-lgcc_s")
    function = getattr(ctypes.CDLL(str(library)), name)
    function.restype = None
    return function


class _Utils:
    """Stands in for triton-ascend's `NPUUtils`, which is built against CANN."""

    def get_arch(self) -> str:
        return SOC

    def get_aicore_num(self) -> int:
        return CORES

    def get_aivector_core_num(self) -> int:
        return 2 * CORES

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1, "num_aicore": CORES, "num_vectorcore": 2 * CORES}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int]:
        # Triton takes a kernel whose module is None for one that is not loaded, and would load it at every launch.
        function = compiled(binary.decode(), name.split()[0])
        return function, function, 0, 0


class _Launcher:
    """Calls the compiled function for every program of the grid."""

    launches = 0
    kernels = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        names = source.fn.arg_names
        constants = {
            names.index(key) if isinstance(key, str) else (key[0] if isinstance(key, tuple) else key)
            for key in source.constants
        }
        self.kinds = [
            (index, source.signature.get(name, source.signature.get(index)))
            for index, name in enumerate(names)
            if index not in constants
        ]
        _Launcher.kernels += 1

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: Any,
        packed: Any,
        launch: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        _Launcher.launches += 1
        none = torch.zeros(64, dtype=torch.int8)  # what triton-ascend passes first: locks and workspace
        arguments = [*_memory(none), *_memory(none)]
        for index, kind in self.kinds:
            value = args[index]
            if kind.startswith("*"):
                arguments += _memory(value)
            elif kind.startswith("fp"):
                arguments.append(ctypes.c_float(value))
            else:
                arguments.append((ctypes.c_int64 if kind == "i64" else ctypes.c_int32)(int(value)))
        arguments += [ctypes.c_int32(size) for size in (x, y, z)]
        for k in range(z):
            for j in range(y):
                for i in range(x):
                    function(*arguments, ctypes.c_int32(i), ctypes.c_int32(j), ctypes.c_int32(k))


def _memory(tensor: torch.Tensor) -> list[Any]:
    """A one-dimensional memref: allocated and aligned pointer, offset, size, stride."""
    pointer = ctypes.c_void_p(tensor.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(1 << 40), ctypes.c_int64(1)]


class _Driver:
    """A Triton driver whose device is this machine."""

    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", SOC, 0)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu

    @classmethod
    def is_active(cls) -> bool:
        return True


def install() -> None:
    """Makes Triton launch on x86 what it has lowered for Ascend."""
    pipeline = backends["ascend"].compiler.add_stages.__globals__
    pipeline["NPUUtils"] = _Utils

    def keep(linalg: str, metadata: dict[str, Any], options: Any) -> bytes:
        """In place of bishengir: the IR itself is the binary."""
        kept, _ = pipeline["_parse_linalg_metadata"](linalg, metadata)
        return kept.encode()

    pipeline["linalg_to_bin_enable_npu_compile_A2_A3"] = keep
    triton.runtime.driver.set_active(_Driver())


def launches() -> int:
    """How many times a kernel has been launched."""
    return _Launcher.launches


def executed() -> int:
    """How many different kernels (sources with their constants and types) have been launched."""
    return _Launcher.kernels
