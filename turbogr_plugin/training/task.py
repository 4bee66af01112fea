"""What TorchRec's pipelines train: the model and the scale of its loss.

The pipelines trace the forward down to the sharded tables, so it stays free of control flow on tensors; the parts it
calls are leaves.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from turbogr_plugin.data.batch import SequenceBatch
from turbogr_plugin.models.retrieval import SequentialRetriever
from turbogr_plugin.training.gradient_scale import DivideByGlobalCount, GlobalCount


class _TargetCount(GlobalCount):
    def forward(self, batch: SequenceBatch) -> tuple[Tensor, dist.Work | None]:  # type: ignore[override]
        """The global count of the batch's targets, being summed."""
        return super().forward(batch.query_index.numel(), batch.query_index)


class RetrievalTask(nn.Module):
    """A retriever with the globally normalised loss: (loss, detached loss) in training, query vectors in evaluation."""

    def __init__(self, model: SequentialRetriever, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.model = model
        self.count = _TargetCount(group)
        self.divide = DivideByGlobalCount()

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor] | Tensor:
        """See the class; the loss is this rank's share: the shares of all ranks add up to the loss of the step."""
        if not self.training:
            queries: Tensor = self.model(batch)
            return queries
        pending = self.count(batch)
        loss = self.divide(self.model(batch), pending)
        return loss, loss.detach()
