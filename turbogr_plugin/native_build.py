"""Builds the C++ parts of this package on first use and keeps each by what it was made from.

The folder of a result is named by a hash of the sources, the headers they include, the flags, torch's version and the
interpreter, so another version never gets it, and a process that finds it imports it without asking ninja. Processes
that start together build once: the others wait on a lock that the system releases with the process that holds it.

What the C++ is and which flags it takes is told by its owner (an `Extension`); nothing here knows any of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

_OWN_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Extension:
    """A Python module made of C++."""

    name: str
    """Of the module, and the beginning of the names of its folders in the cache."""

    what: str
    """What it is to a user, as the subject of a message: "the simulated npu"."""

    folder: Path
    """Where the sources are; headers that they include by a name in quotes are looked for here, too."""

    sources: Sequence[str]
    flags: Sequence[str]
    """Of the compiler. They say all that the result depends on: no -march=native, a cache may serve two machines."""

    link_flags: Sequence[str] = ()


def load(extension: Extension) -> ModuleType:
    """The extension, imported; built before if this version of it is not there.

    Raises:
        RuntimeError: there is no C++ compiler, no ninja, or no folder for the result, or the build failed; the
            message says which.
    """
    library = library_path(extension)
    if not library.exists():
        try:
            library.parent.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(
                f"{extension.what} is built on first use and kept in {_root()}, which cannot be made ({error}): set "
                "TORCH_EXTENSIONS_DIR to a folder that can be written"
            ) from error
        with _build_folder(extension).with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            library = library_path(extension)  # a source may have changed while another process built
            if not library.exists():
                return _build(extension, library)
    spec = importlib.util.spec_from_file_location(extension.name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_path(extension: Extension) -> Path:
    """Where the built library of this version is, or will be."""
    return _root() / f"{extension.name}_{_version(extension)}" / f"{extension.name}.so"


def missing_tools(extension: Extension) -> str | None:
    """Why the extension cannot be built here, with the way out; None where compiler and ninja are there."""
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return (
            f"{extension.what} is C++ and is built on first use, but the compiler {compiler!r} is not there: "
            "install g++ 11 or newer (Debian: apt-get install g++), or name another one in CXX"
        )
    if shutil.which("ninja", path=_search_path()) is None:
        return f"{extension.what} is built by ninja, which is not there: pip install ninja"
    return None


def _root() -> Path:
    """Where builds are kept: in TORCH_EXTENSIONS_DIR if that is set, as every extension of torch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")


def _build_folder(extension: Extension) -> Path:
    """One for all versions of the sources, so that a changed file is compiled and no other."""
    return _root() / f"{extension.name}_build_{_environment(extension)}"


def _search_path() -> str:
    """PATH with ninja of this environment, also where its interpreter was called by path."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _environment(extension: Extension) -> str:
    """Digest of what every file is compiled with."""
    host = (torch.__version__, str(Path(torch.__file__).parent), sysconfig.get_config_var("EXT_SUFFIX"))
    return hashlib.sha256(" ".join((*host, *extension.flags, *extension.link_flags)).encode()).hexdigest()[:8]


def _headers(extension: Extension) -> list[Path]:
    """The headers of its folder that its sources include, directly or not, by name."""
    found: set[Path] = set()
    waiting = [extension.folder / source for source in extension.sources]
    while waiting:
        for match in _OWN_INCLUDE.findall(waiting.pop().read_bytes()):
            header = extension.folder / match.decode()
            if header not in found and header.exists():
                found.add(header)
                waiting.append(header)
    return sorted(found)


def _version(extension: Extension) -> str:
    digest = hashlib.sha256(_environment(extension).encode())
    for path in [*_headers(extension), *(extension.folder / source for source in extension.sources)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _build_variables() -> Iterator[None]:
    """The variables that torch's builder reads, set for one build."""
    before = {variable: os.environ.get(variable) for variable in ("PATH", "MAX_JOBS")}
    os.environ["PATH"] = _search_path()
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def _build(extension: Extension, library: Path) -> ModuleType:
    from torch.utils import cpp_extension

    missing = missing_tools(extension)
    if missing is not None:
        raise RuntimeError(missing)
    folder = _build_folder(extension)
    folder.mkdir(exist_ok=True)
    (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed: it would be waited for without end
    print(f"building {extension.name} in {library.parent}, once (a minute or two)", file=sys.stderr, flush=True)
    with _build_variables():
        module: ModuleType = cpp_extension.load(
            name=extension.name,
            sources=[str(extension.folder / source) for source in extension.sources],
            extra_cflags=list(extension.flags),
            extra_ldflags=list(extension.link_flags),
            build_directory=str(folder),
        )
    library.parent.mkdir(exist_ok=True)
    incomplete = library.with_suffix(".new")
    shutil.copy2(folder / f"{extension.name}.so", incomplete)
    incomplete.replace(library)
    return module
