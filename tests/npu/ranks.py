"""Ranks that serve many tests: processes started once, in which functions run as ranks of one world after another.

A process start costs 3 s of imports, a world of gloo groups a few milliseconds. `RankPool.run` takes calls (a function
by name, its arguments as JSON, the size of its world): the processes serve worlds of four, then two worlds of two side
by side, then four of one. A call that raises on a rank is reported with its traceback; the next finds a new world.

    python -m tests.npu.ranks PROCESS PROCESSES SETUP PATIENCE is one such process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from select import select
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Call:
    """A function to run on the ranks of a world: "package.module:function", called with these arguments."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1


@dataclass
class Outcome:
    """What a call left, by rank."""

    values: list[Any]
    """What the function returned (None where it raised)."""
    errors: list[str]
    """Traceback, empty where there was none."""
    seconds: float
    """On rank 0."""

    @property
    def error(self) -> str:
        """The tracebacks of all ranks that failed."""
        return "\n".join(error for error in self.errors if error)

    def result(self) -> list[Any]:
        """The values, or an AssertionError with the tracebacks."""
        assert not self.error, self.error
        return self.values


class RankPool:
    """The processes. They start with the first call and end with `close`; after a timeout they are started anew."""

    def __init__(
        self,
        *,
        setup: str = "tests.npu.ranks:with_npu",
        environment: dict[str, str] | None = None,
        patience: float = 60,
        processes: int = 4,
    ) -> None:
        """Args:
        setup: function that each process calls first.
        environment: variables on top of this process's.
        patience: seconds after which a collective fails that another rank does not join; the cores may be busy.
        processes: 4, 2 or 1, the largest world that is to be served.
        """
        self._size = processes
        self._arguments = [str(processes), setup, str(patience)]
        self._environment = environment or {}
        self._processes: list[subprocess.Popen[str]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = 0

    def run(self, calls: Sequence[Call], *, timeout: float = 100) -> list[Outcome]:
        """Runs calls, each on as many ranks as it wants; within `timeout` seconds for all of them."""
        if not calls:
            return []
        assert max(call.world_size for call in calls) <= self._size
        deadline = time.monotonic() + timeout
        folder = self._start()
        self._jobs += 1
        job = folder / f"job-{self._jobs}"
        job.mkdir()
        (job / "calls.json").write_text(json.dumps([asdict(call) for call in calls]))
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(f"{job}\n")
                process.stdin.flush()
            for number, process in enumerate(self._processes):
                assert process.stdout is not None
                ready, _, _ = select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
                answer = process.stdout.readline() if ready else "nothing in time\n"
                if not ready:
                    process.send_signal(signal.SIGUSR1)  # its threads write where they are to the log
                    time.sleep(1)
                log = (folder / f"log-{number}.txt").read_text()[-6000:]
                assert answer == "done\n", f"process {number} of the pool answered {answer!r}; its log ends:\n{log}"
        except BaseException:
            self.close()
            raise
        return [_collect(job, number, call) for number, call in enumerate(calls)]

    def _start(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
            folder = Path(self._folder.name)
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                "PYTHONPATH": str(ROOT),
                **self._environment,
            }
            for number in range(self._size):
                with (folder / f"log-{number}.txt").open("w") as log:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "tests.npu.ranks", str(number), *self._arguments],
                            cwd=ROOT,
                            env=environment,
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=log,
                            text=True,
                        )
                    )
        return Path(self._folder.name)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _collect(job: Path, number: int, call: Call) -> Outcome:
    of_ranks = [json.loads((job / f"{number}-{rank}.json").read_text()) for rank in range(call.world_size)]
    return Outcome(
        [each["value"] for each in of_ranks], [each["error"] for each in of_ranks], float(of_ranks[0]["seconds"])
    )


# What follows runs in the processes of the pool.


def with_npu() -> None:
    """The simulated npu under its strictest policy, and the plugin registered with TorchRec."""
    import turbogr_plugin
    from turbogr_plugin import simnpu

    simnpu.load(policy="strict")
    simnpu.trace_sources(True)
    turbogr_plugin.register()


def without_npu() -> None:
    """The plugin registered with TorchRec, on a machine without an npu."""
    import turbogr_plugin

    turbogr_plugin.register()


def without_plugin() -> None:
    """TorchRec as it comes."""


def _serve(process: int, processes: int, setup: str, patience: timedelta) -> None:
    import faulthandler
    import logging

    import torch

    faulthandler.register(signal.SIGUSR1)
    # The pipe to the pool is ours alone: what libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # TorchRec warns of much that is chosen here
    _function(setup)()
    for line in sys.stdin:
        job = Path(line.strip())
        _run_job(job, process, processes, patience)
        answers.write("done\n")
        answers.flush()


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _run_job(job: Path, process: int, processes: int, patience: timedelta) -> None:
    import torch.distributed as dist

    calls = [Call(**call) for call in json.loads((job / "calls.json").read_text())]
    gc.unfreeze()  # once per job all is looked through: something may have been held only for a while
    control = dist.FileStore(str(job / "control"), processes)
    control.set_timeout(timedelta(hours=2))
    for size in (4, 2, 1):
        worlds, world, rank = processes // size, process // size, process % size
        if worlds == 0:
            continue
        mine = [number for number, call in enumerate(calls) if call.world_size == size][world::worlds]

        def start(store: str, world: int = world, rank: int = rank, size: int = size) -> None:
            _start_world(job / f"world-{size}-{world}-{store}", rank, size, patience)

        _run_in_world(job, {number: calls[number] for number in mine}, start, control, rank)
    # Nobody leaves while another still meets in the store.
    control.set(f"done-{process}", "1")
    control.wait([f"done-{other}" for other in range(processes)], timedelta(hours=2))


def _run_in_world(job: Path, calls: dict[int, Call], start: Callable[[str], None], control: Any, rank: int) -> None:
    """Runs the calls of one world. Each gets process groups of its own, also after one that failed.

    A model keeps the groups that it made, and each of gloo's has threads that wake a hundred times a second: after the
    calls of one job, some hundred groups would take the cores from whatever still runs.
    """
    for number, call in calls.items():
        start(f"before-{number}")
        began = time.monotonic()
        value, error = None, ""
        try:
            value = _function(call.function)(**call.arguments)
            json.dumps(value)
        except Exception:
            value, error = None, traceback.format_exc()
        seconds = time.monotonic() - began
        (job / f"{number}-{rank}.json").write_text(json.dumps({"value": value, "error": error, "seconds": seconds}))
        control.set(f"{number}/{rank}", "done")
        control.wait([f"{number}/{other}" for other in range(call.world_size)])
        _end_world()


def _start_world(store: Path, rank: int, size: int, patience: timedelta) -> None:
    """Starts the process group; of four ranks two share a host."""
    import torch
    import torch.distributed as dist

    local = min(size, 2)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
    }
    has_npu = torch._C._get_privateuse1_backend_name() == "npu"
    backend = "cpu:gloo,npu:hccl" if has_npu else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=patience
    )


def forget_groups() -> None:
    """TorchRec caches the groups of hosts in module globals, for one world and one 2-D layout per process."""
    import torchrec.distributed.comm as torchrec_comm

    for name in ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D", "_NODE_GROUP_SIZE_2D"):
        setattr(torchrec_comm, name, None)


def _end_world() -> None:
    """Ends the process group, also one in which a collective has failed."""
    import torch.distributed as dist
    import torchrec.distributed.collective_utils as collective_utils

    forget_groups()
    # A collective of the first DistributedModelParallel of a process, wherever that was: each world has its own.
    collective_utils._INITIALIZED = False
    with suppress(RuntimeError):
        dist.destroy_process_group()
    gc.collect()  # models hold groups in cycles, and gloo closes a connection when its group is freed
    # What is left are the libraries: to look through them after each call took most of the time of short ones.
    gc.freeze()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], timedelta(seconds=float(sys.argv[4])))
