"""Models of groups of ranks, and what their tables hold, for hierarchical_runs.py; on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.npu.ranks import forget_groups
from tests.sharding.lookup_runs import OurBags, TheirBags, device_of
from turbogr_plugin.sharding import HierarchicalModelParallel, HierarchicalShardingPlan
from turbogr_plugin.sharding.jagged_lookup import table_modules
from turbogr_plugin.sharding.jagged_sharders import JaggedEmbeddingCollectionSharder

BAGS: dict[str, tuple[int, int, list[str]]] = {
    "b0": (64, 8, ["f0", "f3"]),
    "b1": (48, 8, ["f1"]),
    "b2": (40, 12, ["f2"]),
}
SEQUENCES: dict[str, tuple[int, int, list[str]]] = {"s0": (64, 8, ["q0"]), "s1": (80, 8, ["q1", "q2"])}
TABLES = BAGS | SEQUENCES
ROWS = {feature: rows for rows, _, features in TABLES.values() for feature in features}
BATCH = 4
BAG_KEYS = ["f0", "f1", "f2", "f3"]
SEQUENCE_KEYS = ["q0", "q1", "q2"]


class Model(nn.Module):
    """Bags of three tables of two widths, sequences of two tables, and a dense layer."""

    def __init__(self, pooling: str, device: torch.device) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=features,
                    pooling=PoolingType[pooling],
                )
                for name, (rows, dim, features) in BAGS.items()
            ],
            device=meta,
        )
        self.sequences = EmbeddingCollection(
            [
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
                for name, (rows, dim, features) in SEQUENCES.items()
            ],
            device=meta,
        )
        torch.manual_seed(1)
        self.over = nn.Linear(8 * 3 + 12 + 8 * 3, 1).to(device)

    def parts(self, bags: KeyedJaggedTensor, sequences: KeyedJaggedTensor) -> list[Tensor]:
        pooled, found = self.bags(bags), self.sequences(sequences)
        # by key: the order inside of values() depends on the sharding
        return [pooled[key] for key in BAG_KEYS] + [found[key].values() for key in SEQUENCE_KEYS]

    def forward(self, bags: KeyedJaggedTensor, sequences: KeyedJaggedTensor, dyadic: bool) -> Tensor:
        parts = self.parts(bags, sequences)
        if dyadic:  # linear in the rows, with small dyadic factors: so are all gradients, and sums are exact
            return (
                sum((factors(part) * part).sum() for part in parts) + 0 * self.over.weight.sum() + self.over.bias.sum()
            )
        lengths = [sequences[key].lengths() for key in SEQUENCE_KEYS]
        rows = [
            torch.stack([piece.tanh().sum(0) for piece in part.split(length.tolist())])
            for part, length in zip(parts[4:], lengths, strict=True)
        ]
        return self.over(torch.cat([*parts[:4], *rows], dim=1)).tanh().square().mean()


def factors(part: Tensor) -> Tensor:
    rows = torch.arange(part.size(0), device=part.device)[:, None] % 3
    columns = torch.arange(part.size(1), device=part.device) % 4
    return (rows + columns - 2).float() / 4


def sharders(optimizer: str, ours: bool = False, **fused_params: Any) -> list[Any]:
    """With our lookup in the tables, or with fbgemm's."""
    given = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.125, **fused_params}
    if ours:
        return [OurBags(fused_params=given), JaggedEmbeddingCollectionSharder(fused_params=given)]
    return [TheirBags(fused_params=given), EmbeddingCollectionSharder(fused_params=given)]


def plan_of(model: Model, made: list[Any], sharding: str, group: int, device: torch.device, **extra: Any) -> Any:
    """All tables sharded alike inside a group."""
    modules = {}
    for (name, module), sharder in zip((("bags", model.bags), ("sequences", model.sequences)), made, strict=True):
        rules = {
            table: {
                "row_wise": lambda at: row_wise(compute_kernel="fused"),
                "not_fused": lambda at: row_wise(compute_kernel="dense"),
                "table_wise": lambda at: table_wise(rank=at % group, compute_kernel="fused"),
                "column_wise": lambda at: column_wise(ranks=[0, group - 1], compute_kernel="fused"),
                # fbgemm pools data-parallel sequences on CPU by mistake
                "data_parallel": lambda at, name=name: (
                    data_parallel() if name == "bags" and at else row_wise(compute_kernel="fused")
                ),
            }[sharding](at)
            for at, table in enumerate(sharder.shardable_parameters(module))
        }
        modules[name] = construct_module_sharding_plan(
            module, rules, sharder, local_size=min(group, 2), world_size=group, device_type=device.type
        )
    return HierarchicalShardingPlan(
        modules,
        group_size=group,
        world_size=dist.get_world_size(),
        **extra,  # type: ignore[arg-type]
    )


def build(
    group: int | None,
    *,
    sharding: str = "row_wise",
    optimizer: str = "EXACT_ROWWISE_ADAGRAD",
    pooling: str = "SUM",
    device: str = "cpu",
    sync: str = "exact",
    ours: bool = False,
    fused_params: dict[str, Any] | None = None,
    **arguments: Any,
) -> DistributedModelParallel:
    """A model of groups; None: TorchRec's own, over all ranks."""
    forget_groups()
    where = device_of(device)
    model, made = Model(pooling, where), sharders(optimizer, ours, **(fused_params or {}))
    plan = plan_of(model, made, sharding, group or dist.get_world_size(), where, sync=sync)
    kind: Any = HierarchicalModelParallel if group else DistributedModelParallel
    found = kind(model, device=where, plan=plan, sharders=made, **(arguments if group else {}))
    with torch.no_grad():
        for name, ((row, column), weights) in local_rows(found):
            whole = torch.randint(-8, 9, TABLES[name][:2], generator=torch.Generator().manual_seed(7)) / 16
            weights.copy_(whole[row : row + weights.size(0), column : column + weights.size(1)])
    return found  # type: ignore[no-any-return]


def local_rows(model: nn.Module) -> list[tuple[str, tuple[tuple[int, int], Tensor]]]:
    """(table, where its rows begin, rows) on this rank; they share memory with the tables."""
    found = []
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            for kernel in lookup.modules():
                if hasattr(kernel, "_emb_module") and hasattr(kernel, "_row_offset"):
                    for config, row, column, weights in zip(
                        kernel.config.embedding_tables,
                        kernel._row_offset,
                        kernel._col_offset,
                        kernel._emb_module.split_embedding_weights(),
                        strict=True,
                    ):
                        found.append((config.name, ((row, column), weights)))
    return found


def local_states(model: nn.Module) -> list[Tensor]:
    found = []
    for tables in table_modules(model):
        if hasattr(tables, "split_optimizer_states"):
            found += [state for states in tables.split_optimizer_states() for state in states]
    return found


def gathered(model: nn.Module, group: int) -> tuple[dict[str, Tensor], bool]:
    """The tables of the first group, and whether those and the states of the others are the same to the last bit."""
    if hasattr(model, "finish"):
        model.finish()
    mine = (
        [(name, place, rows.detach().cpu().clone()) for name, (place, rows) in local_rows(model)],
        [state.detach().cpu().clone() for state in local_states(model)],
    )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole = {name: torch.full(TABLES[name][:2], float("nan")) for name in TABLES}
    for rows_of_rank, _ in every[:group]:
        for name, (row, column), rows in rows_of_rank:
            whole[name][row : row + rows.size(0), column : column + rows.size(1)] = rows
    equal = all(
        all(
            torch.equal(ours[2], theirs[2]) for ours, theirs in zip(every[rank % group][0], every[rank][0], strict=True)
        )
        and all(map(torch.equal, every[rank % group][1], every[rank][1]))
        for rank in range(len(every))
    )
    return whole, equal


def gathered_states(model: nn.Module, group: int) -> dict[str, Tensor]:
    """The optimizer's state of the first group: of elements by table, of rows by table and first column."""
    if hasattr(model, "finish"):
        model.finish()
    mine = []
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            for kernel in lookup.modules():
                if not (hasattr(kernel, "_row_offset") and hasattr(kernel._emb_module, "split_optimizer_states")):
                    continue
                of_tables = kernel._emb_module.split_optimizer_states()
                places = zip(kernel.config.embedding_tables, kernel._row_offset, kernel._col_offset, strict=True)
                # SGD has none, and then no entries.
                for (config, row, column), states in zip(places, of_tables, strict=bool(of_tables)):
                    mine += [(config.name, n, row, column, each.detach().cpu()) for n, each in enumerate(states)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole: dict[str, Tensor] = {}
    for name, number, row, column, state in [each for of_rank in every[:group] for each in of_rank]:
        by_row = state.dim() == 1
        key, size = f"{name} {number}" + f" from {column}" * by_row, TABLES[name][: 1 if by_row else 2]
        target = whole.setdefault(key, torch.full(size, float("nan")))
        if by_row:
            target[row : row + state.size(0)] = state
        else:
            target[row : row + state.size(0), column : column + state.size(1)] = state
    return whole


def batch_of(
    keys: list[str], step: int, device: torch.device, shared: bool, permuted: bool = False
) -> KeyedJaggedTensor:
    """This rank's ids: skewed, or (not shared) of rows that no other rank looks up."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rank = world - 1 - rank if permuted else rank
    generator = torch.Generator().manual_seed(1000 * rank + step)
    lengths = torch.randint(0, 5, (len(keys), BATCH), generator=generator)
    if step % 10 == 3 and rank in (1, 2):
        lengths.zero_()  # ranks without a single id
    values = []
    for key, count in zip(keys, lengths.sum(1).tolist(), strict=True):
        drawn = torch.rand(count, generator=generator) ** 3
        values.append((drawn * ROWS[key]).long() if shared else (drawn * ROWS[key] / world).long() * world + rank)
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=lengths.view(-1)).to(device)


def trained(
    model: DistributedModelParallel, steps: int, *, dyadic: bool, shared: bool = True, permuted: bool = False
) -> list[float]:
    """Losses."""
    device = model.device
    dense = torch.optim.SGD(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.125)
    optimizer = model.fused_optimizer
    losses = []
    for step in range(steps):
        bags = batch_of(BAG_KEYS, step, device, shared, permuted)
        sequences = batch_of(SEQUENCE_KEYS, step + 500, device, shared, permuted)
        dense.zero_grad()
        for given in optimizer.param_groups:
            given["lr"] = (0.125, 0.0625, 0.25)[step // 2 % 3]
        optimizer.step()  # while the update of the last step may be under way
        loss = model(bags, sequences, dyadic)
        loss.backward()
        dense.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()
