"""A small sharded collection of TorchRec on our lookup, and a batch for it: what bytes.py counts a step of."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

from turbogr_plugin.sharding.jagged_sharders import (
    JaggedEmbeddingBagCollectionSharder,
    JaggedEmbeddingCollectionSharder,
)

_ROWS, _BATCH, _LENGTH = 5_000, 64, 20
_SIZE = {"num_embeddings": _ROWS, "embedding_dim": 128}
_TABLES = {"t0": ["f0"], "t1": ["f1", "f2"]}


def collection(kind: str, sharding: str, output: str, device: torch.device) -> DistributedModelParallel:
    """Two tables, the second with two features, sharded over all ranks of the default group.

    Args:
        kind: "sequence" (EmbeddingCollection) or "pooled" (EmbeddingBagCollection).
        sharding: row_wise, table_wise or column_wise.
        output: "fp32", "fp16" or "bf16": dtype of the returned rows.
        device: of the tables.
    """
    fused_params = {"output_dtype": SparseType(output), "learning_rate": 0.1}
    meta = torch.device("meta")
    tables: nn.Module
    sharder: JaggedEmbeddingCollectionSharder | JaggedEmbeddingBagCollectionSharder
    if kind == "sequence":
        sequences = [EmbeddingConfig(name=name, feature_names=of, **_SIZE) for name, of in _TABLES.items()]
        tables = EmbeddingCollection(sequences, device=meta)
        sharder = JaggedEmbeddingCollectionSharder(fused_params)
    else:
        bags = [EmbeddingBagConfig(name=name, feature_names=of, **_SIZE) for name, of in _TABLES.items()]
        tables = EmbeddingBagCollection(bags, device=meta)
        sharder = JaggedEmbeddingBagCollectionSharder(fused_params)
    ranks = dist.get_world_size()
    rules = {
        "row_wise": lambda rank: row_wise(compute_kernel="fused"),
        "table_wise": lambda rank: table_wise(rank=rank, compute_kernel="fused"),
        "column_wise": lambda rank: column_wise(ranks=list(range(ranks)), compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        tables,
        {name: rules[sharding](number % ranks) for number, name in enumerate(_TABLES)},
        sharder,  # type: ignore[arg-type]
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
    return DistributedModelParallel(
        tables,
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],  # type: ignore[list-item]
    )


def batch(device: torch.device) -> KeyedJaggedTensor:
    """This rank's batch."""
    features = [feature for of in _TABLES.values() for feature in of]
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    lengths = torch.randint(0, 2 * _LENGTH, (_BATCH * len(features),), generator=generator)
    ids = torch.randint(0, _ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(features, ids, lengths=lengths).to(device)
