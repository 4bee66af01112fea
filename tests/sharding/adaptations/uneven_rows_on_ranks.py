"""Row-wise tables with a given cut on several ranks, for test_uneven_row_ranges.py; see tests/npu/ranks.py."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from tests.npu.ranks import forget_groups
from tests.stock import without
from turbogr_plugin.sharding.adaptations import uneven_row_ranges

ROWS, DIM, BATCH = 24, 4, 3
TABLES = {"t0": ["f0"], "t1": ["f1", "f2"]}
FEATURES = [feature for names in TABLES.values() for feature in names]


class _Bags(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


class _Model(nn.Module):
    def __init__(self, pooled: bool) -> None:
        super().__init__()
        meta = torch.device("meta")
        given: list[dict[str, Any]] = [
            {"name": name, "num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": names}
            for name, names in TABLES.items()
        ]
        self.tables: nn.Module = (
            EmbeddingBagCollection(device=meta, tables=[EmbeddingBagConfig(**values) for values in given])
            if pooled
            else EmbeddingCollection(device=meta, tables=[EmbeddingConfig(**values) for values in given])
        )
        self.pooled = pooled

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.tables(features)
        if self.pooled:
            return torch.cat([found[feature] for feature in FEATURES])
        return torch.cat([found[feature].values() for feature in FEATURES])


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("npu", int(os.environ["LOCAL_RANK"]))


def _plan(cuts: dict[str, list[int]], device: torch.device) -> ShardingPlan:
    found = EmbeddingModuleShardingPlan()
    for table, edges in cuts.items():
        shards = [
            ShardMetadata(
                shard_offsets=[first, 0],
                shard_sizes=[last - first, DIM],
                # The pool runs four ranks as two hosts of two.
                placement=f"rank:{rank}/cpu" if device.type == "cpu" else f"rank:{rank}/npu:{rank % 2}",
            )
            for rank, (first, last) in enumerate(itertools.pairwise(edges))
        ]
        found[table] = ParameterSharding("row_wise", "fused", list(range(len(shards))), EnumerableShardingSpec(shards))
    return ShardingPlan({"tables": found})


def trained(device_type: str, pooled: bool, cuts: dict[str, list[int]], stock: bool = False) -> dict[str, Any]:
    """Three steps of SGD on tables whose element (row, column) begins as row + column / 8: sums are exact.

    Args:
        device_type: cpu or npu.
        pooled: bags or sequences.
        cuts: first rows of the ranks and the end, by table.
        stock: without the adaptation.

    Returns:
        what this rank read in each step, and its rows afterwards by table, with their first row.
    """
    if stock:
        with without(*uneven_row_ranges.ADAPTATIONS):
            return trained(device_type, pooled, cuts)
    device = _device(device_type)
    fused = {"learning_rate": 0.5, "optimizer": EmbOptimType.EXACT_SGD}
    sharder: Any = _Bags(fused) if pooled else EmbeddingCollectionSharder(fused)
    model = DistributedModelParallel(
        _Model(pooled), device=device, plan=_plan(cuts, device), sharders=[sharder], init_data_parallel=False
    )
    shards = {}
    for name, weight in model.state_dict().items():
        (shard,) = weight.local_shards()
        first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        values = torch.arange(first, first + rows)[:, None] + torch.arange(DIM)[None] / 8
        shard.tensor.copy_(values.to(shard.tensor))
        shards[name.split(".")[-2]] = (first, shard.tensor)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    read = []
    for _ in range(3):
        lengths = torch.randint(4, (len(FEATURES) * BATCH,), generator=generator)
        values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths).to(device)
        out = model(features)
        read.append(out.detach().cpu().tolist())
        (out * torch.arange(out.numel(), device=out.device).view_as(out) / 64).sum().backward()
    rows = {table: [first, tensor.detach().cpu().tolist()] for table, (first, tensor) in shards.items()}
    forget_groups()
    return {"read": read, "rows": rows}
