"""Training runs on our lookup and on fbgemm's, for test_jagged_lookup.py; they run in the rank pool."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.sharding.jagged_lookup import table_modules
from turbogr_plugin.sharding.jagged_sharders import (
    JaggedEmbeddingBagCollectionSharder,
    JaggedEmbeddingCollectionSharder,
)

ROWS, DIM, BATCH = 12, 8, 6
FEATURES = ("f0", "f1", "f2")
OF_TABLE: Mapping[str, tuple[str, ...]] = {"t0": FEATURES[:1], "t1": FEATURES[1:]}


class _EveryType:
    """TorchRec's sharder of bags offers no row-wise tables on CPU, though it shards them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise", "row_wise", "column_wise", "data_parallel"]


class TheirBags(_EveryType, EmbeddingBagCollectionSharder):
    pass


class OurBags(_EveryType, JaggedEmbeddingBagCollectionSharder):
    pass


SHARDERS = {
    ("pooled", False): TheirBags,
    ("pooled", True): OurBags,
    ("sequence", False): EmbeddingCollectionSharder,
    ("sequence", True): JaggedEmbeddingCollectionSharder,
}


def device_of(device_type: str) -> torch.device:
    """This rank's."""
    if device_type == "cpu":
        return torch.device("cpu")
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("npu", int(os.environ["LOCAL_RANK"]))


def tables_of(kind: str, data_type: str = "FP32", pooling: str = "SUM", weighted: bool = False) -> nn.Module:
    """Two tables of one width, the second with two features: "pooled" or "sequence"."""
    common: list[dict[str, Any]] = [
        {
            "name": name,
            "num_embeddings": ROWS,
            "embedding_dim": DIM,
            "feature_names": list(names),
            "data_type": DataType[data_type],
        }
        for name, names in OF_TABLE.items()
    ]
    meta = torch.device("meta")
    if kind == "sequence":
        return EmbeddingCollection([EmbeddingConfig(**given) for given in common], device=meta)
    configs = [EmbeddingBagConfig(pooling=PoolingType[pooling], **given) for given in common]
    return EmbeddingBagCollection(configs, is_weighted=weighted, device=meta)


def sharded(
    tables: nn.Module, kind: str, sharding: str, device: torch.device, *, ours: bool, **fused_params: Any
) -> DistributedModelParallel:
    """On all ranks of the world, with the sharder of ours or of TorchRec."""
    world = dist.get_world_size()
    options = {"use_index_dedup": True} if fused_params.pop("dedup", False) else {}
    sharder = SHARDERS[kind, ours](fused_params=fused_params, **options)  # type: ignore[abstract]
    rules = {
        "row_wise": lambda rank: row_wise(compute_kernel="fused"),
        "table_wise": lambda rank: table_wise(rank=rank, compute_kernel="fused"),
        "on_one_rank": lambda rank: table_wise(rank=0, compute_kernel="fused"),
        "column_wise": lambda rank: column_wise(ranks=[0, world - 1], compute_kernel="fused"),
        "data_parallel": lambda rank: data_parallel(),
    }
    plan = construct_module_sharding_plan(
        tables,
        {name: rules[sharding](number % world) for number, name in enumerate(OF_TABLE)},
        sharder,  # type: ignore[arg-type]
        local_size=world,
        world_size=world,
        device_type=device.type,
    )
    model = DistributedModelParallel(
        tables,
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],  # type: ignore[list-item]
    )
    fill(model)
    return model


def local_shards(model: DistributedModelParallel) -> dict[str, tuple[list[int], Tensor]]:
    """The rows of each table on this rank, with the row and the column where they begin."""
    found = {}
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor) and not hasattr(value, "local_shards"):
            found[name] = ([0, 0], value)
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            found[f"{name} {shard.metadata.shard_offsets}"] = (list(shard.metadata.shard_offsets), shard.tensor)
    return found


@torch.no_grad()
def fill(model: DistributedModelParallel) -> None:
    """Small dyadic weights, the same wherever a row lies."""
    for (row, column), rows in local_shards(model).values():
        whole = torch.randint(-8, 9, (ROWS, DIM), generator=torch.Generator().manual_seed(5)) / 8
        rows.copy_(whole[row : row + rows.size(0), column : column + rows.size(1)])


def batch_of(step: int, weighted: bool = False) -> KeyedJaggedTensor:
    """This rank's batch: ids from half of the rows, so that most come several times; some bags are empty."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    lengths = torch.randint(0, 4, (BATCH * len(FEATURES),), generator=generator)
    count = int(lengths.sum())
    ids = torch.randint(0, ROWS // 2, (count,), generator=generator)
    weights = torch.randint(1, 5, (count,), generator=generator) / 4 if weighted else None
    return KeyedJaggedTensor(list(FEATURES), ids, weights, lengths=lengths)


def loss_of(model: nn.Module, batch: KeyedJaggedTensor) -> Tensor:
    """Linear in the rows with small dyadic factors: so are all gradients, and no order of sums changes a bit."""
    found = model(batch)
    if hasattr(found, "to_dict") and not isinstance(found, dict):
        parts = list(found.to_dict().values())
    else:
        parts = [found[feature].values() for feature in FEATURES]
    total = torch.zeros((), device=parts[0].device)
    for number, part in enumerate(parts):
        columns = torch.arange(part.size(1), device=part.device)
        factor = (columns % 3 + number - 1).float() / 4
        rows = (torch.arange(part.size(0), device=part.device) % 2 + 1).float().unsqueeze(1)
        total = total + (part.float() * factor * rows).sum()
    return total


def train(
    *,
    kind: str,
    sharding: str,
    ours: bool,
    ours_later: bool | None = None,
    optimizer: str = "EXACT_SGD",
    device: str = "cpu",
    data_type: str = "FP32",
    output: str = "fp32",
    pooling: str = "SUM",
    weighted: bool = False,
    steps: int = 6,
    **fused_params: Any,
) -> dict[str, Any]:
    """Trains; half way the state goes into a new model, on the lookup that `ours_later` says.

    Returns:
        Losses; the tables and the optimizer's state on this rank; where rows were looked up, and in which dtype.
    """
    where = device_of(device)
    fused_params = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.125, **fused_params}
    if output != "fp32":
        fused_params["output_dtype"] = SparseType(output)

    def build(mine: bool) -> DistributedModelParallel:
        made = sharded(tables_of(kind, data_type, pooling, weighted), kind, sharding, where, ours=mine, **fused_params)
        assert {type(each).__name__.startswith("Jagged") for each in table_modules(made)} <= {mine and device == "cpu"}
        return made

    dispatch._taken.clear()
    model = build(ours)
    dense = torch.optim.SGD(model.parameters(), lr=0.125) if sharding == "data_parallel" else None
    losses = []
    for step in range(steps):
        if step == steps // 2:
            state, fused = model.state_dict(), model.fused_optimizer.state_dict()
            model = build(ours if ours_later is None else ours_later)
            model.load_state_dict(state)
            model.fused_optimizer.load_state_dict(fused)
            dense = torch.optim.SGD(model.parameters(), lr=0.0625) if dense is not None else None
            for group in model.fused_optimizer.param_groups:
                group["lr"] = 0.0625
            model.fused_optimizer.step()
        loss = loss_of(model, batch_of(step, weighted).to(where))
        loss.backward()
        if dense is not None:
            dense.step()
            dense.zero_grad()
        losses.append(loss.detach())
    states = {
        name: [value.tolist() for value in _tensors(held)]
        for name, held in sorted(model.fused_optimizer.state_dict()["state"].items())
    }
    return {
        "losses": torch.stack(losses).tolist(),
        "tables": {name: rows.float().cpu().tolist() for name, (_, rows) in local_shards(model).items()},
        "states": states,
        "ours ran": "jagged_lookup" in dispatch.taken(),
    }


def _tensors(held: Any) -> list[Tensor]:
    found = []
    for _, value in sorted(held.items()):
        if hasattr(value, "local_shards"):
            found += [shard.tensor.detach().float().cpu() for shard in value.local_shards()]
        elif isinstance(value, Tensor):
            found.append(value.detach().float().cpu())
    return found


def drift(*, device: str, data_type: str, stochastic: bool, ours: bool = True, steps: int = 64) -> list[float]:
    """What rows of ones become by updates of an eighth of the distance to the next number, by element."""
    where = device_of(device)
    spacing = {"FP16": 2.0**-10, "BF16": 2.0**-7}[data_type]
    model = sharded(
        tables_of("sequence", data_type),
        "sequence",
        "row_wise",
        where,
        ours=ours,
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=spacing / 8,
        stochastic_rounding=stochastic,
    )
    with torch.no_grad():
        for _, rows in local_shards(model).values():
            rows.fill_(1.0)
    ids = torch.arange(ROWS)
    batch = KeyedJaggedTensor(["f0", "f1", "f2"], ids.repeat(2), lengths=torch.tensor([ROWS, ROWS, 0])).to(where)
    for _ in range(steps):
        found = model(batch)
        (-torch.cat([found["f0"].values(), found["f1"].values()]).float().sum()).backward()
    shards = [rows for _, rows in local_shards(model).values()]
    return [((value - 1) / spacing) for value in torch.cat(shards).float().flatten().cpu().tolist()]


def bytes_of_rows(*, kind: str, sharding: str, device: str) -> dict[str, dict[str, int]]:
    """What one step returns and sends, in fp32 and in fp16; see benchmarks/lookup/bytes.py."""
    from benchmarks.lookup import bytes as counts

    return {output: counts.count_case(kind, sharding, output, device_of(device)) for output in ("fp32", "fp16")}


def empty_rows(*, stock: bool) -> list[str]:
    """On ranks without tables: the dtype of what TorchRec's own sharders exchange, with rows in fp16."""
    from tests.stock import without
    from turbogr_plugin.sharding.adaptations import rows_without_tables

    with without(rows_without_tables.ADAPTATIONS if stock else ()):
        models = [
            sharded(tables_of(kind), kind, "on_one_rank", torch.device("cpu"), ours=False, output_dtype=SparseType.FP16)
            for kind in ("sequence", "pooled")
        ]
    return [str(lookup._dummy_embs_tensor.dtype) for model in models for lookup in model.module._lookups]


def counted_collectives() -> dict[str, int]:
    """Bytes of some collectives, by name."""
    from benchmarks.lookup.bytes import CollectiveBytes

    ranks = dist.get_world_size()
    with CollectiveBytes() as counted:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10, dtype=torch.float16))
        dist.all_reduce(torch.ones(10, dtype=torch.int64))
        received = torch.empty(3 * ranks, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(received, torch.ones(3, dtype=torch.bfloat16))
        dist.all_to_all_single(torch.empty(2 * ranks), torch.ones(2 * ranks))
    return dict(counted.sent)
