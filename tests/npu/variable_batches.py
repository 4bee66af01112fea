"""Training on batches whose features have sizes of their own on each rank, sharded by TorchRec and without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROWS, DIM, STEPS = 19, 8, 3
RATE = 1 / 16
FEATURES = ("a", "b", "c")
#: Features of each table.
TABLES: Mapping[str, tuple[str, ...]] = {"t0": ("a", "b"), "t1": ("c",)}


def weights(table: int) -> Tensor:
    """[ROWS, DIM] float64, small dyadic numbers."""
    generator = torch.Generator().manual_seed(table)
    return torch.randint(-8, 9, (ROWS, DIM), generator=generator).double() / 16


def batch(rank: int, step: int) -> tuple[dict[str, list[list[int]]], dict[str, list[int]]]:
    """Ids of the rows of each feature, as many as each has on this rank, and the row that each sample takes."""
    generator = torch.Generator().manual_seed(100 * rank + step)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = 1 + rank + step
    sizes = {feature: draw(1, 3 + 2 * rank) for feature in FEATURES}
    ids = {
        feature: [[draw(0, ROWS) for _ in range(draw(0, 4))] for _ in range(size)] for feature, size in sizes.items()
    }
    return ids, {feature: [draw(0, size) for _ in range(samples)] for feature, size in sizes.items()}


def train(sharding: str, device_type: str) -> dict[str, Any]:
    """Trains sharded bags on the ranks of the world.

    Returns:
        The pooled embeddings by step, and the rows of each table that this rank holds, from which row on.
    """
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    from tests.npu.parallel import device_of, parallel

    device = device_of(device_type)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=list(features))
        for name, features in TABLES.items()
    ]
    bags = EmbeddingBagCollection(configs, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": RATE})
    model = parallel(bags, device, dict.fromkeys(TABLES, sharding), columns=DIM)
    shards = {
        name: shard
        for name, table in zip(TABLES, model.state_dict().values(), strict=True)
        for shard in table.local_shards()
    }
    for number, name in enumerate(TABLES):
        if name in shards:
            begin, _ = shards[name].metadata.shard_offsets
            shards[name].tensor.copy_(weights(number)[begin : begin + len(shards[name].tensor)])
    pooled = []
    for step in range(STEPS):
        ids, samples = batch(dist.get_rank(), step)
        rows = [row for feature in ids.values() for row in feature]
        features = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.tensor([id_ for row in rows for id_ in row], dtype=torch.int64),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
            stride_per_key_per_rank=[[len(feature)] for feature in ids.values()],
            inverse_indices=(list(FEATURES), torch.tensor(list(samples.values()), dtype=torch.int64)),
        )
        found = model(features.to(device)).values()
        (found**2).sum().backward()
        pooled.append(found.tolist())
    held = {name: [shard.metadata.shard_offsets[0], shard.tensor.tolist()] for name, shard in shards.items()}
    return {"pooled": pooled, "held": held}


def train_whole(ranks: int) -> tuple[list[list[list[list[float]]]], dict[str, list[list[float]]]]:
    """The same without TorchRec, in float64: pooled embeddings by rank and step, and the tables."""
    tables = {name: weights(number).requires_grad_() for number, name in enumerate(TABLES)}
    table_of = {feature: tables[name] for name, features in TABLES.items() for feature in features}
    pooled: list[list[list[list[float]]]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(ranks):
            ids, samples = batch(rank, step)
            parts = [
                torch.stack([table_of[feature][row].sum(0) for row in ids[feature]])[samples[feature]]
                for feature in FEATURES
            ]
            found = torch.cat(parts, 1)
            pooled[rank].append(found.tolist())
            loss = loss + (found**2).sum() / ranks  # TorchRec divides by the number of ranks
        gradients = torch.autograd.grad(loss, list(tables.values()))
        with torch.no_grad():
            for table, gradient in zip(tables.values(), gradients, strict=True):
                table -= RATE * gradient
    return pooled, {name: table.tolist() for name, table in tables.items()}
