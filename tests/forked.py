"""Processes of the tests that start with torch and TorchRec imported, in milliseconds instead of 5 s of CPU time.

They are forked from a server (multiprocessing's forkserver) that has imported the libraries and run nothing: it has a
single thread, no process group, no device and none of this plugin, so a child is what a new process would be after the
same imports, but for one thing: all children have the server's hash seed, so that sets of strings have one order on all
ranks. What must not depend on that is run on ranks with interpreters of their own, too (RankPool, torchrun), and what
has to be tried in a new interpreter (the import hook, the launchers) starts one.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = (
    *("torch", "torch.distributed.checkpoint", "torch.distributed.tensor", "pytest", "torchrec"),
    *("torchrec.distributed.model_parallel", "torchrec.distributed.planner", "torchrec.distributed.train_pipeline"),
    *("torchrec.models.dlrm", "torchrec.models.deepfm"),
)
#: What the libraries read when they are imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
#: A launcher's, which must not be told to processes that it has not started.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")


@functools.cache
def context() -> ForkServerContext:
    """Where processes are made as with any context of multiprocessing; starts the server."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(LIBRARIES))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in LAUNCHED:
            patch.delenv(name, raising=False)
        multiprocessing.forkserver.ensure_running()
    return made


def start(
    function: Callable[..., None],
    *arguments: Any,
    folder: Path,
    out: Path,
    err: Path,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """Starts a function in a process of its own, in `folder`, which appends what it prints to `out` and `err`.

    Whoever starts a process ends it: it may have children (workers of a loader), so it is no daemon.
    """
    process = context().Process(
        target=_enter, args=(dict(environment or {}), str(folder), str(out), str(err), function, arguments)
    )
    process.start()
    return process


def _enter(
    environment: dict[str, str], folder: str, out: str, err: str, function: Callable[..., None], arguments: tuple[Any]
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, file in ((1, out), (2, err)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    function(*arguments)


def run_program(
    program: list[str],
    *,
    ranks: int | None,
    folder: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program (its path and arguments) in `folder`, as the ranks of a world where `ranks` is given.

    A rank that fails ends the others, as under torchrun; here no launcher stands between.
    """
    out, err = folder / "ranks.out", folder / "ranks.err"
    for file in (out, err):
        file.write_text("")
    environments = [dict(environment or {})]
    if ranks:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        world |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
        of_ranks = [
            # The command leaves stderr to rank 0 where a launcher collects the errors of all.
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json")}
            for rank in range(ranks)
        ]
        environments = [environments[0] | world | of_rank for of_rank in of_ranks]
    running = [
        start(_run_program, program, folder=folder, out=out, err=err, environment=variables)
        for variables in environments
    ]
    code, deadline = 0, time.monotonic() + timeout
    try:
        while running and code == 0:
            ended = wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic()))
            if not ended:
                raise TimeoutError(f"{program} is not done in {timeout} seconds:\n{err.read_text()[-6000:]}")
            for process in [process for process in running if process.sentinel in ended]:
                process.join()
                code = code or process.exitcode or 0
                running.remove(process)
    finally:
        for process in running:
            process.kill()
            process.join()
    return subprocess.CompletedProcess(program, code, out.read_text(), err.read_text())


def _run_program(program: list[str]) -> None:
    sys.argv = list(program)
    runpy.run_path(program[0], run_name="__main__")
