"""Sharded models for the tests of TrainPipelineFineGrained, their batches and what their tables hold; on ranks.

dlrm      TorchRec's DLRM: bags under a dense network
small     two bags and a sequence under one linear layer (small_model)
hstu      the retriever with an HSTU of two blocks: sequences
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.data.small_store import random_sequences, write_small_store
from tests.npu import models
from tests.npu.parallel import RowWiseBagSharder, device_of
from tests.npu.ranks import forget_groups
from tests.pipeline import small_model
from tests.sharding import hierarchical_models
from tests.sharding.hierarchical_models import local_rows
from turbogr_plugin.data.batch import SequenceBatch, collate_sequences
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.models.hstu import HSTUConfig
from turbogr_plugin.models.retrieval import LossConfig, SequentialRetriever
from turbogr_plugin.negatives.uniform import NegativesConfig
from turbogr_plugin.sharding import HierarchicalModelParallel, HierarchicalShardingPlan
from turbogr_plugin.training.task import RetrievalTask

CPU = torch.device("cpu")
ITEMS = 23
LEARNING_RATE = 0.1
#: Large, for Adagrad divides a row's gradient by its size, and with a small one the rounding of a small gradient would
#: reach the weight: float32 is compared with float64.
EPS = 1e-2
NEGATIVES = NegativesConfig(count=4, sharing="sequence")


class DenseOnWorld(DefaultDataParallelWrapper):
    """The dense part on all ranks by the default group, whatever group the tables have."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        super().wrap(dmp, ShardingEnv.from_process_group(dist.group.WORLD), device)


def module_of(name: str) -> nn.Module:
    """The model, not sharded."""
    torch.manual_seed(3)
    if name == "dlrm":
        return models.build("dlrm", CPU)
    if name == "small":
        return small_model.Model(CPU)
    assert name == "hstu", name
    retriever = SequentialRetriever(
        HSTUConfig(dim=8, blocks=2, heads=2, qk_dim=3, value_dim=5, max_length=10, time_buckets=9),
        num_items=ITEMS,
        loss=LossConfig(temperature=0.2),
        sharing=NEGATIVES.sharing,
        device=torch.device("meta"),
    )
    assert dist.group.WORLD is not None
    return RetrievalTask(retriever, dist.group.WORLD)


def build(
    name: str,
    *,
    own_group: bool = True,
    group: int | None = None,
    sharding: str = "row_wise",
    sync: str = "exact",
    device_type: str = "cpu",
) -> DistributedModelParallel:
    """The model on all ranks, its tables with row-wise Adagrad.

    Args:
        name: see the module.
        own_group: whether the tables have a process group of their own.
        group: ranks that hold the tables, in HierarchicalModelParallel; None: TorchRec's, over all ranks.
        sharding: of all tables.
        sync: of the groups, "exact" or "average".
        device_type: where it is trained.
    """
    forget_groups()
    device = device_of(device_type)
    module, world = module_of(name), dist.get_world_size()
    if sharding != "data_parallel":  # else the optimizer of the dense part updates them
        tables = [value for value in module.parameters() if value.is_meta]
        apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": LEARNING_RATE, "eps": EPS})
    sharders: list[Any] = [RowWiseBagSharder(), EmbeddingCollectionSharder()]
    ranks = group or world
    if group is None:
        kernel = "dense" if sharding == "data_parallel" else "fused"
        constraint = ParameterConstraints(sharding_types=[sharding], compute_kernels=[kernel])
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=ranks, local_world_size=min(ranks, 2), compute_device=device_type),
            batch_size=8,
            constraints=dict.fromkeys(("t0", "t1", "t2", *small_model.ROWS, "item_table"), constraint),
        )
        plan: Any = planner.collective_plan(module, sharders, dist.group.WORLD)
        env = ShardingEnv.from_process_group(dist.new_group() if own_group else dist.group.WORLD)
        model = DistributedModelParallel(
            module, env=env, device=device, plan=plan, sharders=sharders, data_parallel_wrapper=DenseOnWorld()
        )
    else:
        modules = {}
        for path, child in module.named_modules():
            for sharder in sharders:
                if type(child) is sharder.module_type:
                    rules = {table: row_wise(compute_kernel="fused") for table in sharder.shardable_parameters(child)}
                    modules[path] = construct_module_sharding_plan(
                        child, rules, sharder, local_size=min(ranks, 2), world_size=ranks, device_type=device_type
                    )
        plan = HierarchicalShardingPlan(modules, group_size=ranks, world_size=world, sync=sync)  # type: ignore[arg-type]
        model = HierarchicalModelParallel(module, device=device, plan=plan, sharders=sharders)
    with torch.no_grad():
        for table, ((row, column), weights) in local_rows(model):
            whole = initial_table(table)
            weights.copy_(whole[row : row + weights.size(0), column : column + weights.size(1)])
    return model


def initial_table(table: str) -> Tensor:
    """Its values at the start, [rows, dim]."""
    sizes = {
        **{config.name: (config.num_embeddings, config.embedding_dim) for config in models.bag_tables()},
        **{name: (rows, small_model.DIM) for name, rows in small_model.ROWS.items()},
        "item_table": (ITEMS, 8),
    }
    return torch.rand(sizes[table], generator=torch.Generator().manual_seed(len(table) + sizes[table][0])) - 0.5


def dense_optimizer(model: DistributedModelParallel) -> KeyedOptimizerWrapper:
    """SGD of what the backward pass does not update itself."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))


@functools.cache
def _store() -> InteractionStore:
    folder = Path(tempfile.mkdtemp())
    return write_small_store(folder / "store", [row * 3 for row in random_sequences(8, ITEMS, seed=2)], num_items=ITEMS)


def _sequences(step: int, rank: int) -> SequenceBatch:
    store, drawn = _store(), np.random.default_rng([step, rank])
    users = drawn.permutation(8)[: drawn.integers(1, 5)].astype(np.int64)
    starts = np.asarray(store.offsets)[users]
    lengths = np.minimum(drawn.integers(1, 10, len(users)), np.asarray(store.offsets)[users + 1] - starts)
    return collate_sequences(store, users, starts, starts + lengths, negatives=NEGATIVES, seed=5, epoch=0, step=step)


def batches(name: str, steps: int, rank: int | None = None) -> list[Any]:
    """Those of a rank, this one if none is given."""
    rank = dist.get_rank() if rank is None else rank
    if name == "hstu":
        return [_sequences(step, rank) for step in range(steps)]
    if name == "small":
        return small_model.batches(steps, rank=rank)
    return list(models.batches(name, steps=steps, rank=rank))


def local_values(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Copies of the tables' rows on this rank and of all dense parameters."""
    if isinstance(model, HierarchicalModelParallel):
        model.finish()
    found = {f"{table} {place}": rows.detach().cpu().clone() for table, (place, rows) in local_rows(model)}
    for key, value in in_backward_optimizer_filter(model.named_parameters()):
        found[key] = value.detach().cpu().clone()
    return found


def whole_tables(model: DistributedModelParallel) -> dict[str, Tensor]:
    """All rows, from whichever ranks hold them (replicas the last)."""
    mine = [(table, place, rows.detach().clone()) for table, (place, rows) in local_rows(model)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole: dict[str, Tensor] = {}
    for table, (row, column), rows in (each for of_rank in every for each in of_rank):
        held = whole.setdefault(table, torch.full_like(initial_table(table), float("nan")))
        held[row : row + rows.size(0), column : column + rows.size(1)] = rows
    return whole


@dataclass
class DyadicBatch(Pipelineable):
    """Ids of the model of tests/sharding."""

    bags: KeyedJaggedTensor
    sequences: KeyedJaggedTensor

    @classmethod
    def of(cls, step: int) -> DyadicBatch:
        """This rank's."""
        bags = hierarchical_models.batch_of(["f0", "f1", "f2", "f3"], step, CPU, True)
        return cls(bags, hierarchical_models.batch_of(["q0", "q1", "q2"], step + 500, CPU, True))

    def to(self, device: torch.device, non_blocking: bool = False) -> DyadicBatch:
        return DyadicBatch(
            self.bags.to(device, non_blocking=non_blocking), self.sequences.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> DyadicBatch:
        return DyadicBatch(self.bags.pin_memory(), self.sequences.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.bags.record_stream(stream)
        self.sequences.record_stream(stream)


@torch.fx.wrap
def _linear_loss(parts: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    return sum((hierarchical_models.factors(part) * part).sum() for part in parts) + 0 * weight.sum() + bias.sum()


class DyadicModel(hierarchical_models.Model):
    """The model of tests/sharding with a loss that is linear in its rows, as a pipeline wants it."""

    def forward(self, batch: DyadicBatch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        loss = _linear_loss(self.parts(batch.bags, batch.sequences), self.over.weight, self.over.bias)
        return loss, loss.detach()
