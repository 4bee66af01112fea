"""Ranks that fail or are killed, each a process of its own: what they run, and how they are started and waited for.

Rank 0 hosts the store, as without a launcher, and ends like any other rank: the worst case for whoever wants to read
its message.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import forked
from turbogr_plugin.pipeline.rank_failure import Failures, RankFailure

Steps = Callable[..., Any]


def run(
    folder: Path, steps: Steps, *, world_size: int, patience: float = 60, timeout: float = 90, **arguments: Any
) -> Any:
    """Runs `steps(rank, **arguments)` on ranks of one world.

    Args:
        folder: for what they write.
        steps: a function of a module.
        world_size: number of processes.
        patience: of the process group, in seconds: after it a collective fails that some rank does not join.
        timeout: within which all must have ended.
        arguments: of `steps`.

    Returns:
        By rank, what it left: `value` or `raised` (type), `message`, `rank` of a RankFailure, `cause` (type); None of
        a process that was killed.
    """
    out, err = folder / "out.txt", folder / "err.txt"
    running = [
        forked.start(_enter, rank, world_size, patience, steps, arguments, folder=folder, out=out, err=err)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    try:
        left = list(running)
        while left:
            ended = wait([process.sentinel for process in left], max(0.0, deadline - time.monotonic()))
            if not ended:
                ranks = [rank for rank, process in enumerate(running) if process in left]
                raise TimeoutError(f"ranks {ranks} are not done in {timeout} seconds:\n{err.read_text()[-6000:]}")
            left = [process for process in left if process.sentinel not in ended]
    finally:
        for process in running:
            process.kill()
            process.join()
    results = [folder / f"rank-{rank}.json" for rank in range(world_size)]
    return [json.loads(result.read_text()) if result.exists() else None for result in results]


def _enter(rank: int, world_size: int, patience: float, steps: Steps, arguments: dict[str, Any]) -> None:
    limit = timedelta(seconds=patience)
    address = Path("address")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        Path("address.new").write_text(str(store.port))
        Path("address.new").rename(address)
    else:
        while not address.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(address.read_text()), is_master=False, timeout=limit)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        left = {"value": steps(rank, **arguments)}
    except Exception as error:
        left = {"raised": type(error).__name__, "message": str(error), "cause": type(error.__cause__).__name__}
        if isinstance(error, RankFailure):
            left["rank"] = error.rank
    Path(f"rank-{rank}.new").write_text(json.dumps(left))
    Path(f"rank-{rank}.new").rename(f"rank-{rank}.json")
    if arguments.get("stays") == rank:  # as a script that catches the exception and goes on
        while any(not Path(f"rank-{other}.json").exists() for other in range(world_size)):
            time.sleep(0.05)


def end(rank: int, killed: bool) -> None:
    """What befalls the failing rank."""
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"row 7 of rank {rank} is bad: \u4e2d")


def fail_before_a_collective(rank: int, *, failing: int, killed: bool = False, stays: int | None = None) -> str:
    """One step as the pipeline makes it, in which some ranks fail before a collective that the others join."""
    store = dist.distributed_c10d._get_default_store()
    failures = Failures(store, patience=2)
    total = torch.ones(3)
    try:
        for step in range(3):
            with failures.watched():
                if rank == failing and step == 2:
                    end(rank, killed)
                dist.all_reduce(total)
    except Exception as error:
        shown = failures.explain(error)
        if shown is not error:
            raise shown from error
        failures.report(rank, error)
        raise
    finally:
        failures.close()
    return "done"


def train(
    rank: int,
    *,
    failing: int,
    where: str,
    step: int = 3,
    killed: bool = False,
    staleness: int = 1,
    own_group: bool = True,
    stays: int | None = None,
) -> int:
    """Trains until a rank fails: in its loader, in dense_forward, in a stage of its own of the sparse lane ("lane"), or
    in the lookup, which the others wait for.

    Returns:
        steps that were made.
    """
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    import turbogr_plugin
    from tests.pipeline import uneven_model
    from turbogr_plugin.pipeline.schedule import Schedule, Stage
    from turbogr_plugin.pipeline.train_pipeline_fine_grained import TrainPipelineFineGrained

    turbogr_plugin.register()

    def fail_in(place: str, index: int) -> None:
        if (rank, place, index) == (failing, where, step):
            end(rank, killed)

    def source() -> Any:
        for index in range(8):
            fail_in("loader", index)
            yield uneven_model.batch(2, rank=rank, step=index)

    model = uneven_model.sharded(["bags", "sequences"], own_group=own_group)
    calls = 0

    def forward(batch: Any) -> Any:
        nonlocal calls
        fail_in("dense_forward", calls)
        calls += 1
        return model(batch)

    looked_up = itertools.count()
    look_up = ShardedEmbeddingCollection.compute_and_output_dist

    def failing_lookup(*arguments: Any) -> Any:
        fail_in("lookup", next(looked_up))
        return look_up(*arguments)

    ShardedEmbeddingCollection.compute_and_output_dist = failing_lookup
    stage = Stage(
        name="check",
        lane="sparse",
        ahead=1,
        stale=True,
        waits_for=("wait_features",),
        work=lambda context: fail_in("lane", context.index),
    )
    pipeline: Any = TrainPipelineFineGrained(
        model,
        uneven_model.dense_optimizer(model),
        uneven_model.CPU,
        staleness=staleness,
        custom_model_fwd=forward,
        schedule=Schedule().with_stage(stage, before="dense_forward"),
    )
    batches, done = source(), 0
    try:
        while True:
            pipeline.progress(batches)
            done += 1
    except StopIteration:
        return done
