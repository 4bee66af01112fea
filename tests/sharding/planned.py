"""Models of a few tables on meta, and planners for them, shared by the tests of the planner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from turbogr_plugin.sharding.hierarchical_planner import HierarchicalShardingPlanner

SHARDERS = [EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()]


class Tables(nn.Module):
    """Sequences and bags; each table has one feature, called f_ and its name.

    Args:
        sequences: (rows, columns) by name.
        bags: likewise.
        dense: width of a linear layer; 0 is none.
    """

    def __init__(
        self,
        sequences: dict[str, tuple[int, int]] | None = None,
        bags: dict[str, tuple[int, int]] | None = None,
        dense: int = 0,
    ) -> None:
        super().__init__()
        meta = torch.device("meta")
        if sequences:
            self.sequences = EmbeddingCollection(
                device=meta,
                tables=[
                    EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                    for name, (rows, dim) in sequences.items()
                ],
            )
        if bags:
            self.bags = EmbeddingBagCollection(
                device=meta,
                tables=[
                    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                    for name, (rows, dim) in bags.items()
                ],
            )
        if dense:
            self.over = nn.Linear(dense, dense, device=meta)


def planner(topology: Any, **arguments: Any) -> HierarchicalShardingPlanner:
    """A silent planner that sets nothing aside, unless told otherwise."""
    values = {
        "batch_size": 64,
        "storage_reservation": FixedPercentageStorageReservation(0.0),
        "stats": [],
        "debug": False,
        **arguments,
    }
    return HierarchicalShardingPlanner(topology=topology, **values)


def shardings(plan: Any) -> dict[str, Any]:
    """ParameterSharding by table."""
    return {table: sharding for tables in plan.plan.values() for table, sharding in tables.items()}
