"""From a configuration to the sharded model: TorchRec's planner and DistributedModelParallel around the retriever, or
ours where ranks form groups.

The item table is looked up and updated by our lookup on every device, through its sharder. Its collectives have a
process group of their own where the pipeline issues them from a thread of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv

from turbogr_plugin.backend.collectives import group_of_same_ranks, ranks_per_host
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.models.retrieval import ITEM_TABLE, SequentialRetriever
from turbogr_plugin.sharding.constraints import sequence_table_constraints
from turbogr_plugin.sharding.hierarchical_model_parallel import HierarchicalModelParallel
from turbogr_plugin.sharding.jagged_sharders import JaggedEmbeddingCollectionSharder
from turbogr_plugin.sharding.keyed_init import init_sharded_tables
from turbogr_plugin.training.config import RunConfig
from turbogr_plugin.training.gradient_scale import SumDataParallelWrapper
from turbogr_plugin.training.optimizers import fuse_table_optimizer
from turbogr_plugin.training.table_groups import plan_groups
from turbogr_plugin.training.task import RetrievalTask

#: Name of the item table's weight in the state dict of the sharded model.
ITEM_WEIGHT = f"model.item_embeddings.embeddings.{ITEM_TABLE}.weight"

#: As published: item embeddings start with this standard deviation.
_ITEM_STD = 0.02

_PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def build_model(
    config: RunConfig, store: InteractionStore, group: dist.ProcessGroup, device: torch.device
) -> DistributedModelParallel:
    """The sharded model of a run, with initial values that depend on the seed alone.

    Collective: rank 0 plans and broadcasts the plan.
    """
    torch.manual_seed(config.training.seed)  # dense initial values: the same on every rank
    retriever = SequentialRetriever(
        config.model,
        num_items=store.num_items,
        loss=config.loss,
        sharing=config.negatives.sharing,
        precision=_PRECISIONS[config.training.precision],
        table_precision=_PRECISIONS[config.training.table_precision],
        device=torch.device("meta"),
    )
    fuse_table_optimizer(retriever.item_embeddings.parameters(), config.optimizer)
    task = RetrievalTask(retriever, group, loss_reduction=config.training.loss_reduction)
    rounding = {"stochastic_rounding": config.training.table_rounding == "stochastic"}
    sharders = [JaggedEmbeddingCollectionSharder(fused_params=rounding)]
    wrapper = SumDataParallelWrapper(group)
    if config.groups.size:
        grouped = HierarchicalModelParallel(
            module=task,
            device=device,
            plan=plan_groups(config, store, task, sharders, group, device),
            sharders=sharders,
            data_parallel_wrapper=wrapper,
            wire_dtype=config.groups.wire_dtype,
        )
        return _initialised(grouped, config)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=group.size(), local_world_size=ranks_per_host(group), compute_device=device.type),
        batch_size=max(1, config.training.global_batch_size // group.size()),
        constraints=sequence_table_constraints([ITEM_TABLE]),
    )
    plan = planner.collective_plan(task, sharders, group)
    tables = group_of_same_ranks(group, "tables") if config.pipeline.own_group else group
    model = DistributedModelParallel(
        module=task,
        env=ShardingEnv.from_process_group(tables),
        device=device,
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=wrapper,
    )
    return _initialised(model, config)


def _initialised(model: DistributedModelParallel, config: RunConfig) -> DistributedModelParallel:
    init_sharded_tables(model, {ITEM_WEIGHT: ITEM_TABLE}, seed=config.training.seed, std=_ITEM_STD)
    return model
