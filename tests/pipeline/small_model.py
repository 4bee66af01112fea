"""A model of two bags and one sequence with its batches, for TorchRec's pipelines on one rank or more, on any device.

Its values are drawn by name from a CPU generator: it starts the same everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import ShardingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

ROWS = {"bag_a": 40, "bag_b": 56, "sequence": 48}
DIM, FLOATS, BATCH = 16, 4, 8
META = torch.device("meta")


@dataclass
class Batch(Pipelineable):
    """What TorchRec's pipelines want of a batch."""

    floats: Tensor
    ids: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(*(value.to(device=device, non_blocking=non_blocking) for value in self._values()))

    def pin_memory(self) -> Batch:
        return Batch(*(value.pin_memory() for value in self._values()))

    def record_stream(self, stream: torch.Stream) -> None:
        for value in self._values():
            value.record_stream(stream)

    def _values(self) -> tuple[Any, ...]:
        return self.floats, self.ids, self.label


@torch.fx.wrap
def sum_of_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums [B, D] of the rows of values [T, D]; reads no length on the host."""
    rows = lengths.numel()
    row = torch.repeat_interleave(torch.arange(rows, device=values.device), lengths, output_size=values.size(0))
    return values.new_zeros(rows, values.size(1)).index_add(0, row, values)


class Model(nn.Module):
    """Loss of a logistic regression over two bags, one sequence and the dense features."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        bags = ("bag_a", "bag_b")
        self.bags = EmbeddingBagCollection(
            device=META,
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS[name], feature_names=[name])
                for name in bags
            ],
        )
        self.sequences = EmbeddingCollection(
            device=META,
            tables=[
                EmbeddingConfig(
                    name="sequence", embedding_dim=DIM, num_embeddings=ROWS["sequence"], feature_names=["sequence"]
                )
            ],
        )
        self.logit = nn.Linear(3 * DIM + FLOATS, 1, device=device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.ids)
        sequence = self.sequences(batch.ids)["sequence"]
        parts = [pooled["bag_a"], pooled["bag_b"], sum_of_rows(sequence.values(), sequence.lengths()), batch.floats]
        logits = self.logit(torch.cat(parts, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, loss.detach()


def batches(count: int, *, rank: int = 0, pin: bool = False) -> list[Batch]:
    """Batches of [BATCH] samples; some rows have no value."""
    generator = torch.Generator().manual_seed(100 + rank)

    def integers(high: int, size: int) -> Tensor:
        return torch.randint(high, (size,), generator=generator)

    made = []
    for _ in range(count):
        lengths = integers(4, len(ROWS) * BATCH)
        counts = lengths.view(len(ROWS), BATCH).sum(1).tolist()
        values = torch.cat([integers(rows, size) for rows, size in zip(ROWS.values(), counts, strict=True)])
        ids = KeyedJaggedTensor(keys=list(ROWS), values=values, lengths=lengths)
        floats = torch.randn(BATCH, FLOATS, generator=generator)
        made.append(Batch(floats, ids, integers(2, BATCH).float()))
    return [batch.pin_memory() for batch in made] if pin else made


class _AnySharding(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which refuses to shard by rows on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]


def sharded(device: torch.device, sharding: str = "row_wise", registry: Any = None) -> DistributedModelParallel:
    """The model on the default group, tables updated in backward.

    Args:
        device: of this rank.
        sharding: row_wise, table_wise (tables dealt out to the ranks) or column_wise (two columns per table).
        registry: codecs of the communication.
    """
    model, ranks = Model(device), dist.get_world_size()
    tables = [value for value in model.parameters() if value.is_meta]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1, "eps": 1e-6})
    options = {"qcomm_codecs_registry": registry}
    sharders = [_AnySharding(**options), EmbeddingCollectionSharder(**options)]
    plan = ShardingPlan(plan={})
    for place, sharder in zip(("bags", "sequences"), sharders, strict=True):
        module = model.get_submodule(place)
        rules = {
            name: {
                "row_wise": row_wise,
                "table_wise": lambda at=at: table_wise(rank=at % ranks),
                "column_wise": lambda: column_wise(ranks=[0, ranks - 1]),
            }[sharding]()
            for at, name in enumerate(sharder.shardable_parameters(module))
        }
        plan.plan[place] = construct_module_sharding_plan(
            module, rules, sharder=sharder, local_size=ranks, world_size=ranks, device_type=device.type
        )
    return started(DistributedModelParallel(model, device=device, plan=plan, sharders=sharders))


def started(model: DistributedModelParallel) -> DistributedModelParallel:
    """Sets all values by name."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            whole = torch.rand(value.size(), generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) - 0.5
            if not hasattr(value, "local_shards"):
                value.copy_(whole)
                continue
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    return model


def dense_optimizer(model: DistributedModelParallel) -> KeyedOptimizerWrapper:
    """SGD of what the backward does not update itself."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def plain_losses(model: DistributedModelParallel, source: list[Batch], device: torch.device) -> list[float]:
    """Losses of the loop that a pipeline stands for."""
    optimizer, losses = dense_optimizer(model), []
    for batch in source:
        optimizer.zero_grad()
        loss, shown = model(batch.to(device))
        loss.backward()
        optimizer.step()
        losses.append(shown)
    return torch.stack(losses).tolist()


def pipeline_losses(pipeline: Any, source: Iterable[Batch]) -> list[float]:
    """Losses of a pipeline, read at the end: reading one makes the host wait."""
    return torch.stack(list(outputs(pipeline, iter(source)))).tolist()


def outputs(pipeline: Any, source: Iterator[Any]) -> Iterator[Tensor]:
    """What progress gives until the end."""
    while True:
        try:
            shown = pipeline.progress(source)
        except StopIteration:
            return
        yield shown
