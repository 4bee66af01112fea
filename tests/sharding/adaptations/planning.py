"""A model of bags and sequences to plan, and plans as plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

import turbogr_plugin

turbogr_plugin.register()

BAGS = {"b0": (1_000_000, 64), "b1": (400, 16)}
SEQUENCES = {"s0": (200_000, 64)}


class Tables(nn.Module):
    """Two tables of bags, one of sequences and a dense layer, all on meta."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.bags = EmbeddingBagCollection(
            device=meta,
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                for name, (rows, dim) in BAGS.items()
            ],
        )
        self.sequences = EmbeddingCollection(
            device=meta,
            tables=[
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                for name, (rows, dim) in SEQUENCES.items()
            ],
        )
        self.over = nn.Linear(112, 1024, device=meta)


def constraints(**same: Any) -> dict[str, ParameterConstraints]:
    """The same constraints for every table."""
    return {name: ParameterConstraints(**same) for name in (*BAGS, *SEQUENCES)}


def plan(compute_device: str, *, world_size: int = 8, local_world_size: int = 4, **rest: Any) -> Any:
    """TorchRec's plan for `Tables` on `world_size` devices, four to a host.

    Args:
        compute_device: of the topology.
        world_size: ranks in all.
        local_world_size: ranks of a host.
        rest: `constraints` for the planner, anything else for the topology.
    """
    wanted = rest.pop("constraints", None)
    topology = Topology(world_size=world_size, compute_device=compute_device, local_world_size=local_world_size, **rest)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=wanted, batch_size=512, debug=False)
    return planner.plan(Tables(), get_default_sharders())


def as_values(found: Any) -> dict[str, dict[str, Any]]:
    """A plan as plain values by table: type, kernel, ranks, sizes, offsets and placements of the shards."""
    values = {}
    for tables in found.plan.values():
        for table, sharding in tables.items():
            shards = sharding.sharding_spec.shards if sharding.sharding_spec is not None else []
            values[table] = {
                "type": sharding.sharding_type,
                "kernel": sharding.compute_kernel,
                "ranks": sharding.ranks,
                "shards": [(shard.shard_sizes, shard.shard_offsets) for shard in shards],
                "places": [(shard.placement.rank(), shard.placement.device().index) for shard in shards],
                "devices": sorted({shard.placement.device().type for shard in shards}),
            }
    return values
