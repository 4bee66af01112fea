"""What TrainPipelineFineGrained knows of a batch in flight.

Left out: the batches themselves as a queue of the pipeline (TorchRec's `batches`): a context holds its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torchrec.distributed.train_pipeline.pipeline_context import EmbeddingTrainPipelineContext

from turbogr_plugin.pipeline.lanes import StageRun


class KeptGradient:
    """An output of a sharded module on its way through the dense part: where its graph begins, and the gradient.

    Not the output itself: the model may write to it, which a tensor would not survive as the root of a graph.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.edge: GradientEdge = get_gradient_edge(tensor)
        self.gradient: Tensor | None = None
        self._shape, self._options = tensor.shape, {"dtype": tensor.dtype, "device": tensor.device}

    def zeros(self) -> Tensor:
        """A gradient for an output that has got none."""
        return torch.zeros(self._shape, **self._options)  # type: ignore[call-overload]


class LookedUp(NamedTuple):
    """What tells whether a lookup misses more updates than it may."""

    loads: int
    """How often weights had been loaded into the model."""
    updates: int
    """How many batches had been through the dense part in training."""
    ahead: int
    """How many batches of its iterator were before it."""


@dataclass
class FineGrainedContext(EmbeddingTrainPipelineContext):
    """A batch in flight; its own fields are set by one stage each and read by stages that wait for it."""

    batch: Any = None
    """On the device; None before the stage load, and where the iterator has ended."""
    exhausted: bool = False
    """Whether the ranks have agreed that there is no such batch."""
    agreed: bool = False
    failure: Exception | None = None
    """What the iterator raised."""
    dist_inputs: dict[str, Any] = field(default_factory=dict)
    """Ids of this rank's tables, by name of the module."""
    outputs: dict[str, Any] = field(default_factory=dict)
    """Looked-up embeddings: TorchRec's awaitables, which have been waited for, by name of the module."""
    exact: frozenset[str] = frozenset()
    """Modules that the stage lookup leaves to lookup_exact."""
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By stage of a lookup: learning rates of the tables for the update that comes of it; see `table_rates`."""
    counted: bool = False
    """Whether its ids are counted for the choice of tables."""
    looked_up: LookedUp | None = None
    """When its lookup was handed out; None before."""
    has_graph: bool = False
    """Whether the lookup can be differentiated."""
    gradients: list[KeptGradient] = field(default_factory=list)
    losses: Tensor | None = None
    output: Any = None
    """What the model gave besides the losses."""
    source: Any = None
    """The BatchSource that it is of."""
    training: bool = True
    """Whether the model was in training mode when it was made."""
    runs: dict[str, StageRun] = field(default_factory=dict)
    """Stages that have been handed out."""

    @property
    def number(self) -> int:
        """TorchRec's index, which every batch in flight has."""
        assert self.index is not None
        return self.index


class ContextOfThread(threading.local):
    """The context of the batch that this thread works on.

    TorchRec's pipelined post-processing has one context at a time. Here the sparse lane processes one batch while the
    dense part reads the results of another: each thread has to see its own.
    """

    context: FineGrainedContext | None = None

    @property
    def postproc_fwd_results(self) -> dict[str, Any]:
        """As TorchRec's contexts have them."""
        assert self.context is not None
        return self.context.postproc_fwd_results

    @property
    def index(self) -> int | None:
        """As TorchRec's contexts have it."""
        assert self.context is not None
        return self.context.index
