"""What TorchRec's pipelines train: the model and the scale of its loss.

The pipelines trace the forward down to the sharded tables, so it stays free of control flow on tensors; the parts it
calls are leaves.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from turbogr_plugin.data.batch import SequenceBatch
from turbogr_plugin.models.retrieval import SequentialRetriever
from turbogr_plugin.training.gradient_scale import GlobalCount, GlobalMean, LossReduction


class _StartCount(nn.Module):
    """Leaf of the traced forward: starts the sum that scales the loss."""

    def __init__(self, group: dist.ProcessGroup, mean: GlobalMean) -> None:
        super().__init__()
        self._count = GlobalCount(group)
        self._mean = mean

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, dist.Work | None]:
        counted = self._mean.counted(targets=batch.query_index.numel(), samples=batch.sample_ids.numel())
        return self._count(counted, batch.query_index)


class _Scale(nn.Module):
    """Leaf of the traced forward: waits for the sum and scales the loss."""

    def __init__(self, mean: GlobalMean) -> None:
        super().__init__()
        self._mean = mean

    def forward(self, loss_sum: Tensor, batch: SequenceBatch, pending: tuple[Tensor, dist.Work | None]) -> Tensor:
        return self._mean(loss_sum, batch.query_index.numel(), batch.sample_ids.numel(), pending)


class RetrievalTask(nn.Module):
    """A retriever with the globally normalised loss: (loss, detached loss) in training, query vectors in evaluation."""

    def __init__(
        self, model: SequentialRetriever, group: dist.ProcessGroup, *, loss_reduction: LossReduction = "target"
    ) -> None:
        """Args:
        model: gives the sum of the loss over this rank's targets.
        group: ranks that share the batch.
        loss_reduction: see gradient_scale.GlobalMean.
        """
        super().__init__()
        self.model = model
        mean = GlobalMean(loss_reduction)
        self.start_count = _StartCount(group, mean)
        self.scale = _Scale(mean)

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor] | Tensor:
        """See the class; the loss is this rank's share: the shares of all ranks add up to the loss of the step."""
        if not self.training:
            queries: Tensor = self.model(batch)
            return queries
        pending = self.start_count(batch)
        loss = self.scale(self.model(batch), batch, pending)
        return loss, loss.detach()
