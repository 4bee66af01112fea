"""One training step of a lookup by ours and by fbgemm, split in forward and backward, on tables of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Timing
from turbogr_plugin.kernels.fused_optimizers import Settings
from turbogr_plugin.kernels.jagged_lookup import TableUpdate, jagged_lookup

LEARNING_RATE, EPS = 0.01, 1e-8


@dataclass
class Step:
    """A lookup that can go forward, and backward with a gradient of its output: row-wise Adagrad is fused in."""

    lookup: Callable[[], Tensor]
    tables: Callable[[], Tensor]
    """The weights [F * R, D]."""
    gradient: Tensor | None = None
    output: Tensor | None = field(default=None, repr=False)

    def forward(self) -> None:
        """Looks up."""
        self.output = self.lookup()

    def backward(self) -> None:
        """Updates the tables by a fixed random gradient of the output."""
        assert self.output is not None
        self.output.backward(self.gradient)

    def prepare(self) -> None:
        """Draws the gradient, for the shape that the output has."""
        output = self.lookup()
        self.gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)


def ours(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor,
    features: int,
    *,
    pooled: bool = False,
    implementation: str | None = None,
) -> Step:
    """Our lookup in tables with the given weights [F * R, D], which are copied."""
    weights = weights.clone()
    rows = [weights.shape[0] // features] * features
    state = torch.zeros(weights.shape[0])
    batch = (offsets.numel() - 1) // features
    arguments: dict[str, Any] = {"pooling": "sum", "bag_offsets": offsets} if pooled else {}
    settings = Settings(learning_rate=LEARNING_RATE, eps=EPS)

    def lookup() -> Tensor:
        update = TableUpdate(optimizer="rowwise_adagrad", states=(state,), settings=settings)
        found = jagged_lookup(
            *(weights, ids, None if pooled else offsets[::batch].contiguous()),
            rows=rows,
            dim=weights.shape[1],
            update=update,
            implementation=implementation,
            **arguments,
        )
        assert isinstance(found, Tensor)
        return found

    return Step(lookup, lambda: weights)


def fbgemm(ids: Tensor, offsets: Tensor, weights: Tensor, features: int, *, pooled: bool = False) -> Step:
    """fbgemm's table-batched lookup in tables with the given weights [F * R, D], which are copied.

    Without checks of bounds, which would only slow it down.
    """
    with _quietly():
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        height, width = weights.shape[0] // features, weights.shape[1]
        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(height, width, EmbeddingLocation.HOST, ComputeDevice.CPU)] * features,
            pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
    for table, values in zip(module.split_embedding_weights(), weights.chunk(features), strict=True):
        table.copy_(values)

    def lookup() -> Tensor:
        found: Tensor = module(ids, offsets)
        return found

    return Step(lookup, lambda: torch.cat(module.split_embedding_weights()))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without fbgemm's remarks on each table."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def take_turns(steps: Mapping[str, Step], *, rounds: int, warmup: int = 1) -> dict[str, tuple[Timing, Timing]]:
    """Times (forward, backward) of each step, one step after the other in every turn.

    Freeing the output is not timed: it belongs to neither pass.
    """
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for turn in range(warmup + rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step.forward()
            between = time.perf_counter()
            step.backward()
            ended = time.perf_counter()
            step.output = None
            if turn >= warmup:
                seconds[name][0].append(between - started)
                seconds[name][1].append(ended - between)
    return {name: (Timing.of(forward), Timing.of(backward)) for name, (forward, backward) in seconds.items()}
