"""Fixtures of the tests of the pipeline that run on one rank, in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch import Tensor
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from tests.pipeline.fine_grained_models import CPU
from tests.pipeline.one_rank import Run, source_of
from tests.stock import ours
from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.pipeline.adaptations import ADAPTATIONS


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A process group, and garbage collections that take milliseconds."""
    ours(ADAPTATIONS)
    gc.freeze()  # what the libraries hold; else each collection takes seconds
    with process_group(CPU, timeout=timedelta(seconds=20)):
        yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def plain(world_of_one: None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values without a pipeline."""
    run = Run(TrainPipelineBase)
    return run.losses(iter(source_of())), run.values()
