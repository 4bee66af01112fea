"""Which pipeline trains: ours by default, TorchRec's by choice, all of them by one configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline, TrainPipelineSemiSync

from turbogr_plugin.data.batch import SequenceBatch
from turbogr_plugin.errors import InputError
from turbogr_plugin.pipeline.table_staleness import StalenessChoice
from turbogr_plugin.pipeline.train_pipeline_fine_grained import TrainPipelineFineGrained

PipelineKind = Literal["fine_grained", "sparse_dist", "semi_sync", "base"]
Pipeline: TypeAlias = TrainPipeline[SequenceBatch, Tensor]
"""All of them are subclasses of it."""


@dataclass(kw_only=True)
class PipelineConfig:
    """How the stages of training steps overlap; docs/pipeline.md."""

    kind: PipelineKind = "fine_grained"
    "fine_grained: ours. TorchRec's: sparse_dist, semi_sync (embeddings one step old) and base (nothing overlaps)."
    staleness: int = 0
    "Updates that a lookup of the tables may miss: 0 is exact, 1 is the paper's semi-asynchronous training."
    start_batch: int = 0
    "Steps with staleness 0 before stale ones begin."
    staleness_limit: float | None = None
    "Look a table up stale only if alpha * staleness is below this (0.05 is usual), with alpha, the collisions between \
steps, measured before start_batch; without it all tables are stale."

    def __post_init__(self) -> None:
        for name in ("staleness", "start_batch"):
            if getattr(self, name) < 0:
                raise InputError(f"pipeline.{name} must be at least 0, got {getattr(self, name)}")
        if self.kind in ("sparse_dist", "base") and self.staleness:
            raise InputError(
                f"pipeline.staleness must be 0 with pipeline.kind {self.kind}, which is exact, got {self.staleness}: "
                "use fine_grained"
            )
        if self.kind == "semi_sync" and self.staleness != 1:
            raise InputError(
                f"pipeline.staleness must be 1 with pipeline.kind semi_sync, which knows no other, got {self.staleness}"
            )
        if self.staleness_limit is not None:
            if self.kind != "fine_grained" or not self.staleness:
                raise InputError(
                    "pipeline.staleness_limit chooses tables for a staleness of at least 1 with pipeline.kind "
                    f"fine_grained, got {self.kind} with staleness {self.staleness}"
                )
            if not 0 < self.staleness_limit < float("inf"):
                raise InputError(f"pipeline.staleness_limit must be positive, got {self.staleness_limit}")
            if self.start_batch < 2:
                raise InputError(
                    "pipeline.staleness_limit needs a pipeline.start_batch of at least 2, steps in which collisions "
                    f"are measured, got {self.start_batch}"
                )

    @property
    def own_group(self) -> bool:
        """Whether tables and dense part communicate from two threads, and so need a process group each."""
        return self.kind == "fine_grained"


def build_pipeline(
    config: PipelineConfig,
    model: DistributedModelParallel,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    steps_done: int,
) -> Pipeline:
    """The pipeline of a run.

    Args:
        config: which.
        model: sharded.
        optimizer: of all parameters.
        device: of this rank.
        steps_done: training steps of this run before, which count as part of the warm-up; but collisions are measured
            in the first `start_batch` steps of each start of the program.
    """
    start_batch = max(0, config.start_batch - steps_done)
    if config.kind == "base":
        return TrainPipelineBase(model, optimizer, device)
    if config.kind == "sparse_dist":
        return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    if config.kind == "semi_sync":
        # Its first semi-synchronous batch is start_batch - 1, whose successor is the first one looked up stale.
        return TrainPipelineSemiSync(
            model, optimizer, device, execute_all_batches=True, start_batch=max(0, start_batch - 1)
        )
    if config.staleness_limit is not None:
        start_batch = config.start_batch
    return TrainPipelineFineGrained(
        model,
        optimizer,
        device,
        execute_all_batches=True,
        staleness=config.staleness,
        start_batch=start_batch,
        staleness_limit=config.staleness_limit,
    )


def give_back(pipeline: Pipeline) -> None:
    """Makes the model an ordinary one after the last batch of an iterator; the tables hold all updates then."""
    if isinstance(pipeline, TrainPipelineSparseDist):
        pipeline.detach()
    else:
        pipeline.reset()  # TrainPipelineBase takes no second iterator without it


def choice_of(pipeline: Pipeline) -> StalenessChoice | None:
    """alpha of each table and which are stale, once a pipeline that chooses knows it."""
    return pipeline.staleness_choice if isinstance(pipeline, TrainPipelineFineGrained) else None


def close(pipeline: Pipeline) -> None:
    """Ends the threads of a pipeline that has some."""
    if isinstance(pipeline, TrainPipelineFineGrained):
        pipeline.close()
