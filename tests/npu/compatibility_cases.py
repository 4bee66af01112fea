"""One function per feature of docs/compatibility.md that no other test tries: each uses it on a device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, QConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.keyed_jagged_tensor_pool import KeyedJaggedTensorPoolSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.tensor_pool import TensorPoolSharder
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelinePT2
from torchrec.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    LazyAwaitable,
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
    ShardingEnv,
    ShardingPlan,
    ShardingStrategy,
)
from torchrec.metrics import metric_module
from torchrec.metrics.metrics_config import DefaultMetricsConfig
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.modules.tensor_pool import TensorPool
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantizedBags
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.npu import models
from tests.npu.parallel import device_of, parallel, sharders

META = torch.device("meta")
ROWS, DIM = 40, 16
_POLICIES: dict[str, Callable[[], Any]] = {
    "LFU": LFU_EvictionPolicy,
    "LRU": LRU_EvictionPolicy,
    "DistanceLFU": DistanceLFU_EvictionPolicy,
}


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
    module: nn.Module,
    device: torch.device,
    chosen: Any,
    *,
    sharding: str | None = None,
    kernels: list[str] | None = None,
    cache_params: CacheParams | None = None,
    fill: bool = True,
) -> DistributedModelParallel:
    kinds = [sharding] if sharding else None
    limits = ParameterConstraints(
        sharding_types=kinds, compute_kernels=kernels, min_partition=DIM, cache_params=cache_params
    )
    constraints = dict.fromkeys(("t0", "t1"), limits)
    world = dist.group.WORLD
    assert world is not None
    topology = Topology(world_size=world.size(), local_world_size=2, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=2, constraints=constraints)
    plan = planner.collective_plan(module, chosen, world)
    model = DistributedModelParallel(module, device=device, plan=plan, sharders=chosen)
    if fill:
        _fill(model)
    return model


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Gives every shard multiples of 1/16."""
    for value in model.state_dict().values():
        for part in value.local_shards() if hasattr(value, "local_shards") else []:
            part.tensor.copy_(torch.arange(part.tensor.numel()).view_as(part.tensor) % 13 / 16)


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


STEPS = 5


def _raw_ids(step: int, empty: str) -> KeyedJaggedTensor:
    """Ids from 0 to 25 millions; `empty` says which ranks and steps have none, or not even rows.

    Few are frequent, so that policies of eviction differ in what they keep.
    """
    rank, odd = dist.get_rank(), step % 2 == 1
    empty_now = {"": False, "first": step == 0, "no rows": odd, "no rows on one rank": rank == 1}
    lengths = torch.tensor([3, 2, 4, 3])
    if empty_now[empty]:
        lengths = lengths[:0] if empty.startswith("no rows") else torch.zeros_like(lengths)
    places = torch.arange(int(lengths.sum()))
    ids = (places * places * (step + 2) + 7 * rank) % (5 + 5 * (places % 5)) * 1_000_003
    return KeyedJaggedTensor(keys=["f0", "f1"], values=ids, lengths=lengths, stride=lengths.numel() // 2)


def _trained_for_steps(model: nn.Module, batches: list[KeyedJaggedTensor], device: torch.device) -> dict[str, Any]:
    """Losses of SGD steps with the optimizer in the backward pass, and this rank's part of the state behind them."""
    losses = []
    for batch in batches:
        found = model(batch.to(device))
        found = found[0] if isinstance(found, tuple) else found
        found = found.wait() if isinstance(found, LazyAwaitable) else found
        each = [found.values()] if isinstance(found, KeyedTensor) else [found[key].values() for key in ("f0", "f1")]
        loss = sum((part * part).sum() + part.sum() for part in each)
        loss.backward()
        losses.append(loss.item())
    state = {}
    for name, value in model.state_dict().items():
        parts = [part.tensor for part in value.local_shards()] if hasattr(value, "local_shards") else [value]
        state[name] = [part.tolist() for part in parts]
    return {"losses": losses, "state": state}


def managed_collision(
    device: torch.device, policy: str, *, module: str = "bags", empty: str = "", hash_size: int = 25_000_000
) -> Any:
    """Ids of any size trained in tables of 8 rows, sharded by rows over the ranks (TorchRec shards these so only).

    Ids below half of `hash_size` go to the first rank.
    """
    rows, constant = 8, partial(nn.init.constant_, val=0.25)
    names = [(f"t{i}", [f"f{i}"]) for i in range(2)]
    collisions: dict[str, nn.Module] = {
        name: MCHManagedCollisionModule(
            zch_size=rows,
            device=device,
            eviction_interval=2,
            eviction_policy=_POLICIES[policy](),
            input_hash_size=hash_size,
            buckets=2,
        )
        for name, _ in names
    }
    inner: Any = EmbeddingCollectionSharder() if module == "sequences" else sharders(device)[0]
    collection: nn.Module
    sharder: Any
    if module == "sequences":
        tables = [
            EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=rows, feature_names=features, init_fn=constant)
            for name, features in names
        ]
        collection = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=tables, device=META), ManagedCollisionCollection(collisions, tables)
        )
        sharder = ManagedCollisionEmbeddingCollectionSharder(inner, ManagedCollisionCollectionSharder())
    else:
        bags = [
            EmbeddingBagConfig(
                name=name, embedding_dim=4, num_embeddings=rows, feature_names=features, init_fn=constant
            )
            for name, features in names
        ]
        collection = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=bags, device=META), ManagedCollisionCollection(collisions, bags)
        )
        sharder = ManagedCollisionEmbeddingBagCollectionSharder(inner, ManagedCollisionCollectionSharder())
    apply_optimizer_in_backward(torch.optim.SGD, collection._embedding_module.parameters(), {"lr": 1 / 32})
    model = _parallel(collection, device, [sharder], sharding="row_wise", kernels=["fused"], fill=False)
    return _trained_for_steps(model, [_raw_ids(step, empty) for step in range(STEPS)], device)


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
    """`shard` without DistributedModelParallel, trained for some steps."""
    world = dist.group.WORLD
    assert world is not None
    bags = _bags()
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.125})
    places = {f"t{i}": table_wise(rank=i) for i in range(2)}
    plan = construct_module_sharding_plan(bags, places, local_size=2, world_size=world.size(), device_type=device.type)
    sharded = shard(bags, plan=plan, env=ShardingEnv.from_process_group(world), device=device)
    _fill(sharded)
    return _trained_for_steps(sharded, [_features(torch.device("cpu"))] * STEPS, device)


def copied(device: torch.device) -> Any:
    """DistributedModelParallel.copy to the device where the model is."""
    return len(list(_parallel(_bags(), device, get_default_sharders()).copy(device).parameters()))


class _WithDense(nn.Module):
    """Bags and a dense layer: TorchRec reshards only what DistributedDataParallel wraps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.bags = _bags()
        self.scale = nn.Linear(1, 1, bias=False, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.bags(features).values()
        return pooled * self.scale.weight


def resharded(device: torch.device) -> Any:
    """Tables that change places between ranks; who waits for the other in vain gives up after two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = parallel(_WithDense(device), device, {"t0": "table_wise", "t1": "table_wise"}, columns=DIM, group=group)
    now = model.plan.plan["bags"].items()
    places = {name: table_wise(rank=1 - table.ranks[0], compute_kernel="fused") for name, table in now}
    plan = construct_module_sharding_plan(_bags(), places, local_size=2, world_size=2, device_type=device.type)
    model.reshard({"bags": (0.0, plan)}, "bags")
    return "resharded"


def regroup(device: torch.device) -> Any:
    values = torch.arange(10.0, device=device).view(2, 5).requires_grad_()
    keyed = KeyedTensor(keys=["a", "b"], length_per_key=[2, 3], values=values)
    found = KTRegroupAsDict([["b"], ["a"]], ["x", "y"])([keyed])
    regrouped = KeyedTensor.regroup([keyed], [["b"], ["a", "b"]])
    (found["x"].sum() * 2 + regrouped[1].sum()).backward()
    assert values.grad is not None
    parts = [found["x"], found["y"], *regrouped, values.grad]
    return [part.tolist() for part in parts]


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


def cached(device: torch.device, *, options: bool) -> Any:
    """A model whose plan speaks of a cache, trained."""
    cache = CacheParams(
        algorithm=CacheAlgorithm.LRU,
        load_factor=0.1,
        reserved_memory=1.0,
        precision=DataType.FP16,
        prefetch_pipeline=True,
    )
    model = _parallel(_bags(), device, sharders(device), sharding="table_wise", cache_params=cache if options else None)
    tables = {name: table for plan in model.plan.plan.values() for name, table in plan.items()}
    assert all((table.cache_params is not None) == options for table in tables.values())
    kernels = {name: [table.compute_kernel, table.ranks] for name, table in tables.items()}
    return [kernels, _trained(model, _features(device))]


def two_dimensional(device: torch.device, **options: Any) -> Any:
    """DMPCollection with an option that it does not have everywhere."""
    if "sharding_strategy" in options:
        options["sharding_strategy"] = ShardingStrategy[options["sharding_strategy"]]
    DMPCollection(
        nn.Linear(1, 1), device, plan=ShardingPlan({}), world_size=4, sharding_group_size=2, global_pg=None, **options
    )


def use(feature: str, device_type: str, **options: Any) -> Any:
    """Calls one of the functions above."""
    function: Callable[..., Any] = globals()[feature]
    return function(device_of(device_type), **options)
