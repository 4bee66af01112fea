"""What happens in each process of a dry run: the simulated npu comes with torch, and what it sees goes to disk.

The record is written again every two seconds and at the end, so that a process that is killed leaves one too; a worker
of multiprocessing ends by os._exit and is asked by multiprocessing itself.

Left out: processes that never import torch.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from turbogr_plugin import simnpu
from turbogr_plugin.simnpu import process_group
from turbogr_plugin.simnpu.dryrun_record import SETTINGS, Place, ProcessRecord, Use
from turbogr_plugin.simnpu.operators import TORCH_NPU_VERSION

INTERVAL = 2.0  # seconds between two writes of the record
_CUDA: dict[tuple[str, int, str], int] = {}  # uses of torch.cuda by the script
_KEYS = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def start(folder: str) -> None:
    """Loads the simulated npu into this process and begins to record.

    Args:
        folder: where the settings are and the record goes.

    Raises:
        RuntimeError: the device cannot be loaded: there is no compiler, or torch_npu is imported.
    """
    settings = json.loads((Path(folder) / SETTINGS).read_text())
    simnpu.load(
        devices=settings["devices"], policy=settings["policy"], memory=int(settings["memory_gb"] * 1_000_000_000)
    )
    simnpu.trace_sources(True)
    # The import of this package has installed the hook that adapts TorchRec when it comes.
    torch.cuda.__class__ = _WatchedModule
    recorder = _Recorder(Path(folder))
    sys.meta_path.insert(0, _StandIn(recorder))
    recorder.begin()
    os.register_at_fork(after_in_child=recorder.begin_in_child)


class _Recorder:
    """The record of this process, kept up to date on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: list[Use] = []
        self.torch_npu_imports: list[Place] = []
        self.written: str | None = None
        self.lock = threading.Lock()

    def begin(self) -> None:
        former = sys.excepthook

        def keep(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
            if not issubclass(kind, KeyboardInterrupt):
                self.failures.append(_failure(kind, error, where))
            former(kind, error, where)

        sys.excepthook = keep
        atexit.register(self.write)
        self._watch()

    def begin_in_child(self) -> None:
        """A forked worker starts anew: what its parent has done is in the parent's record."""
        simnpu.reset()
        _CUDA.clear()
        self.failures, self.torch_npu_imports = [], []
        self.lock = threading.Lock()
        self._watch()

    def _watch(self) -> None:
        multiprocessing.util.Finalize(None, self.write, exitpriority=0)
        threading.Thread(target=self._write_until_the_end, name="turbogr-dryrun").start()

    def _write_until_the_end(self) -> None:
        # Not a daemon: Python waits for it after the last line of the script and before it takes anything apart, as
        # operators that the script has defined.
        main = threading.main_thread()
        while main.is_alive():
            main.join(INTERVAL)
            self.write()

    def write(self) -> None:
        """Writes what has been seen until now."""
        with self.lock:
            record = _seen()
            record.failures = self.failures
            record.torch_npu_imports = self.torch_npu_imports
            record.write(self.folder)


def _seen() -> ProcessRecord:
    name = multiprocessing.current_process().name
    record = ProcessRecord(os.getpid(), "script" if name == "MainProcess" else name)
    record.rank = process_group.world_rank()
    record.operators = simnpu.executed()
    fallbacks = simnpu.cpu_fallbacks()
    waits = simnpu.host_syncs()
    for name, count in fallbacks.items():
        operator, _, dtype = name.partition(" (")
        uses = [_use(name, sync.where, sync.count) for sync in waits if sync.operator == operator]
        if dtype:
            record.lacking_dtypes.append(_use(name, (), count, "(lines are not kept)"))
        elif _has_cpu_kernel(operator):
            record.fallbacks += uses
        else:
            record.missing.append(_use(name, (), count, "(the line is in its exception)"))
    record.host_syncs = [
        _use(sync.operator, sync.where, sync.count) for sync in waits if sync.operator not in fallbacks
    ]
    record.races = [_race(race) for race in simnpu.races()]
    npu = torch.get_device_module("npu")
    record.peak_bytes = {
        f"npu:{device}": peak for device in range(npu.device_count()) if (peak := npu.max_memory_allocated(device))
    }
    record.modules = sorted({path for module in list(sys.modules.values()) if (path := _source_of(module))})
    record.cuda_reached = [
        Use(name, Place("script", path, line), None, count) for (path, line, name), count in list(_CUDA.items())
    ]
    return record


@cache
def _has_cpu_kernel(operator: str) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) for key in _KEYS)


def _use(name: str, where: Iterable[str], count: int, detail: str = "") -> Use:
    """Of the lines of a call, innermost first: the first that is neither torch's nor Python's, and the script's."""
    places = [_place(line) for line in where]
    known = [place for place in places if place.owner not in ("torch", "python")]
    # What this package has put in the place of TorchRec's or fbgemm's code is told by who calls it.
    known = [place for place in known if not _is_adaptation(place.path)] or known
    script = next((place for place in known if place.owner == "script"), None)
    return Use(name, known[0] if known else None, script, count, detail)


def _race(race: simnpu.Race) -> Use:
    earlier = _use("", race.earlier.where, 1)
    later = _use(race.kind, race.later.where, race.count, f"{race.later.operator} after {race.earlier.operator}")
    return replace(later, other=earlier.script or earlier.place)


def _place(line: str) -> Place:
    path, _, number = line.partition(" in ")[0].rpartition(":")
    return Place(_owner(path), path, int(number))


@cache
def _owner(path: str) -> str:
    """The package that a source belongs to; "script" for what is neither Python's nor installed."""
    real = Path(path)
    for folder in _package_folders():
        if real.is_relative_to(folder):
            return real.relative_to(folder).parts[0].removesuffix(".py")
    if real.is_relative_to(Path(__file__).parents[1]):
        return "turbogr_plugin"
    if path.startswith("<") or any(real.is_relative_to(folder) for folder in _python_folders()):
        return "python"
    return "script"


@cache
def _is_adaptation(path: str) -> bool:
    package = Path(__file__).parents[1]
    return any(Path(path).is_relative_to(package / floor) for floor in ("backend", "kernels"))


@cache
def _package_folders() -> list[Path]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [Path(folder) for folder in dict.fromkeys([*folders, site.getusersitepackages()])]


@cache
def _python_folders() -> list[Path]:
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]


def _source_of(module: ModuleType) -> str | None:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) and path.endswith(".py") and _owner(path) == "script" else None


def _failure(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> Use:
    lines = [f"{frame.filename}:{frame.lineno}" for frame in reversed(traceback.extract_tb(where))]
    return _use(kind.__name__, lines, 1, str(error))


class _WatchedModule(ModuleType):
    """torch.cuda, which notes the lines of the script that use it."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            frame = sys._getframe(1)
            if _owner(frame.f_code.co_filename) == "script":
                key = (frame.f_code.co_filename, frame.f_lineno, f"torch.cuda.{name}")
                _CUDA[key] = _CUDA.get(key, 0) + 1
        return super().__getattribute__(name)


class _StandIn(MetaPathFinder, Loader):
    """torch_npu as an empty module: many scripts import it for its effect alone, which the simulated device has had."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds torch_npu before anyone else does, and none of its submodules."""
        return ModuleSpec(fullname, self) if fullname == "torch_npu" else None

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module and notes who wanted it."""

        def refuse(name: str) -> Any:
            raise AttributeError(
                f"torch_npu.{name} is not there in a dry run: the simulated npu has torch.npu and aten"
            )

        module.__dict__.update(npu=torch.get_device_module("npu"), __version__=TORCH_NPU_VERSION, __getattr__=refuse)
        stack = reversed(traceback.extract_stack())
        place = next((p for p in (_place(f"{f.filename}:{f.lineno}") for f in stack) if p.owner == "script"), None)
        if place is not None:
            self.recorder.torch_npu_imports.append(place)
