"""What the conformance tests of TorchRec run on ranks: each function runs in a process of the pool and gives JSON."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

from tests.npu import models
from tests.npu.parallel import constraint, device_of, parallel

DIM = 8
ROWS = 20
META = torch.device("meta")


def weights(device: torch.device) -> Tensor:
    """The table of all cases, [ROWS, DIM]: small integers over 8, so that sums are exact in any order."""
    return (torch.arange(ROWS * DIM, device=device) % 31 - 15).view(ROWS, DIM) / 8


def simnpu() -> Any:
    """The simulated npu, loaded where a case runs on it."""
    return importlib.import_module("turbogr_plugin.simnpu")


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    for value in model.state_dict().values():
        if not isinstance(value, ShardedTensor):  # data parallel
            value.copy_(weights(value.device))
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weights(shard.tensor.device)[row : row + rows, column : column + columns])


def _table(model: nn.Module) -> list[list[list[float]]]:
    """Rows of this rank's shards, by offset."""
    (value,) = model.state_dict().values()
    shards = sorted(value.local_shards(), key=lambda shard: shard.metadata.shard_offsets)
    return [shard.tensor.tolist() for shard in shards]


def _collection(*, pooled: bool) -> nn.Module:
    if pooled:
        bag = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["a", "b"])
        return EmbeddingBagCollection(tables=[bag], device=META)
    config = EmbeddingConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["a", "b"])
    return EmbeddingCollection(tables=[config], device=META)


def _sharded(
    sharding: str, device: torch.device, *, pooled: bool, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
) -> DistributedModelParallel:
    module = _collection(pooled=pooled)
    apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 1.0})
    model = parallel(module, device, {"t": sharding}, columns=DIM // 2)
    _fill(model)
    return model


def sequences_with_an_empty_batch(sharding: str, device_type: str) -> dict[str, Any]:
    """An EmbeddingCollection whose last rank has a batch of no rows: values, lengths, and the table after a step."""
    device = device_of(device_type)
    model = _sharded(sharding, device, pooled=False)
    if dist.get_rank() == dist.get_world_size() - 1:
        ids, lengths = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    else:
        ids, lengths = torch.tensor([1, 2, 3, 19, 3]), torch.tensor([2, 0, 1, 2])
    features = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths, stride=lengths.numel() // 2)
    found = model(features.to(device))
    result = {key: [found[key].values().tolist(), found[key].lengths().tolist()] for key in ("a", "b")}
    sum(found[key].values().sum() for key in ("a", "b")).backward()
    return {"found": result, "table": _table(model)}


def bags_with_an_empty_batch(sharding: str, device_type: str) -> Any:
    """The same of an EmbeddingBagCollection: pooled embeddings, and the table after a step."""
    device = device_of(device_type)
    model = _sharded(sharding, device, pooled=True)
    without = dist.get_rank() == dist.get_world_size() - 1
    ids, lengths = torch.tensor([1, 2, 3, 19, 3]), torch.tensor([2, 0, 1, 2])
    ids, lengths = (ids[:0], lengths[:0]) if without else (ids, lengths)
    features = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths, stride=lengths.numel() // 2)
    pooled = model(features.to(device)).values()
    pooled.sum().backward()
    return {"found": pooled.tolist(), "table": _table(model)}


def empty_to_dict(device_type: str, *, weighted: bool) -> dict[str, list[Any]]:
    """`to_dict` of a KJT with keys and a batch of no rows: values, lengths and offsets of each key."""
    device = device_of(device_type)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    features = KeyedJaggedTensor(
        keys=["a", "b"], values=empty, weights=empty.float() if weighted else None, lengths=empty, stride=0
    )
    return {
        key: [tensor.values().tolist(), tensor.lengths().tolist(), tensor.offsets().tolist()]
        for key, tensor in features.to_dict().items()
    }


def empty_lookup(device_type: str) -> dict[str, list[int]]:
    """An unsharded EmbeddingCollection looks an empty batch up: shapes of the embeddings, lengths beside them."""
    device = device_of(device_type)
    config = EmbeddingConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["a", "b"])
    empty = torch.empty(0, dtype=torch.int64, device=device)
    found = EmbeddingCollection(tables=[config], device=device)(
        KeyedJaggedTensor(keys=["a", "b"], values=empty, lengths=empty, stride=0)
    )
    return {key: [*tensor.values().shape, tensor.lengths().numel()] for key, tensor in found.items()}


@dataclass(frozen=True)
class VariableBatch:
    """Ids of the features a and b whose batches have sizes of their own, and which row each sample takes."""

    rows: dict[str, list[list[int]]]
    samples: dict[str, list[int]]

    def features(self) -> KeyedJaggedTensor:
        rows = [row for feature in self.rows.values() for row in feature]
        return KeyedJaggedTensor(
            keys=list(self.rows),
            values=torch.tensor([id_ for row in rows for id_ in row], dtype=torch.int64),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
            stride_per_key_per_rank=[[len(feature)] for feature in self.rows.values()],
            inverse_indices=self._inverse_indices(),
        )

    def features_of_a_dictionary(self, **options: Any) -> KeyedJaggedTensor:
        """The same by `from_jt_dict` with `options`; it takes no inverse indices, which a second tensor adds."""
        apart = {
            key: JaggedTensor(
                values=torch.tensor([id_ for row in rows for id_ in row], dtype=torch.int64),
                lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
            )
            for key, rows in self.rows.items()
        }
        features = KeyedJaggedTensor.from_jt_dict(apart, **options)
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            lengths=features.lengths(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() or None,
            inverse_indices=self._inverse_indices(),
        )

    def _inverse_indices(self) -> tuple[list[str], Tensor]:
        return list(self.samples), torch.tensor(list(self.samples.values()), dtype=torch.int64)

    def pooled(self) -> list[list[float]]:
        """The embeddings of each sample, a's beside b's, without any TorchRec."""
        table = weights(torch.device("cpu"))
        sums = {key: [table[row].sum(0) for row in feature] for key, feature in self.rows.items()}
        return [
            torch.cat([sums[key][row] for key, row in zip(self.rows, of_sample, strict=True)]).tolist()
            for of_sample in zip(*self.samples.values(), strict=True)
        ]


#: By turns over the ranks. The sizes of a and b vary on both; on the second rank of "uniform" they happen not to.
VARIABLE_BATCHES = {
    "varying": (
        VariableBatch({"a": [[1, 2], [3]], "b": [[19]]}, {"a": [0, 1, 1], "b": [0, 0, 0]}),
        VariableBatch({"a": [[]], "b": [[4], [5, 6]]}, {"a": [0, 0, 0], "b": [1, 0, 1]}),
    ),
    "uniform": (
        VariableBatch({"a": [[1, 2], [3]], "b": [[19]]}, {"a": [0, 1, 1], "b": [0, 0, 0]}),
        VariableBatch({"a": [[4], [5]], "b": [[], [6]]}, {"a": [0, 1, 1], "b": [1, 0, 0]}),
    ),
}


def variable_batch(sharding: str, device_type: str, case: str) -> list[list[float]]:
    """Pooled embeddings of features with batch sizes of their own, after a forward and a backward pass."""
    return _looked_up(VARIABLE_BATCHES[case][dist.get_rank() % 2].features(), sharding, device_type)


def variable_batch_of_a_dictionary(sharding: str, device_type: str, case: str, options: dict[str, Any]) -> Any:
    """The same, of a batch made by `from_jt_dict`."""
    return _looked_up(
        VARIABLE_BATCHES[case][dist.get_rank() % 2].features_of_a_dictionary(**options), sharding, device_type
    )


def strides_of_a_dictionary(device_type: str, options: dict[str, Any]) -> list[Any]:
    """What the batches of both ranks of VARIABLE_BATCHES["uniform"] know of their sizes, made by `from_jt_dict`."""
    made = [batch.features_of_a_dictionary(**options) for batch in VARIABLE_BATCHES["uniform"]]
    moved = [features.to(device_of(device_type)) for features in made]
    return [[features.variable_stride_per_key(), features.stride_per_key_per_rank()] for features in moved]


def _looked_up(features: KeyedJaggedTensor, sharding: str, device_type: str) -> list[list[float]]:
    device = device_of(device_type)
    model = _sharded(sharding, device, pooled=True)
    pooled = model(features.to(device)).values()
    pooled.sum().backward()
    found: list[list[float]] = pooled.tolist()
    return found


def _loss_pipeline(
    pipeline: str, device_type: str, group: dist.ProcessGroup | None = None, **options: Any
) -> tuple[Any, Any]:
    """A pipeline of torchrec over a model of the matrix, and the names of what it trains."""
    from torchrec.distributed.train_pipeline import train_pipelines
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    device = device_of(device_type)
    if device_type == "npu":
        simnpu().reset()
    module = models.build("simple_deepfm", device)
    tables = [value for value in module.parameters() if value.is_meta]
    apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.05})
    sharding = dict.fromkeys(models.table_names("simple_deepfm"), "table_wise")
    model = parallel(module, device, sharding, columns=models.DIM, group=group)
    models.set_initial_values(model)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    return getattr(train_pipelines, pipeline)(model, optimizer, device, **options), model


class _Counted:
    """An iterator that counts what is drawn from it."""

    def __init__(self, steps: int) -> None:
        self.drawn = 0
        self._batches: Iterator[Any] = models.batches("simple_deepfm", steps=steps, rank=dist.get_rank())

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.drawn += 1
        return batch


def _progress_until_stopped(pipeline: Any, batches: Any) -> list[float]:
    losses = []
    while True:
        try:
            losses.append(pipeline.progress(batches).item())
        except StopIteration:
            return losses


def epochs(pipeline: str, device_type: str, *, same_iterator: bool) -> list[int]:
    """Steps of two epochs, the second with the iterator of the first or with a new one."""
    trained, _ = _loss_pipeline(pipeline, device_type)
    batches = models.batches("simple_deepfm", steps=4, rank=dist.get_rank())
    first = _progress_until_stopped(trained, batches)
    if not same_iterator:
        batches = models.batches("simple_deepfm", steps=4, rank=dist.get_rank())
    return [len(first), len(_progress_until_stopped(trained, batches))]


def unequal_batches(device_type: str) -> dict[str, Any]:
    """Rank 1 has a batch less: losses so far, and whether the last `progress` ended for want of the other rank."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    trained, _ = _loss_pipeline("TrainPipelineSparseDist", device_type, group)
    batches = models.batches("simple_deepfm", steps=4 - dist.get_rank(), rank=dist.get_rank())
    steps = 0
    try:
        while True:
            trained.progress(batches)
            steps += 1
    except StopIteration:
        return {"steps": steps, "waited in vain": ""}
    except RuntimeError as error:
        return {"steps": steps, "waited in vain": str(error)}


def drawn_batches(pipeline: str, device_type: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a pipeline draws from a loader of 12 batches, and its losses."""
    trained, _ = _loss_pipeline(pipeline, device_type, **options)
    batches = _Counted(12)
    drawn, losses = [], []
    while True:
        try:
            losses.append(trained.progress(batches).item())
        except StopIteration:
            return {"drawn": drawn, "losses": losses, "races": _races(device_type)}
        drawn.append(batches.drawn)


def _races(device_type: str) -> list[str]:
    return [race.detail for race in simnpu().races()] if device_type == "npu" else []


def shared_parameters(device_type: str) -> str:
    """SemiSync in strict mode whose optimizer also owns the embeddings that are pipelined."""
    from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

    _, model = _loss_pipeline("TrainPipelineBase", device_type)
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    semi = TrainPipelineSemiSync(model, everything, device_of(device_type), start_batch=0, strict=True)
    try:
        semi.progress(models.batches("simple_deepfm", steps=4, rank=dist.get_rank()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


class _LoneBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, device=META)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        bags: Tensor = self.bag(ids, offsets)
        return bags


def lone_embedding_bag(device_type: str) -> dict[str, Any]:
    """A model with a plain nn.EmbeddingBag: how it is planned, and the sums of two bags."""
    device = device_of(device_type)
    model = _LoneBag()
    topology = Topology(world_size=dist.get_world_size(), local_world_size=2, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=2)
    sharders = [EmbeddingBagSharder()]
    assert dist.group.WORLD is not None
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    _fill(sharded)
    found = sharded(torch.tensor([1, 2, 19], device=device), torch.tensor([0, 2, 3], device=device))
    types = [table.sharding_type for tables in plan.plan.values() for table in tables.values()]
    return {"types": types, "bags": found.view(2, DIM).tolist()}


def printed(
    device_type: str, *, weighted: bool = False, strides: list[list[int]] | None = None, moved: bool = False
) -> dict[str, Any]:
    """A KJT of 3 and 5 values, told by `length_per_key` alone or by strides: how it prints and is taken apart."""
    device = device_of(device_type)
    made_on = torch.device("cpu") if moved else device
    features = KeyedJaggedTensor(
        keys=["user", "item"],
        values=torch.arange(1, 9, device=made_on),
        weights=torch.arange(1, 9, device=made_on) / 4 if weighted else None,
        lengths=torch.ones(8, dtype=torch.int64, device=made_on),
        length_per_key=[3, 5] if strides is None else None,
        stride_per_key_per_rank=strides,
    ).to(device)
    apart = {key: features[key] for key in ("user", "item")}
    return {
        "text": str(features),
        "values": {key: tensor.values().tolist() for key, tensor in apart.items()},
        "lengths": {key: tensor.lengths().tolist() for key, tensor in apart.items()},
    }


def refused(device_type: str, case: str) -> str:
    """What TorchRec says to a KJT whose parts do not fit."""
    device = device_of(device_type)
    keys = [f"f{number}" for number in range(20)]
    ones = torch.ones(2114, dtype=torch.int64, device=device)
    try:
        if case == "lengths do not divide by the keys":
            features = KeyedJaggedTensor(keys=keys, values=ones, lengths=ones)
            features.length_per_key()
        elif case == "lengths do not divide by the stride":
            features = KeyedJaggedTensor(keys=keys, values=ones, lengths=ones, stride=105)
            features.length_per_key()
        else:
            features = KeyedJaggedTensor(keys=keys[:2], values=ones[:5], lengths=ones[:4])
        validate_keyed_jagged_tensor(features)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def planned_bytes(device_type: str, optimizer: str) -> dict[str, Any]:
    """What the planner reckons a table of 1024 x 16 takes on one rank, and which tables of two are planned."""
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=1024, feature_names=[feature])
        for name, feature in (("t", "f"), ("u", "g"))
    ]
    module = EmbeddingBagCollection(tables=tables, device=META)
    kinds = {"none": None, "SGD": torch.optim.SGD, "RowWiseAdagrad": RowWiseAdagrad, "Adam": torch.optim.Adam}
    kind = kinds[optimizer]
    if kind is not None:
        apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
    topology = Topology(world_size=2, local_world_size=2, compute_device=device_type)
    constraints = {table.name: constraint("table_wise", columns=16) for table in tables}
    enumerator = EmbeddingEnumerator(topology=topology, batch_size=1, constraints=constraints)
    options = enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=1, constraints=constraints)
    plan = planner.plan(module, [EmbeddingBagCollectionSharder()])
    storage = options[0].shards[0].storage
    return {
        "bytes": storage.ddr if device_type == "cpu" else storage.hbm,
        "other": storage.hbm if device_type == "cpu" else storage.ddr,
        "planned": sorted(name for found in plan.plan.values() for name in found),
    }


def state_names(sharding: str, device_type: str) -> list[list[str]]:
    """Names under which a checkpoint finds the optimizer state of a table: parameters, and states of each."""
    model = _sharded(sharding, device_of(device_type), pooled=True, optimizer=RowWiseAdagrad)
    state = model.fused_optimizer.state_dict()["state"]
    return [sorted(state), sorted({name for of_parameter in state.values() for name in of_parameter})]


#: Tables in an order that is neither that of their dims nor that of their features, with two to a group and a shared
#: one; the sharding types cut them into several groups of lookups.
ORDER_TABLES = [("z", 24, ["c", "a"], "column_wise"), ("m", 8, ["d"], "table_wise"), ("a", 16, ["b", "f"], "row_wise")]
ORDER_TABLES += [("k", 8, ["e"], "column_wise"), ("b", 24, ["h"], "table_row_wise"), ("y", 40, ["g"], "table_wise")]
ORDER_BATCH = 5


def ordered_embeddings(device_type: str) -> list[Any]:
    """Keys and pooled embeddings of several groups of tables of several dims, for rows that differ in length."""
    device = device_of(device_type)
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=ROWS, feature_names=features)
        for name, dim, features, _ in ORDER_TABLES
    ]
    module = EmbeddingBagCollection(tables=tables, device=META)
    model = parallel(module, device, {name: kind for name, _, _, kind in ORDER_TABLES}, columns=8)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            whole = order_weights(name.split(".")[1], *value.size()).to(device)
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    ids = order_ids(dist.get_rank())
    rows = [row for feature in ids.values() for row in feature]
    features = KeyedJaggedTensor(
        keys=list(ids),
        values=torch.tensor([id_ for row in rows for id_ in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
    )
    pooled = model(features.to(device))
    return [list(pooled.keys()), pooled.values().tolist()]


def order_weights(table: str, rows: int, dim: int) -> Tensor:
    """Small integers that differ between tables, rows and columns."""
    return ((torch.arange(rows * dim) * 7 + ord(table) * 13) % 251 - 125).view(rows, dim).float()


def order_ids(rank: int) -> dict[str, list[list[int]]]:
    """Ids by feature and row; lengths 0 to 3."""
    return {
        feature: [
            [(row * 5 + place * 3 + number * 11 + rank * 2) % ROWS for place in range((row + number + rank) % 4)]
            for row in range(ORDER_BATCH)
        ]
        for number, feature in enumerate("hgfedcba")
    }
