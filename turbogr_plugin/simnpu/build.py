"""Builds the C++ part of the simulation on first use and keeps it by what it was made from.

The folder of the result is named by a hash of the sources, of torch's version and of the interpreter, so another
version never gets it, and a process that finds it imports it without asking ninja. Processes that start together build
once: the others wait on a lock that the system releases with the process that holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

SOURCE_FOLDER = Path(__file__).parent / "csrc"
DEVICE_SOURCES = tuple(
    f"{name}.cpp"
    for name in (
        "device",
        "order",
        "host_order",
        "allocator",
        "hooks",
        "tensors",
        "operators",
        "boxed",
        "autocast",
        "process_group",  # one library: it uses the checker and the memory of the device
        "bindings",
    )
)
# -O1: the kernels are torch's own; -O2 makes the build longer and nothing faster. NDEBUG as the wheel has it: classes
# in torch's headers have members that depend on it.
FLAGS = ("-O1", "-DNDEBUG", "-std=c++20")


def extension(name: str, sources: Sequence[str]) -> ModuleType:
    """An extension of the simulation, imported; built before if this version of it is not there.

    Args:
        name: of the Python module.
        sources: files of csrc/.

    Raises:
        RuntimeError: there is no C++ compiler, no ninja, or no folder for the result, or the build failed; the
            message says which.
    """
    root = _root()
    library = root / f"{name}_{_version(sources)}" / f"{name}.so"
    if not library.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(
                f"the simulated npu is built on first use and kept in {root}, which cannot be made ({error}): set "
                "TORCH_EXTENSIONS_DIR to a folder that can be written"
            ) from error
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                return _build(name, sources, library)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _root() -> Path:
    """Where builds are kept: in TORCH_EXTENSIONS_DIR if that is set, as every extension of torch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")


def _environment() -> str:
    """Digest of what every file is compiled with."""
    parts = (torch.__version__, str(Path(torch.__file__).parent), sysconfig.get_config_var("EXT_SUFFIX"), *FLAGS)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


def _version(sources: Sequence[str]) -> str:
    digest = hashlib.sha256(_environment().encode())
    for path in [*sorted(SOURCE_FOLDER.glob("*.h")), *(SOURCE_FOLDER / source for source in sources)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(name: str, sources: Sequence[str], library: Path) -> ModuleType:
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"the simulated npu is C++ and is built on first use, but the compiler {compiler!r} is not there: "
            "install g++ 11 or newer (Debian: apt-get install g++), or name another one in CXX"
        )
    # ninja of this environment, also where its interpreter was called by path and its bin folder is not in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if shutil.which("ninja", path=path) is None:
        raise RuntimeError("the simulated npu is built by ninja, which is not there: pip install ninja")
    # One folder for all versions, so that a changed file is compiled and no other.
    folder = _root() / f"{name}_build_{_environment()}"
    folder.mkdir(exist_ok=True)
    (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed: it would be waited for without end
    before = {variable: os.environ.get(variable) for variable in ("PATH", "MAX_JOBS")}
    os.environ["PATH"] = path
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    print(f"building {name} in {library.parent}, once (a minute or two)", file=sys.stderr, flush=True)
    try:
        module: ModuleType = cpp_extension.load(
            name=name,
            sources=[str(SOURCE_FOLDER / source) for source in sources],
            extra_cflags=list(FLAGS),
            build_directory=str(folder),
        )
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
    library.parent.mkdir(exist_ok=True)
    incomplete = library.with_suffix(".new")
    shutil.copy2(folder / f"{name}.so", incomplete)
    incomplete.replace(library)
    return module
