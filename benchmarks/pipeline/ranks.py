"""One rank of the measurement; rank 0 writes the figures.

    python -m benchmarks.pipeline.ranks SETTINGS OUTPUT

SETTINGS is a JSON object with the fields of `Settings`, OUTPUT the file to write.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync, TrainPipelineSparseDist

import turbogr_plugin
from benchmarks.pipeline.workload import COMPUTE, CPU, WAIT, Compute, batches, product_seconds, sharded
from turbogr_plugin.pipeline import TrainPipelineFineGrained
from turbogr_plugin.pipeline.timeline import StepTimes, Timeline
from turbogr_plugin.pipeline.timeline_recording import TimelineRecording

SPARSE_DIST, SEMI_SYNC, EXACT, STALE = "SparseDist", "SemiSync", "fine-grained, tau 0", "fine-grained, tau 1"
PIPELINES: dict[str, Callable[[Any, Any], Any]] = {
    SPARSE_DIST: lambda model, optimizer: TrainPipelineSparseDist(model, optimizer, CPU),
    SEMI_SYNC: lambda model, optimizer: TrainPipelineSemiSync(model, optimizer, CPU, start_batch=0),
    EXACT: lambda model, optimizer: TrainPipelineFineGrained(model, optimizer, CPU),
    STALE: lambda model, optimizer: TrainPipelineFineGrained(model, optimizer, CPU, staleness=1),
}
LEAD = 3
"""Calls of progress before any time is taken."""
AROUND = 2
"""Calls that a recording needs beside those that it counts."""


@dataclass(frozen=True)
class Settings:
    """What one run measures."""

    lookups: int
    """Per rank and step."""
    rows: int
    dim: int
    steps: int
    rounds: int
    """Timed without the profiler; one more is profiled."""
    ratio: float
    """Communication alone by compute: gives the time of the dense part where dense_seconds does not."""
    dense_seconds: float | None
    kind: str
    """Of the dense part."""
    seed: int
    timelines: str | None
    """Folder for the timelines of rank 0."""

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Reads what `as_json` gives."""
        return cls(**json.loads(text))

    def as_json(self) -> str:
        """Plain values."""
        return json.dumps(dataclasses.asdict(self))


class Bench:
    """Trains the same model on the same batches, from the start in every run."""

    def __init__(self, settings: Settings, tables: dist.ProcessGroup) -> None:
        self._settings, self._tables = settings, tables
        self._product_seconds = 0.0 if settings.kind == WAIT else product_seconds()

    def train(self, name: str, seconds: float, *, recorded: bool) -> tuple[float, list[float], Timeline | None]:
        """One run of a pipeline to the end of its data.

        Args:
            name: of the pipeline.
            seconds: of the dense part, per step.
            recorded: whether the steps run under the profiler.

        Returns:
            Milliseconds of a step by the clock, the losses of all batches, and the timeline.
        """
        settings = self._settings
        model = sharded(
            settings.rows, settings.dim, Compute(settings.kind, seconds, self._product_seconds), self._tables
        )
        dense = [value for name, value in model.named_parameters() if "dense" in name]
        pipeline = PIPELINES[name](model, torch.optim.SGD(dense, lr=0.05))
        count = LEAD + settings.steps + AROUND
        source = batches(
            count, lookups=settings.lookups, rows=settings.rows, seed=1000 * settings.seed + dist.get_rank()
        )
        losses = [pipeline.progress(source).item() for _ in range(LEAD)]
        dist.barrier()
        recording = TimelineRecording(settings.steps, CPU, compute=[COMPUTE]) if recorded else None
        started = time.perf_counter()
        for _ in range(settings.steps + (AROUND if recorded else 0)):
            if recording is None:
                losses.append(pipeline.progress(source).item())
            else:
                with recording.step(len(losses)):
                    losses.append(pipeline.progress(source).item())
        taken = 1e3 * (time.perf_counter() - started) / settings.steps
        while len(losses) < count:
            losses.append(pipeline.progress(source).item())
        try:
            pipeline.progress(source)
        except StopIteration:
            pass
        else:
            raise AssertionError(f"{name} gave more than {count} batches")
        pipeline.detach()
        return taken, losses, recording.timeline() if recording else None

    def communication_seconds(self) -> float:
        """Of a step that computes nothing: of the median step, on the rank that waits least; collective."""
        _, _, timeline = self.train(SPARSE_DIST, 0.0, recorded=True)
        assert timeline is not None
        least = torch.tensor(statistics.median(step.communication for step in timeline.steps), dtype=torch.float64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return float(least)


def over_ranks(times: StepTimes) -> dict[str, float]:
    """The mean over ranks; collective."""
    mean = torch.tensor(dataclasses.astuple(times), dtype=torch.float64)
    dist.all_reduce(mean)
    return StepTimes(*(mean / dist.get_world_size()).tolist()).record()


def run(settings: Settings) -> dict[str, Any]:
    """All pipelines in turns; the figures are complete on rank 0."""
    # One group for all runs: its connections are made once.
    bench = Bench(settings, dist.new_group())
    found: dict[str, Any] = {}
    seconds = settings.dense_seconds
    if seconds is None:
        found["communication_ms"] = 1e3 * (alone := bench.communication_seconds())
        seconds = alone / settings.ratio
    found["dense_seconds"] = seconds
    times: dict[str, list[float]] = {name: [] for name in PIPELINES}
    losses: dict[str, list[list[float]]] = {name: [] for name in PIPELINES}
    for _ in range(settings.rounds):
        for name in PIPELINES:
            taken, seen, _ = bench.train(name, seconds, recorded=False)
            times[name].append(taken)
            losses[name].append(seen)
    found["pipelines"] = {}
    for name in PIPELINES:
        _, seen, timeline = bench.train(name, seconds, recorded=True)
        losses[name].append(seen)
        assert timeline is not None
        if settings.timelines and dist.get_rank() == 0:
            timeline.write(Path(settings.timelines, name.replace(", ", "-").replace(" ", "-")))
        found["pipelines"][name] = {
            "step_ms": times[name],
            "profiled": over_ranks(timeline.mean),
            "losses": losses[name][0],
            "runs_agree": all(run == losses[name][0] for run in losses[name]),
        }
    return found


def main() -> None:
    """Runs as one rank."""
    settings, output = Settings.from_json(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    turbogr_plugin.register()  # SemiSync does not run on CPU without
    dist.init_process_group("gloo")
    found = run(settings)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
