"""A module made model-parallel as a TorchRec user does it: sharders, planner, DMP or DMPCollection.

The same for every device but for one class: TorchRec's sharder of bags refuses to shard by rows on CPU, where a
subclass allows it, as TorchRec's own tests do. On npu the stock sharders run, as an unchanged script would use them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import fbgemm_qcomm_codec
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingType

from tests.npu.cases import Grouping
from tests.npu.ranks import forget_groups

GROUP = 2  # ranks that shard a table together where DMPCollection groups them
BATCH = 6


class RowWiseBagSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, allowing on CPU what TorchRec's own tests run there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]


def device_of(device_type: str) -> torch.device:
    """The device of this rank, made current."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
    torch.npu.set_device(device)
    return device


def sharders(device: torch.device, communication: str = "fp32") -> list[ModuleSharder[Any]]:
    """The sharders of bags and of sequences; communication is the name of a CommType."""
    registry = None
    if communication != "fp32":
        precision = fbgemm_qcomm_codec.CommType[communication.upper()]
        config = fbgemm_qcomm_codec.QCommsConfig(forward_precision=precision, backward_precision=precision)
        registry = fbgemm_qcomm_codec.get_qcomm_codecs_registry(config, device=device)
    bags = RowWiseBagSharder if device.type == "cpu" else EmbeddingBagCollectionSharder
    return [bags(qcomm_codecs_registry=registry), EmbeddingCollectionSharder(qcomm_codecs_registry=registry)]


def constraint(sharding: str, *, columns: int) -> ParameterConstraints:
    """One sharding type; column shards of `columns`."""
    kernel = EmbeddingComputeKernel.DENSE if sharding == "data_parallel" else EmbeddingComputeKernel.FUSED
    return ParameterConstraints(sharding_types=[sharding], compute_kernels=[kernel.value], min_partition=columns)


def parallel(
    module: nn.Module,
    device: torch.device,
    sharding: Mapping[str, str],
    *,
    columns: int,
    communication: str = "fp32",
    grouping: Grouping | None = None,
    group: dist.ProcessGroup | None = None,
) -> DistributedModelParallel:
    """The module on the ranks of the world.

    Args:
        module: with its tables on meta.
        device: of this rank.
        sharding: type by table.
        columns: smallest column shard.
        communication: "fp32", "fp16", ...
        grouping: two groups of two ranks of the world of four, in DMPCollection.
        group: ranks that shard the tables, other than the world.
    """
    forget_groups()
    world = group or dist.group.WORLD
    assert world is not None
    ranks = GROUP if grouping else world.size()
    topology = Topology(world_size=ranks, local_world_size=min(ranks, 2), compute_device=device.type)
    constraints = {table: constraint(kind, columns=columns) for table, kind in sharding.items()}
    chosen = sharders(device, communication)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH, constraints=constraints)
    plan = planner.collective_plan(module, chosen, world)
    if grouping:
        return DMPCollection(
            module,
            device=device,
            plan=plan,
            world_size=world.size(),
            sharding_group_size=GROUP,
            global_pg=world,
            sharders=chosen,
            use_inter_host_allreduce=grouping == "contiguous",
        )
    return DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(world), device=device, plan=plan, sharders=chosen
    )
