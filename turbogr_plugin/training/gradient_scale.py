"""The one place that sets the scale of the loss and of every gradient.

The loss of a step is the sum over all valid targets of all ranks divided by their global count. Each rank computes
its own sum over that count, and gradients are summed over ranks: those of tables because TorchRec's division by the
world size is switched off, those of dense parameters because DDP's averaging is replaced by a sum. Every parameter
then receives exactly the gradient of the one global loss, however samples are spread; a rank without a target adds
zero.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations as objects
# (torch/nn/parallel/distributed.py, _check_comm_hook).

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv


def _sum_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None

    def result(future: torch.futures.Future[Any]) -> Tensor:
        tensor: Tensor = future.value()[0]
        return tensor

    return work.get_future().then(result)


class SumDataParallelWrapper(DefaultDataParallelWrapper):
    """TorchRec's wrapper of the dense part, with gradients summed over ranks instead of averaged.

    Creating it also switches TorchRec's division of table gradients by the world size off, for the whole process.

    Args:
        group: of the dense part; None: that of the tables. With a group of their own the tables' collectives can be
            issued by another thread than those of the dense part.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        set_gradient_division(False)
        self._group = group

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wraps the dense part in DDP and registers the sum; see the base class."""
        dense = env if self._group is None else ShardingEnv.from_process_group(self._group)
        super().wrap(dmp, dense, device)
        wrapped = dmp._dmp_wrapped_module
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(dense.process_group, _sum_hook)


LossReduction = Literal["target", "sample"]


class GlobalCount(nn.Module):
    """Starts the sum of the ranks' counts; `GlobalMean` waits for it after the forward pass."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, count: int, like: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Starts the sum.

        Args:
            count: of this rank.
            like: any tensor on the device of the sum.

        Returns:
            int64 scalar, the sum once the work beside it is done (None: it is done).
        """
        total = torch.full((), count, dtype=torch.int64, device=like.device)  # filled there: the host does not wait
        if self._group.size() == 1:
            return total, None
        return total, dist.all_reduce(total, group=self._group, async_op=True)


class GlobalMean(nn.Module):
    """Turns this rank's sum of the loss into its share of the global mean: the shares of all ranks add up to it.

    "target" is the mean over all targets. "sample" is the paper's weighting (section 4.1.3): the mean over a rank's
    targets, weighted by the rank's share of the samples; it depends on how samples are spread over ranks.
    """

    def __init__(self, reduction: LossReduction) -> None:
        super().__init__()
        self._reduction = reduction

    def counted(self, *, targets: int, samples: int) -> int:
        """Which of the two counts of this rank is summed over ranks."""
        return targets if self._reduction == "target" else samples

    def forward(self, loss_sum: Tensor, targets: int, samples: int, pending: tuple[Tensor, dist.Work | None]) -> Tensor:
        """Scales the loss.

        Args:
            loss_sum: scalar, over this rank's targets.
            targets: of this rank.
            samples: of this rank.
            pending: what `GlobalCount` returned for `counted`.

        Returns:
            scalar, 0 for a rank without targets.
        """
        total, work = pending
        if work is not None:
            work.wait()
        share = loss_sum / total.clamp(min=1).to(loss_sum.dtype)
        return share if self._reduction == "target" else share * (samples / max(targets, 1))
