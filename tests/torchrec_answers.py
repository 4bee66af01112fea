"""What a user sees of TorchRec on CPU, as JSON: with the plugin in the process and without, it must not differ.

Each function is called in a process of a pool (tests/npu/ranks.py) and imports nothing of turbogr_plugin.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.npu import models
from tests.npu.ranks import forget_groups

META = torch.device("meta")
_SHARDERS: dict[str, type[Any]] = {
    "bags": EmbeddingBagCollectionSharder,
    "sequences": EmbeddingCollectionSharder,
    "processed": FeatureProcessedEmbeddingBagCollectionSharder,
    "fused": FusedEmbeddingBagCollectionSharder,
    "towers": EmbeddingTowerSharder,
}


def _said(action: Callable[[], Any]) -> Any:
    """The result, or what was raised. Warnings about CUDA name the build, which is the same in both processes."""
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _bags(count: int, rows: int, dim: int, data_type: DataType = DataType.FP32) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=dim * (1 + i % 2),
            num_embeddings=rows * (i + 1),
            feature_names=[f"f{i}", f"g{i}"][: 1 + i % 2],
            data_type=data_type,
        )
        for i in range(count)
    ]
    return EmbeddingBagCollection(tables=tables, device=META)


def _plan(module: nn.Module, device: str, ranks: int, optimizer: Any, **changes: Any) -> Any:
    constraints = changes.pop("constraints", None)
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})
    topology = Topology(world_size=ranks, local_world_size=min(ranks, 4), compute_device=device, **changes)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=64, constraints=constraints)
    plan = planner.plan(module, get_default_sharders())
    return {
        f"{path}.{table}": [
            sharding.sharding_type,
            sharding.compute_kernel,
            sharding.ranks,
            str(sharding.sharding_spec),
        ]
        for path, tables in plan.plan.items()
        for table, sharding in tables.items()
    }


def plans() -> dict[str, Any]:
    """Plans of several models on the topologies that TorchRec knows, and what it says to the others."""
    sequences = EmbeddingCollection(
        tables=[EmbeddingConfig(name="s", embedding_dim=64, num_embeddings=100_000, feature_names=["q"])], device=META
    )
    found: dict[str, Any] = {}
    for device in ("cpu", "cuda", "mtia"):
        for ranks in (1, 2, 8):
            for optimizer in (None, torch.optim.Adam, RowWiseAdagrad):
                name = f"{device} {ranks} {getattr(optimizer, '__name__', None)}"
                found[f"small {name}"] = _said(lambda *a: _plan(_bags(3, 1000, 32), device, ranks, optimizer))  # noqa: B023
            found[f"large {device} {ranks}"] = _said(
                lambda *a: _plan(_bags(4, 2_000_000, 128, DataType.FP16), device, ranks, RowWiseAdagrad)  # noqa: B023
            )
            found[f"sequences {device} {ranks}"] = _said(lambda *a: _plan(sequences, device, ranks, None))  # noqa: B023
        for kind in ShardingType:
            limits = {f"t{i}": ParameterConstraints(sharding_types=[kind.value], min_partition=32) for i in range(3)}
            found[f"{kind.value} {device}"] = _said(
                lambda *a: _plan(_bags(3, 1000, 64), device, 4, None, constraints=limits)  # noqa: B023
            )
        found[f"too small {device}"] = _said(
            lambda *a: _plan(_bags(3, 1000, 64), device, 2, None, hbm_cap=1000, ddr_cap=1000)  # noqa: B023
        )
    found["unknown"] = _said(lambda: _plan(_bags(1, 10, 8), "xpu", 2, None))
    return found


def estimates() -> dict[str, Any]:
    """Storage and speed of every sharding option, the reservation, and how a topology prints."""
    found: dict[str, Any] = {}
    for device in ("cpu", "cuda", "mtia"):
        topology = Topology(world_size=4, local_world_size=2, compute_device=device)
        module = _bags(2, 5000, 64)
        enumerator = EmbeddingEnumerator(topology=topology, batch_size=32)
        found[device] = [
            [option.name, option.sharding_type, option.compute_kernel, str(option.shards)]
            for option in enumerator.enumerate(module, get_default_sharders())
        ]
        reservation = HeuristicalStorageReservation(percentage=0.15)
        reserved = reservation.reserve(topology, 32, module, get_default_sharders())
        found[f"{device} topology"] = [str(topology), str(reserved)]
    return found


def sharders() -> dict[str, Any]:
    """Sharding types and compute kernels that each sharder offers."""
    found: dict[str, Any] = {}
    for name, kind in _SHARDERS.items():
        for device in ("cpu", "cuda", "mtia", "meta"):
            types = _said(lambda *a: kind().sharding_types(device))  # noqa: B023
            found[f"{name} {device}"] = types
            for sharding in types if isinstance(types, list) else []:
                found[f"{name} {device} {sharding}"] = _said(lambda *a: kind().compute_kernels(sharding, device))  # noqa: B023
    return found


def jagged() -> dict[str, Any]:
    """Operations of KeyedJaggedTensor and KeyedTensor, scripted ones and refusals among them."""
    features = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.arange(9),
        weights=torch.arange(9) / 4,
        lengths=torch.tensor([2, 0, 1, 3, 1, 2]),
    )
    varying = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(5), lengths=torch.tensor([1, 2, 2]), stride_per_key_per_rank=[[1], [2]]
    )
    keyed = KeyedTensor(keys=["x", "y"], length_per_key=[2, 3], values=torch.arange(10.0).view(2, 5))

    def numbers(value: Any) -> Any:
        if isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
            weights = value.weights_or_none()
            return [
                value.values().tolist(),
                value.lengths().tolist(),
                value.offsets().tolist(),
                None if weights is None else weights.tolist(),
            ]
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: numbers(part) for key, part in value.items()}
        return [numbers(part) for part in value] if isinstance(value, (list, tuple)) else value

    actions: dict[str, Callable[[], Any]] = {
        "to_dict": lambda: features.to_dict(),
        "permute": lambda: features.permute([2, 0, 1]),
        "split": lambda: features.split([1, 2]),
        "getitem": lambda: features["b"],
        "concat": lambda: KeyedJaggedTensor.concat([features, features.permute([1, 0, 2])]),
        "length_per_key": lambda: features.length_per_key(),
        "offset_per_key": lambda: features.offset_per_key(),
        "stride": lambda: features.stride(),
        "text": lambda: str(features) + str(varying),
        "dist_splits": lambda: features.dist_splits([1, 2]),
        "dist_tensors": lambda: [tensor.tolist() for tensor in features.dist_tensors()],
        "to": lambda: features.to(torch.device("cpu"), non_blocking=True),
        "varying": lambda: varying.to_dict(),
        "varying lengths": lambda: varying.length_per_key(),
        "empty": lambda: KeyedJaggedTensor.empty(),
        "from_jt_dict": lambda: KeyedJaggedTensor.from_jt_dict(features.to_dict()),
        "from_offsets": lambda: KeyedJaggedTensor.from_offsets_sync(["a"], torch.arange(3), torch.tensor([0, 1, 3])),
        "from_lengths": lambda: KeyedJaggedTensor.from_lengths_sync(["a"], torch.arange(3), torch.tensor([1, 2])),
        "padded": lambda: features["a"].to_padded_dense(3),
        "dense": lambda: features["a"].to_dense(),
        "regroup": lambda: KeyedTensor.regroup([keyed], [["y"], ["x"]]),
        "script": lambda: torch.jit.script(_Scripted())(features),
        "wrong lengths": lambda: KeyedJaggedTensor(["a", "b"], torch.arange(3), torch.ones(3)).length_per_key(),
        "wrong key": lambda: features["z"],
    }
    return {name: numbers(_said(action)) for name, action in actions.items()}


class _Scripted(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        parts = features.to_dict()
        swapped = features.permute([1, 0, 2])
        return [parts["a"].values(), parts["b"].lengths(), swapped.values(), swapped.lengths()]


_PIPELINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "base": (TrainPipelineBase, {}),
    "sparse_dist": (TrainPipelineSparseDist, {}),
    "sparse_dist, not all": (TrainPipelineSparseDist, {"execute_all_batches": False}),
    "lite": (TrainPipelineSparseDistLite, {}),
}


def training(model: str, pipeline: str) -> dict[str, Any]:
    """Losses of a planned and sharded model, its plan, and what a user sees of the pipeline."""
    forget_groups()
    device = torch.device("cpu")
    module = models.build(model, device)
    tables = [value for value in module.parameters() if value.is_meta]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.05})
    world = dist.group.WORLD
    assert world is not None
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in models.table_names(model)}
    topology = Topology(world_size=world.size(), local_world_size=world.size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=6, constraints=constraints)
    plan = planner.collective_plan(module, get_default_sharders(), world)
    sharded = DistributedModelParallel(module, ShardingEnv.from_process_group(world), device, plan)
    models.set_initial_values(sharded)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    kind, options = _PIPELINES[pipeline]
    trained = kind(sharded, optimizer, device, **options)
    batches, losses = models.batches(model, steps=6, rank=world.rank()), []
    while True:
        try:
            losses.append(trained.progress(batches).item())
        except StopIteration:
            break
    streams = {name: str(value) for name, value in sorted(vars(trained).items()) if "stream" in name}
    names = sorted(sharded.state_dict())
    return {
        "losses": losses,
        "plan": str(plan),
        "streams": {name: text for name, text in streams.items() if " at 0x" not in text},
        "attributes": sorted(vars(trained)),
        "state": names,
        "optimizer": sorted(sharded.fused_optimizer.state_dict()["state"]),
    }


def is_adapted() -> bool:
    """Whether the plugin is in this process and has registered."""
    return "turbogr_plugin.registration" in sys.modules


def signatures() -> dict[str, str]:
    """Signatures and names of what users call and subclass."""
    kinds: list[Any] = [
        *(DistributedModelParallel, DMPCollection, EmbeddingShardingPlanner, Topology, EmbeddingEnumerator),
        *(
            KeyedJaggedTensor,
            KeyedTensor,
            JaggedTensor,
            *_SHARDERS.values(),
            TrainPipelineBase,
            TrainPipelineSparseDist,
        ),
        *(TrainPipelineFusedSparseDist, TrainPipelineSemiSync, PrefetchTrainPipelineSparseDist, StagedTrainPipeline),
        *(EvalPipelineSparseDist, EmbeddingBagCollection, EmbeddingCollection),
    ]
    found = {}
    for kind in kinds:
        for name in dir(kind):
            value = inspect.getattr_static(kind, name)
            value = getattr(value, "__func__", value)
            if not name.startswith("__") or name == "__init__":
                text = str(inspect.signature(value)) if inspect.isfunction(value) else type(value).__name__
                qualified = getattr(value, "__qualname__", "")
                found[f"{kind.__name__}.{name}"] = f"{qualified}{text}".partition(" at 0x")[0]
    return found
