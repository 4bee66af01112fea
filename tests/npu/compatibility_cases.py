"""One function per feature of docs/compatibility.md that no other test tries: each uses it on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, QConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.keyed_jagged_tensor_pool import KeyedJaggedTensorPoolSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.tensor_pool import TensorPoolSharder
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelinePT2
from torchrec.distributed.types import CacheParams, ObjectPoolShardingPlan, ObjectPoolShardingType, ShardingEnv
from torchrec.metrics import metric_module
from torchrec.metrics.metrics_config import DefaultMetricsConfig
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.modules.tensor_pool import TensorPool
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantizedBags
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.npu import models
from tests.npu.parallel import device_of, parallel, sharders

META = torch.device("meta")
ROWS, DIM = 40, 16


def _tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f{i}"])
        for i in range(2)
    ]


def _bags(*, device: torch.device = META, is_weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=_tables(), device=device, is_weighted=is_weighted)


def _features(device: torch.device) -> KeyedJaggedTensor:
    ids, lengths = torch.tensor([1, 2, 3, 4, 39, 1]), torch.tensor([2, 0, 1, 3])
    return KeyedJaggedTensor(keys=["f0", "f1"], values=ids, lengths=lengths).to(device)


def _parallel(
    module: nn.Module, device: torch.device, chosen: Any, *, sharding: str | None = None
) -> DistributedModelParallel:
    kinds = [sharding] if sharding else None
    constraints = {f"t{i}": ParameterConstraints(sharding_types=kinds, min_partition=DIM) for i in range(2)}
    world = dist.group.WORLD
    assert world is not None
    topology = Topology(world_size=world.size(), local_world_size=2, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=2, constraints=constraints)
    plan = planner.collective_plan(module, chosen, world)
    model = DistributedModelParallel(module, device=device, plan=plan, sharders=chosen)
    with torch.no_grad():
        for value in model.state_dict().values():
            for part in value.local_shards() if hasattr(value, "local_shards") else []:
                part.tensor.copy_(torch.arange(part.tensor.numel()).view_as(part.tensor) % 13 / 16)
    return model


def _trained(model: nn.Module, features: KeyedJaggedTensor) -> list[list[float]]:
    """Pooled embeddings of a second forward, after a backward."""
    for _ in range(2):
        found = model(features)
        pooled: Tensor = (found[0] if isinstance(found, tuple) else found).values()
        pooled.sum().backward()
    return pooled.tolist()


def unchanged_script(device: torch.device) -> Any:
    """Default sharders, default planner."""
    return _trained(_parallel(_bags(), device, get_default_sharders()), _features(device))


def feature_processors(device: torch.device) -> Any:
    processors = PositionWeightedModuleCollection({"f0": 5, "f1": 5}, device=device)
    module = FeatureProcessedEmbeddingBagCollection(_bags(is_weighted=True), processors)
    return _trained(_parallel(module, device, get_default_sharders()), _features(device))


def fused_collection(device: torch.device) -> Any:
    module = FusedEmbeddingBagCollection(
        tables=_tables(), optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.125}, device=META
    )
    return _trained(_parallel(module, device, get_default_sharders()), _features(device))


def managed_collision(device: torch.device) -> Any:
    """On one rank: TorchRec shards these by rows in buckets, of which its own planner wants more than one per table."""
    bags = _bags()
    modules: dict[str, nn.Module] = {
        f"t{i}": MCHManagedCollisionModule(
            zch_size=ROWS, device=device, eviction_interval=1, eviction_policy=DistanceLFU_EvictionPolicy()
        )
        for i in range(2)
    }
    configs = bags.embedding_bag_configs()
    module = ManagedCollisionEmbeddingBagCollection(bags, ManagedCollisionCollection(modules, configs))
    inner = EmbeddingBagCollectionSharder()
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(inner, ManagedCollisionCollectionSharder())
    pooled = _trained(_parallel(module, device, [sharder], sharding="row_wise"), _features(device))
    return [len(pooled), len(pooled[0])]


def hashed_collision(device: torch.device) -> Any:
    HashZchManagedCollisionModule(zch_size=ROWS, device=device, total_num_buckets=4, input_hash_size=4000)
    return "built"


def pruning(device: torch.device) -> Any:
    pruned = GenericITEPModule(table_name_to_unpruned_hash_sizes={}, lookups=[], enable_pruning=False)
    module = ITEPEmbeddingBagCollection(_bags(), pruned)
    _parallel(module, device, [ITEPEmbeddingBagCollectionSharder()], sharding="table_wise")
    return "built"


def index_dedup(device: torch.device) -> Any:
    tables = [
        EmbeddingConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f{i}"]) for i in range(2)
    ]
    module = EmbeddingCollection(tables=tables, device=META)
    model = _parallel(module, device, [EmbeddingCollectionSharder(use_index_dedup=True)], sharding="row_wise")
    found = model(_features(device))
    values = {key: found[key].values() for key in ("f0", "f1")}
    sum(each.sum() for each in values.values()).backward()
    return {key: each.tolist() for key, each in values.items()}


def communication(device: torch.device, precision: str) -> Any:
    return _trained(_parallel(_bags(), device, sharders(device, precision), sharding="table_wise"), _features(device))


def sent_thirds(device: torch.device, precision: str) -> Any:
    """Pooled embeddings of 1/3, which no number of 16 bits is."""
    model = _parallel(_bags(), device, sharders(device, precision), sharding="table_wise")
    with torch.no_grad():
        for table in model.state_dict().values():
            for shard in table.local_shards():
                shard.tensor.fill_(1 / 3)
    return model(_features(device)).values().tolist()


def tensor_pool(device: torch.device) -> Any:
    world = dist.group.WORLD
    assert world is not None
    pool = TensorPool(pool_size=8, dim=4, dtype=torch.float32, device=device)
    plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
    sharded = TensorPoolSharder().shard(pool, plan, env=ShardingEnv.from_process_group(world), device=device)
    sharded.update(torch.tensor([1, 6], device=device), torch.ones(2, 4, device=device) * torch.tensor(2.5))
    return sharded.lookup(torch.tensor([6, 0], device=device)).wait().tolist()


def jagged_pool(device: torch.device) -> Any:
    world = dist.group.WORLD
    assert world is not None
    lengths = {"f0": 3, "f1": 3}
    pool = KeyedJaggedTensorPool(pool_size=8, feature_max_lengths=lengths, values_dtype=torch.int64, device=device)
    plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
    sharded = KeyedJaggedTensorPoolSharder().shard(pool, plan, env=ShardingEnv.from_process_group(world), device=device)
    sharded.update(torch.tensor([1, 6], device=device), _features(device))
    return str(sharded.lookup(torch.tensor([6], device=device)).wait())


def composable(device: torch.device) -> Any:
    """`shard` without DistributedModelParallel."""
    world = dist.group.WORLD
    assert world is not None
    bags, sharder = _bags(), EmbeddingBagCollectionSharder()
    places = {f"t{i}": table_wise(rank=i, device=device.type) for i in range(2)}
    plan = construct_module_sharding_plan(
        bags, places, sharder=sharder, local_size=2, world_size=world.size(), device_type=device.type
    )
    sharded = shard(bags, plan=plan, env=ShardingEnv.from_process_group(world), device=device)
    found = sharded(_features(device)).values()
    found.sum().backward()
    return list(found.shape)


def regroup(device: torch.device) -> Any:
    values = torch.arange(10.0, device=device).view(2, 5).requires_grad_()
    keyed = KeyedTensor(keys=["a", "b"], length_per_key=[2, 3], values=values)
    found = KTRegroupAsDict([["b"], ["a"]], ["x", "y"])([keyed])
    (found["x"].sum() * 2).backward()
    assert values.grad is not None
    return [found["x"].tolist(), found["y"].tolist(), values.grad.tolist()]


def quantized(device: torch.device) -> Any:
    bags = _bags(device=device)
    bags.qconfig = QConfig(activation=PlaceholderObserver, weight=PlaceholderObserver.with_args(dtype=torch.qint8))
    found = QuantizedBags.from_float(bags)(_features(device)).values()
    return list(found.shape)


def metrics(device: torch.device) -> Any:
    module = metric_module.generate_metric_module(
        metric_module.RecMetricModule,
        metrics_config=DefaultMetricsConfig,
        batch_size=4,
        world_size=1,
        my_rank=0,
        state_metrics_mapping={},
        device=device,
    )
    ones = torch.ones(4, device=device)
    names = ("DefaultTask-prediction", "DefaultTask-label", "DefaultTask-weight")
    module.update({**dict.fromkeys(names, ones), "prediction": ones / 2, "label": ones, "weight": ones})
    return sorted(module.compute())[:1]


def compiled(device: torch.device) -> Any:
    """TrainPipelinePT2, which compiles the model with Inductor in its third step."""
    module = models.build("simple_deepfm", device)
    names = dict.fromkeys(models.table_names("simple_deepfm"), "table_wise")
    model = parallel(module, device, names, columns=models.DIM)
    pipeline = TrainPipelinePT2(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    batches = models.batches("simple_deepfm", steps=5, rank=dist.get_rank())
    return [pipeline.progress(batches).item() for _ in range(5)]


def other_kernel(device: torch.device, kernel: str) -> Any:
    """A table that may only lie in a kind of memory that is not the device's."""
    limits = {"t0": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=[kernel])}
    topology = Topology(world_size=1, local_world_size=1, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=2, constraints=limits)
    assert dist.group.WORLD is not None
    return str(planner.collective_plan(_bags(), get_default_sharders(), dist.group.WORLD))


def cached(device: torch.device, load_factor: float | None) -> Any:
    """A plan whose constraints speak of a cache."""
    cache = CacheParams(load_factor=load_factor) if load_factor else None
    limits = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"], cache_params=cache) for i in range(2)}
    topology = Topology(world_size=1, local_world_size=1, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=2, constraints=limits)
    plan = planner.plan(_bags(), get_default_sharders())
    return {
        name: [table.compute_kernel, str(table.sharding_spec)]
        for tables in plan.plan.values()
        for name, table in tables.items()
    }


def use(feature: str, device_type: str, **options: Any) -> Any:
    """Calls one of the functions above."""
    function: Callable[..., Any] = globals()[feature]
    return function(device_of(device_type), **options)
