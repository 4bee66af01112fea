"""Steps whose loader, stages and collectives are late at random, each rank's at other times; see tests/npu/ranks.py."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from tests.pipeline import uneven_model
from tests.pipeline.small_model import Batch
from turbogr_plugin.pipeline.train_pipeline_fine_grained import TrainPipelineFineGrained
from turbogr_plugin.sharding.jagged_lookup import DeduplicatingCollection

PLACES = {
    "feature distribution of sequences": (ShardedEmbeddingCollection, "input_dist"),
    "feature distribution of bags": (ShardedEmbeddingBagCollection, "input_dist"),
    "unique": (DeduplicatingCollection, "_dedup_indices"),
    "lookup of sequences": (ShardedEmbeddingCollection, "compute_and_output_dist"),
    "lookup of bags": (ShardedEmbeddingBagCollection, "compute_and_output_dist"),
    "all-to-all": (dist, "all_to_all_single"),
    "gather": (dist, "all_gather"),
    "gather to one": (dist, "all_gather_into_tensor"),
    "reduce": (dist, "all_reduce"),
    "messages": (dist, "batch_isend_irecv"),
}


def sizes_of(rank: int, steps: int, seed: int) -> list[int]:
    """Samples in each batch of a rank: often none or one; the last rank ends first."""
    draw = random.Random(1000 * seed + rank)
    ended = 3 * rank
    return [draw.choice((0, 0, 1, 1, 2, 3, 4)) for _ in range(steps - ended)]


class _Delays:
    """Waits at some calls; each place and rank has a sequence of its own."""

    def __init__(self, seed: int, longest: float) -> None:
        self._seed, self._longest = seed, longest
        self._draws: dict[str, random.Random] = {}
        self.count: dict[str, int] = {}

    def at(self, place: str) -> None:
        draw = self._draws.setdefault(place, random.Random(f"{self._seed} {dist.get_rank()} {place}"))
        if draw.random() < 0.3:
            self.count[place] = self.count.get(place, 0) + 1
            time.sleep(draw.random() * self._longest)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        with ExitStack() as stack:
            for place, (owner, name) in PLACES.items():
                stack.enter_context(mock.patch.object(owner, name, self._late(place, getattr(owner, name))))
            yield

    def _late(self, place: str, function: Any) -> Any:
        def late(*arguments: Any, **named: Any) -> Any:
            self.at(place)
            return function(*arguments, **named)

        return late


def without_pipeline(*, steps: int, seed: int, group: int | None = None) -> dict[str, Any]:
    """The plain loop; ranks that have ended go on with empty batches."""
    rank = dist.get_rank()
    sizes = sizes_of(rank, steps, seed)
    model = uneven_model.sharded(["bags", "sequences"], group=group)
    source = uneven_model.batches(sizes + [0] * (steps - len(sizes)), rank=rank)
    return {"losses": uneven_model.plain(model, source), "weights": uneven_model.weights_of(model)}


def pipelined(
    *,
    steps: int,
    seed: int,
    longest: float,
    staleness: int,
    group: int | None = None,
    own_group: bool = True,
    looks: int = 3,
) -> dict[str, Any]:
    """The pipeline, with delays of up to `longest` seconds (0: none).

    Returns:
        losses, weights, delays by place, and what was alive at `looks` times, evenly spread and before any
        rank has ended: tensors, megabytes of
        the process, threads and open files.
    """
    rank = dist.get_rank()
    delays = _Delays(seed, longest)
    model = uneven_model.sharded(["bags", "sequences"], group=group, own_group=own_group)

    def source() -> Iterator[Batch]:
        for step, size in enumerate(sizes_of(rank, steps, seed)):
            if longest:
                delays.at("loader")
            yield uneven_model.batch(size, rank=rank, step=step)

    def forward(batch: Any) -> Any:
        losses, shown = model(batch)
        if longest:
            delays.at("dense forward")
            losses.register_hook(lambda _: delays.at("dense backward"))
        return losses, shown

    made: Any = TrainPipelineFineGrained
    pipeline = made(
        *(model, uneven_model.dense_optimizer(model), uneven_model.CPU),
        custom_model_fwd=forward,
        staleness=staleness,
        when_exhausted="fill",
        empty_batch=uneven_model.empty_from,
    )
    losses, alive, batches = [], [], source()
    with delays.everywhere() if longest else ExitStack():
        for step in range(steps):
            losses.append(float(pipeline.progress(batches)))
            if longest and (step + 1) % (steps // (looks + 1)) == 0 and len(alive) < looks:
                pipeline.detach()  # the lanes rest: as many batches are in flight each time
                alive.append(_alive())
        ended = False
        try:
            pipeline.progress(batches)
        except StopIteration:
            ended = True
    pipeline.detach()
    return {
        "losses": losses,
        "weights": uneven_model.weights_of(model),
        "ended": ended,
        "delays": delays.count,
        "alive": alive,
    }


def _alive() -> dict[str, float]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tensors": sum(isinstance(each, torch.Tensor) for each in gc.get_objects()),
        "megabytes": pages * 4096 / 2**20,
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }
