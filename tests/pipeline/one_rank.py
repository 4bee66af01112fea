"""Models of two bags and a sequence under a pipeline on one rank; see the fixtures of conftest.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.pipeline.fine_grained_models import CPU, batches, build, dense_optimizer, local_values
from turbogr_plugin.pipeline import TrainPipelineFineGrained

STEPS = 6


def source_of(steps: int = STEPS, rank: int = 0) -> list[Any]:
    """The batches of a rank."""
    return batches("small", steps, rank)


class Run:
    """A model under a pipeline."""

    def __init__(self, kind: Any = TrainPipelineFineGrained, *, model: Any = None, **options: Any) -> None:
        self.model = build("small", own_group=False) if model is None else model
        self.pipeline = kind(self.model, dense_optimizer(self.model), CPU, **options)

    def losses(self, source: Any, steps: int = 1000) -> list[float]:
        """Of some calls of progress, or of all until the end."""
        found = []
        for _ in range(steps):
            try:
                found.append(float(self.pipeline.progress(source)))
            except StopIteration:
                break
        return found

    def values(self) -> dict[str, Tensor]:
        """Of tables and dense part."""
        if isinstance(self.pipeline, TrainPipelineFineGrained):
            self.pipeline.finish()
        return local_values(self.model)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether the values are equal to the last bit."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
