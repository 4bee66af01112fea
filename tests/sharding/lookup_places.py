"""Where else our lookup stands: pipelines, groups of ranks, inside other sharders; for test_jagged_*.py, on ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.npu import compatibility_cases as cases
from tests.npu.ranks import forget_groups
from tests.pipeline import small_model
from tests.sharding.lookup_runs import OF_TABLE, SHARDERS, OurBags, batch_of, local_shards, loss_of, sharded, tables_of
from turbogr_plugin.kernels import dispatch
from turbogr_plugin.sharding.jagged_lookup import table_modules, use_jagged_lookup


def pipeline(*, name: str, ours: bool, sharding: str = "row_wise") -> dict[str, Any]:
    """Losses of one of TorchRec's pipelines, on one lookup or the other."""
    device = torch.device("cpu")
    model = small_model.sharded(device, sharding)
    if ours:
        assert use_jagged_lookup(model) == len(table_modules(model)) > 0
    source = small_model.batches(5, rank=dist.get_rank())
    optimizer = small_model.dense_optimizer(model)
    made = getattr(train_pipelines, name)(model, optimizer, device)
    return {"losses": small_model.pipeline_losses(made, source)}


def deduplicated_afterwards(*, dedup: bool) -> dict[str, Any]:
    """Three steps of a collection that TorchRec's own sharder has sharded, then put on our lookup."""
    dispatch._taken.clear()
    model = sharded(
        tables_of("sequence"),
        "sequence",
        "row_wise",
        torch.device("cpu"),
        ours=False,
        dedup=dedup,
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.125,
    )
    for _ in range(2):  # the second time changes nothing
        assert use_jagged_lookup(model) == len(table_modules(model)) > 0
    losses = []
    for step in range(3):
        loss = loss_of(model, batch_of(step))
        loss.backward()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "tables": [rows.tolist() for _, rows in local_shards(model).values()],
        "class": type(model.module).__name__,
        "unique ran": "jagged_unique" in dispatch.taken(),
    }


def two_dimensional(*, ours: bool) -> dict[str, Any]:
    """Two groups of two ranks: a step, a synchronisation and another step."""
    forget_groups()
    world = dist.group.WORLD
    assert world is not None
    module = tables_of("sequence")
    sharder = SHARDERS["sequence", ours](  # type: ignore[abstract]
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.125}
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, local_world_size=2, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=["row_wise"]) for name in OF_TABLE},
        debug=False,
    )
    plan = planner.collective_plan(module, [sharder], world)  # type: ignore[list-item]
    model = DMPCollection(
        module,
        device=torch.device("cpu"),
        plan=plan,
        world_size=4,
        sharding_group_size=2,
        global_pg=world,
        sharders=[sharder],  # type: ignore[list-item]
        use_inter_host_allreduce=True,
    )
    context = model._default_ctx
    weights = [tensor for tensors in context.weights_by_dtype.values() for tensor in tensors]
    with torch.no_grad():
        for tensor in weights:
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) / 64)
    for step in range(2):
        loss_of(model, batch_of(step)).backward()
        model.sync()
    states = [tensor for tensors in context.optimizer_tensors_by_dtype.values() for tensor in tensors]
    return {"tables": [tensor.tolist() for tensor in weights], "states": [tensor.tolist() for tensor in states]}


def inside_another(*, collection: str, ours: bool) -> Any:
    """Trains a collection whose sharder takes another one: with ours inside it, or TorchRec's."""
    device = torch.device("cpu")
    dispatch._taken.clear()
    if collection == "managed_collision":
        inner = SHARDERS["sequence", ours]
        with patch.object(cases, "EmbeddingCollectionSharder", inner):
            found = cases.managed_collision(device, "LFU", module="sequences")
    else:
        processors = PositionWeightedModuleCollection({"f0": 5, "f1": 5}, device=device)
        module = FeatureProcessedEmbeddingBagCollection(cases._bags(is_weighted=True), processors)
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(SHARDERS["pooled", ours]())  # type: ignore[abstract]
        found = cases._trained(
            cases._parallel(module, device, [sharder], sharding="table_wise"), cases._features(device)
        )
    return {"found": found, "ours ran": "jagged_lookup" in dispatch.taken()}


def resharded() -> list[str]:
    """The classes of table modules before and after our sharder has resharded a collection."""
    model = sharded(tables_of("pooled"), "pooled", "table_wise", torch.device("cpu"), ours=True)
    for tables in table_modules(model):
        tables.__class__ = type(tables).__mro__[1]  # as TorchRec builds them anew
    before = [type(tables).__name__ for tables in table_modules(model)]
    world = dist.group.WORLD
    assert world is not None
    OurBags().reshard(model.module, {}, ShardingEnv.from_process_group(world), torch.device("cpu"))
    return before + [type(tables).__name__ for tables in table_modules(model)]
