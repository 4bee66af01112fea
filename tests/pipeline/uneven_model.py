"""A model whose loss is the mean over the samples of all ranks, for batches of any size, none included.

Each rank's loss is its sum over the global count, times the number of ranks, since TorchRec and DDP take the mean over
ranks: every parameter gets the gradient of the one global loss, and a rank without a sample adds nothing. A batch of
no sample still has one row without an id (TorchRec's collections want a stride), as the batches of data/ have.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.npu.ranks import forget_groups
from tests.pipeline.small_model import Batch, sum_of_rows
from tests.sharding.hierarchical_models import local_rows
from tests.sharding.lookup_runs import TheirBags
from turbogr_plugin.backend.collectives import timeout_of
from turbogr_plugin.sharding import HierarchicalModelParallel, HierarchicalShardingPlan
from turbogr_plugin.sharding.jagged_sharders import JaggedEmbeddingCollectionSharder

BAGS = {"bag_a": 40, "bag_b": 56}
SEQUENCES = {"sequence": 48}
ROWS = BAGS | SEQUENCES
DIM, FLOATS = 8, 3
CPU, META = torch.device("cpu"), torch.device("meta")


@torch.fx.wrap
def rows_of(found: Tensor, labels: Tensor) -> Tensor:
    """Without the row that stands in for no sample."""
    return found[: labels.numel()]


@torch.fx.wrap
def share_of_the_mean(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of the mean over all samples, times the number of ranks, and the part itself."""
    count = torch.tensor(float(labels.numel()), device=labels.device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        dist.all_reduce(count)
    total = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    loss = total * ranks / count.clamp(min=1)
    return loss, loss.detach() / ranks


class Model(nn.Module):
    """Logistic regression over the embeddings of `kinds` ("bags", "sequences") and the dense features."""

    def __init__(self, kinds: Sequence[str], dtype: torch.dtype = torch.float32, device: torch.device = META) -> None:
        super().__init__()
        self.bags = self.sequences = None
        if "bags" in kinds:
            self.bags = EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
                    for name, rows in BAGS.items()
                ],
                device=device,
            ).to(dtype)
        if "sequences" in kinds:
            self.sequences = EmbeddingCollection(
                [
                    EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
                    for name, rows in SEQUENCES.items()
                ],
                device=device,
            ).to(dtype)
        width = DIM * (2 * ("bags" in kinds) + ("sequences" in kinds)) + FLOATS
        self.logit = nn.Linear(width, 1, dtype=dtype)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        parts = [batch.floats]
        if self.bags is not None:
            pooled = self.bags(batch.ids)
            parts += [rows_of(pooled["bag_a"], batch.label), rows_of(pooled["bag_b"], batch.label)]
        if self.sequences is not None:
            sequence = self.sequences(batch.ids)["sequence"]
            parts += [rows_of(sum_of_rows(sequence.values(), sequence.lengths()), batch.label)]
        return share_of_the_mean(self.logit(torch.cat(parts, dim=1)).squeeze(1), batch.label)


class DenseOnWorld(DefaultDataParallelWrapper):
    """Wraps the dense part on the default group, whatever group the tables have."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        super().wrap(dmp, ShardingEnv.from_process_group(dist.group.WORLD), device)


def start_value(name: str, size: Sequence[int]) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) - 0.5


def sharded(kinds: Sequence[str], *, group: int | None = None, own_group: bool = True) -> DistributedModelParallel:
    """The model on all ranks: sequences by rows, bags by tables.

    TorchRec cannot train bags sharded by rows on batches of different sizes over gloo, whose all_gather takes equal
    sizes only.

    Args:
        kinds: see Model.
        group: ranks in a group of HierarchicalModelParallel; None: TorchRec's own class.
        own_group: whether the tables have a process group of their own (with groups of ranks they have).
    """
    forget_groups()
    model, ranks = Model(kinds), group or dist.get_world_size()
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    sharders: list[Any] = [
        TheirBags(fused_params=fused),
        JaggedEmbeddingCollectionSharder(fused_params=fused, use_index_dedup=True),
    ]
    modules = {}
    for place, sharder in zip(("bags", "sequences"), sharders, strict=True):
        if place not in kinds:
            continue
        module = model.get_submodule(place)
        rules = {
            name: table_wise(rank=at % ranks, compute_kernel="fused")
            if place == "bags"
            else row_wise(compute_kernel="fused")
            for at, name in enumerate(sharder.shardable_parameters(module))
        }
        modules[place] = construct_module_sharding_plan(
            module, rules, sharder, local_size=ranks, world_size=ranks, device_type="cpu"
        )
    plan = HierarchicalShardingPlan(modules, group_size=ranks, world_size=dist.get_world_size())  # type: ignore[arg-type]
    made: Any
    if group is not None:
        made = HierarchicalModelParallel(model, plan=plan, sharders=sharders, device=CPU)
    else:
        own = {
            "env": ShardingEnv.from_process_group(dist.new_group(timeout=timeout_of(dist.group.WORLD))),
            "data_parallel_wrapper": DenseOnWorld(),
        }
        made = DistributedModelParallel(model, plan=plan, sharders=sharders, device=CPU, **(own if own_group else {}))
    with torch.no_grad():
        for name, ((row, column), weights) in local_rows(made):
            whole = start_value(name, (ROWS[name], DIM))
            weights.copy_(whole[row : row + weights.size(0), column : column + weights.size(1)])
        for name, value in made.module.logit.named_parameters():
            value.copy_(start_value(name, value.shape))
    return made  # type: ignore[no-any-return]


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.5)


def batch(size: int, *, rank: int, step: int) -> Batch:
    """A batch of `size` samples, some without ids; of 0: one row without an id and no label."""
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    lengths = torch.randint(0, 4, (len(ROWS), max(size, 1)), generator=generator)
    if size == 0:
        lengths.zero_()
    values = [
        torch.randint(rows, (count,), generator=generator)
        for rows, count in zip(ROWS.values(), lengths.sum(1).tolist(), strict=True)
    ]
    ids = KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=lengths.view(-1))
    floats = torch.randn(size, FLOATS, generator=generator)
    return Batch(floats, ids, torch.randint(2, (size,), generator=generator).float())


def batches(sizes: Sequence[int], *, rank: int) -> list[Batch]:
    return [batch(size, rank=rank, step=step) for step, size in enumerate(sizes)]


def empty_from(last: Batch) -> Batch:
    """What `empty_batch` of the pipeline is: no sample, of the kind of the last batch."""
    assert isinstance(last, Batch)
    keys = last.ids.keys()
    none = last.ids.values().new_zeros(0)
    ids = KeyedJaggedTensor(keys, none, lengths=last.ids.lengths().new_zeros(len(keys)))
    return dataclasses.replace(last, floats=last.floats[:0], ids=ids, label=last.label[:0])


def weights_of(model: nn.Module) -> dict[str, Any]:
    """This rank's rows and dense values, as nested lists: equal where they are to the last bit."""
    if hasattr(model, "finish"):
        model.finish()
    found = {f"{name}[{row}:, {column}:]": rows.tolist() for name, ((row, column), rows) in local_rows(model)}
    found |= {name: value.tolist() for name, value in model.module.logit.named_parameters()}
    return found


def plain(model: DistributedModelParallel, source: Sequence[Batch]) -> list[float]:
    """This rank's shares of the losses, without a pipeline."""
    optimizer, shares = dense_optimizer(model), []
    for each in source:
        optimizer.zero_grad()
        loss, share = model(each)
        loss.backward()
        optimizer.step()
        shares.append(float(share))
    return shares


def of_one_process(kinds: Sequence[str], sizes: Sequence[Sequence[int]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of plain SGD in float64 on the batches of all ranks put together.

    Args:
        kinds: see Model.
        sizes: [rank][step], equally many steps.
    """
    model = Model(kinds, torch.float64, CPU)
    tables = {name: value for name, value in model.named_parameters() if "embedding" in name}
    with torch.no_grad():
        for name, value in tables.items():
            value.copy_(start_value(name.split(".")[-2], value.shape))
        for name, value in model.logit.named_parameters():
            value.copy_(start_value(name, value.shape))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(len(sizes[0])):
        optimizer.zero_grad()
        found = [batch(of_rank[step], rank=rank, step=step) for rank, of_rank in enumerate(sizes)]
        count = sum(of_rank[step] for of_rank in sizes)
        if count:
            terms = [model(Batch(each.floats.double(), each.ids, each.label.double()))[0] for each in found]
            # each term is the mean of its rank
            total = sum(
                term * each.label.numel() for term, each in zip(terms, found, strict=True) if each.label.numel()
            )
            loss = total / count
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            losses.append(float(loss.detach()))
        else:
            losses.append(0.0)
    weights = {name.split(".")[-2]: value.detach() for name, value in tables.items()}
    weights |= {name: value.detach() for name, value in model.logit.named_parameters()}
    return losses, weights
