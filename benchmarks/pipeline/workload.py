"""What is trained: one item table, row-wise over two hosts, under a dense part that takes a given time.

The dense part is a layer of a few weights and `Compute`, which passes its input through and takes time: `WAIT` waits,
as a host does while an accelerator computes, and `PROCESSOR` multiplies matrices on this machine's cores. Its backward
takes twice as long as its forward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.profiler import record_function
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.streamable import Pipelineable

CPU = torch.device("cpu")
COMPUTE = "compute"
"""The range around what stands for the dense part."""
WAIT, PROCESSOR = "wait", "processor"
FEATURE = "item"
SAMPLES = 8
_SIDE = 192  # of the matrices of PROCESSOR: about a millisecond a product, or less


class _Passing(torch.autograd.Function):
    """The identity, which takes time in both directions."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Compute) -> Tensor:
        ctx.owner = owner
        owner.take(owner.seconds / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.owner.take(ctx.owner.seconds * 2 / 3)
        return gradient, None


class Compute(nn.Module):
    """Takes `seconds` per step, a third of them in forward."""

    def __init__(self, kind: str, seconds: float, product_seconds: float) -> None:
        """Args:
        kind: WAIT or PROCESSOR.
        seconds: per step.
        product_seconds: that one matrix product takes when nothing else runs: the work is fixed, not the time.
        """
        super().__init__()
        self.seconds = seconds
        self._kind, self._product_seconds = kind, product_seconds
        self._matrix = torch.randn(_SIDE, _SIDE)

    def take(self, seconds: float) -> None:
        """Takes the time."""
        with record_function(COMPUTE):
            if self._kind == WAIT:
                time.sleep(seconds)
            else:
                for _ in range(round(seconds / self._product_seconds)):
                    torch.mm(self._matrix, self._matrix)

    def forward(self, values: Tensor) -> Tensor:
        """Values of any shape, unchanged."""
        passed: Tensor = _Passing.apply(values, self)
        return passed


def product_seconds() -> float:
    """Seconds of one matrix product on the slower rank; collective."""
    matrix = torch.randn(_SIDE, _SIDE)
    torch.mm(matrix, matrix)
    started = time.perf_counter()
    for _ in range(300):
        torch.mm(matrix, matrix)
    slowest = torch.tensor((time.perf_counter() - started) / 300)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


class Model(nn.Module):
    """The mean square of a linear answer for each item, and the dense part's time."""

    def __init__(self, rows: int, dim: int, compute: Compute) -> None:
        super().__init__()
        config = EmbeddingConfig(name=FEATURE, num_embeddings=rows, embedding_dim=dim, feature_names=[FEATURE])
        self.tables = EmbeddingCollection(device=torch.device("meta"), tables=[config])
        self.dense = nn.Sequential(nn.Linear(dim, 1), compute)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the same to be shown."""
        loss = (self.dense(self.tables(batch.ids)[FEATURE].values()) - 1).square().mean()
        return loss, loss.detach()


@dataclass
class Batch(Pipelineable):
    """What TorchRec's pipelines want of a batch."""

    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy on the device."""
        return Batch(self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until the stream is done with it."""
        self.ids.record_stream(stream)

    def pin_memory(self) -> Batch:
        """This: the device is the host."""
        return self


def batches(count: int, *, lookups: int, rows: int, seed: int) -> Iterator[Batch]:
    """Batches of SAMPLES samples of one length, whose ids are skewed towards the first rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((SAMPLES,), lookups // SAMPLES)
    for _ in range(count):
        drawn = torch.rand(lookups, generator=generator, dtype=torch.float64) ** 3 * rows
        yield Batch(KeyedJaggedTensor(keys=[FEATURE], values=drawn.long(), lengths=lengths))


class _DenseOnWorld(DefaultDataParallelWrapper):
    """The dense part's group is not the tables': two threads may then issue collectives at once."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wraps what is not sharded in DDP on the default group."""
        assert dist.group.WORLD is not None
        super().wrap(dmp, ShardingEnv.from_process_group(dist.group.WORLD), device)


def sharded(rows: int, dim: int, compute: Compute, tables: dist.ProcessGroup) -> DistributedModelParallel:
    """The model with its table row-wise over all ranks, the same initial weights in every call.

    Args:
        rows: of the table.
        dim: of the table.
        compute: the dense part.
        tables: the group of the table's collectives.
    """
    torch.manual_seed(0)
    model, world = Model(rows, dim, compute), dist.get_world_size()
    sharder = EmbeddingCollectionSharder(
        fused_params={"learning_rate": 0.05, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    )
    plan = construct_module_sharding_plan(
        model.tables,
        {FEATURE: row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=1,
        world_size=world,
        device_type="cpu",
    )
    torch.manual_seed(1 + dist.get_rank())
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(tables),
        device=CPU,
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[sharder],
        data_parallel_wrapper=_DenseOnWorld(),
    )
