"""What runs on several ranks for these tests; see tests/npu/ranks.py."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torchrec.distributed.utils
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

from tests.npu.ranks import forget_groups
from tests.stock import without
from turbogr_plugin.sharding.adaptations import default_device, dmp_collection, plan_check, sequences_without_rows

TABLES = ("a", "b")
GROUP = 2


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("npu", int(os.environ["LOCAL_RANK"]))


def _sequences() -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(name=name, num_embeddings=12, embedding_dim=8, feature_names=[f"f_{name}"]) for name in TABLES
    ]
    return EmbeddingCollection(device=torch.device("meta"), tables=tables)


def _bags(rows: int = 12) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=8, feature_names=["f"])]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def _everywhere(tensors: dict[torch.dtype, list[Tensor]]) -> list[list[list[float]]]:
    """The values of these tensors on every rank: [rank][tensor][element]."""
    mine = [tensor.detach().cpu().double().flatten().tolist() for group in tensors.values() for tensor in group]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _mean(of_ranks: list[list[list[float]]], ranks: list[int]) -> list[list[float]]:
    return [
        torch.tensor([of_ranks[rank][number] for rank in ranks], dtype=torch.float64).mean(0).tolist()
        for number in range(len(of_ranks[ranks[0]]))
    ]


def _difference(first: list[list[float]], second: list[list[float]]) -> float:
    pairs = [(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def replicas(device_type: str, kind: str, optimizer: str, contiguous: bool, stock: bool = False) -> dict[str, Any]:
    """One step of DMPCollection in two groups of two, then a synchronisation.

    Returns:
        How far the replicas of this rank lay apart before, how far this rank lies from their mean afterwards, how
        many optimizer states were synchronised, and where the shards of this rank are placed.
    """
    forget_groups()
    device, world = _device(device_type), dist.group.WORLD
    assert world is not None
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType[optimizer], "learning_rate": 0.5, "eps": 1e-3}
    )
    module = _sequences()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=GROUP, local_world_size=GROUP, compute_device=device_type),
        constraints={name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in TABLES},
        debug=False,
    )
    plan = planner.collective_plan(module, [sharder], world)
    with without([dmp_collection.ADAPTATIONS[-1]] if stock else []):
        model = DMPCollection(
            module,
            device=device,
            plan=plan,
            world_size=4,
            sharding_group_size=GROUP,
            global_pg=world,
            sharders=[sharder],
            use_inter_host_allreduce=contiguous,
        )
    rank = dist.get_rank()
    context = model._default_ctx
    model.sync()  # each rank has drawn initial values of its own
    ids = torch.tensor([rank, rank + 5, 11, 2, rank])
    features = KeyedJaggedTensor(
        keys=[f"f_{name}" for name in TABLES], values=ids, lengths=torch.tensor([1, 2, 0, 2])
    ).to(device)
    loss = sum(((rank + 1) * found.values()).square().sum() for found in model(features).values())
    assert isinstance(loss, Tensor)
    loss.backward()
    ranks = dist.get_process_group_ranks(context.replica_pg)
    before, states = _everywhere(context.weights_by_dtype), _everywhere(context.optimizer_tensors_by_dtype)
    model.sync()
    after, states_after = _everywhere(context.weights_by_dtype), _everywhere(context.optimizer_tensors_by_dtype)
    places = [
        str(piece.placement)
        for tables in model.plan.plan.values()
        for sharding in tables.values()
        for piece in sharding.sharding_spec.shards
        if piece.placement.rank() == rank
    ]
    return {
        "replicas": ranks,
        "apart": max(_difference(before[ranks[0]], before[ranks[1]]), 0.0),
        "states apart": _difference(states[ranks[0]], states[ranks[1]]),
        "from mean": max(
            _difference(after[rank], _mean(before, ranks)), _difference(states_after[rank], _mean(states, ranks))
        ),
        "states": len(states[rank]),
        "places": sorted(set(places)),
    }


def refusal(case: str) -> str:
    """The message with which a plan of bags is refused on this rank's npu, or of which type the result is."""
    device, world = _device("npu"), dist.group.WORLD
    assert world is not None
    module, sharder = _bags(), EmbeddingBagCollectionSharder()
    ranks, kernel, device_type = world.size(), None, "npu"
    if case == "kernel":
        kernel = "fused_uvm_caching"
    if case == "device":
        device_type = "cpu"
    if case == "world":
        ranks += 1
    if case == "index":
        device = torch.device("npu", (int(os.environ["LOCAL_RANK"]) + 3) % torch.npu.device_count())
    generator = row_wise(compute_kernel=kernel or "fused")
    plan = construct_module_sharding_plan(
        module,
        {"t": generator},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device_type,
    )
    try:
        model = DistributedModelParallel(
            module, device=device, plan=ShardingPlan({"": plan}), sharders=[sharder], init_data_parallel=False
        )
    except ValueError as error:
        return str(error)
    return type(model.module).__name__


def stock_takes_a_uvm_table_into_hbm() -> str:
    """What TorchRec does with a table that is planned for host memory: the device its rows come to lie on."""
    with without(plan_check.ADAPTATIONS):
        device = _device("npu")
        module, sharder = _bags(), EmbeddingBagCollectionSharder()
        world = dist.get_world_size()
        plan = construct_module_sharding_plan(
            module,
            {"t": row_wise(compute_kernel="fused_uvm_caching")},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="npu",
        )
        model = DistributedModelParallel(
            module, device=device, plan=ShardingPlan({"": plan}), sharders=[sharder], init_data_parallel=False
        )
        return next(model.module.parameters()).device.type


def default_devices() -> dict[str, Any]:
    """Which device TorchRec and ours take where none is named: type, planner, shard() and shard_modules()."""

    def found() -> dict[str, Any]:
        _device("npu")
        planner = EmbeddingShardingPlanner(debug=False)
        whole = shard_modules(torch.nn.Sequential(_bags()), sharders=[EmbeddingBagCollectionSharder()])
        one = shard(_bags(), {"t": table_wise(rank=dist.get_rank())}) if dist.get_world_size() == 1 else None
        return {
            "type": torchrec.distributed.utils.get_device_type(),
            "topology": planner._topology.compute_device,
            "shard_modules": whole[0]._device.type,
            "shard": None if one is None else one._device.type,  # type: ignore[union-attr]
        }

    ours = found()
    with without(default_device.ADAPTATIONS):
        return {"ours": ours, "stock": found()}


def batches_without_rows(device_type: str, kind: str, *, stock: bool = False) -> dict[str, Any]:
    """A step of an EmbeddingCollection whose batch has no rows on any rank, between two others.

    Returns:
        Shapes of the embeddings and of the lengths by feature, and what the table of this rank was changed by in the
        step without rows and in one with rows.
    """
    device, world = _device(device_type), dist.group.WORLD
    assert world is not None
    module, sharder = _sequences(), EmbeddingCollectionSharder(fused_params={"learning_rate": 1.0})
    fused = EmbeddingComputeKernel.FUSED.value  # the dense kernel of a CPU pools sequences
    generator = (
        row_wise(compute_kernel=fused) if kind == "row_wise" else table_wise(world.size() - 1, compute_kernel=fused)
    )
    plan = construct_module_sharding_plan(
        module,
        dict.fromkeys(TABLES, generator),
        sharder=sharder,
        local_size=world.size(),
        world_size=world.size(),
        device_type=device_type,
    )
    model = DistributedModelParallel(
        module, device=device, plan=ShardingPlan({"": plan}), sharders=[sharder], init_data_parallel=False
    )

    def step(ids: Tensor, lengths: Tensor) -> tuple[dict[str, Any], float]:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        features = KeyedJaggedTensor(keys=["f_a", "f_b"], values=ids, lengths=lengths)
        found = dict(model(features.to(device)).items())
        torch.stack([jagged.values().sum() for jagged in found.values()]).sum().backward()
        shapes = {key: [list(jagged.values().shape), list(jagged.lengths().shape)] for key, jagged in found.items()}
        changes = [float((old - new).detach().abs().sum()) for old, new in zip(before, model.parameters(), strict=True)]
        return shapes, sum(changes)

    rows = torch.tensor([1, 11, 2, 3]), torch.tensor([1, 1, 0, 2])
    none = torch.empty(0, dtype=torch.int64)
    with without(sequences_without_rows.ADAPTATIONS if stock else ()):
        step(*rows)
        shapes, unchanged = step(none, none)
    return {"shapes": shapes, "change without rows": unchanged, "change with rows": step(*rows)[1]}
