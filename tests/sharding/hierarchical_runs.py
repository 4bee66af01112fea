"""What the tests of HierarchicalModelParallel run on four ranks; see tests/npu/ranks.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
)
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.npu.ranks import forget_groups
from tests.pipeline import small_model
from tests.sharding.hierarchical_models import (
    BAG_KEYS,
    SEQUENCE_KEYS,
    Model,
    batch_of,
    build,
    factors,
    gathered,
    gathered_states,
    local_rows,
    plan_of,
    sharders,
    trained,
)
from tests.sharding.lookup_runs import TheirBags, device_of
from tests.sharding.planned import planner
from turbogr_plugin.sharding import HierarchicalModelParallel, HierarchicalShardingPlan, cpu_topology
from turbogr_plugin.sharding.local_shards import is_cut_by_columns, is_sharded, local_shards, whole_shape
from turbogr_plugin.sharding.sparse_exchange import LookupExchange


def exactness(
    *, groups: list[int], steps: int, dyadic: bool, shared: bool = True, permuted: bool = False, **case: Any
) -> dict[str, Any]:
    """Each number of ranks in a group against TorchRec over all ranks.

    Returns:
        By group size: whether tables and losses are equal to the last bit, the largest difference over the largest
        weight, whether replicas are equal; and how far the weights have moved. `permuted`: also the difference that
        TorchRec shows when the batches go to the ranks in another order.
    """
    plain_case = {key: value for key, value in case.items() if key not in ("wire_dtype", "exchange")}
    if "wire_dtype" in case:
        case["wire_dtype"] = getattr(torch, case["wire_dtype"])
    plain = build(None, **plain_case)
    before, _ = gathered(plain, dist.get_world_size())
    losses = trained(plain, steps, dyadic=dyadic, shared=shared)
    tables, _ = gathered(plain, dist.get_world_size())
    states = gathered_states(plain, dist.get_world_size())
    assert states or case.get("optimizer") == "EXACT_SGD"
    found: dict[str, Any] = {
        "moved": min(float((tables[name] - before[name]).abs().max() / tables[name].abs().max()) for name in tables)
    }
    if permuted:
        again = build(None, **plain_case)
        trained(again, steps, dyadic=dyadic, shared=shared, permuted=True)
        theirs, _ = gathered(again, dist.get_world_size())
        found["permuted"] = _difference(tables, theirs)
    for group in groups:
        model = build(group, **case)
        own = trained(model, steps, dyadic=dyadic, shared=shared)
        theirs, replicas = gathered(model, group)
        found[str(group)] = {
            "tables": all(torch.equal(tables[name], theirs[name]) for name in tables),
            "states": _equal_states(states, gathered_states(model, group)),
            "losses": own == losses,
            "difference": _difference(tables, theirs),
            "replicas": replicas,
        }
    return found


def _equal_states(states: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """To the last bit; a state by row of a part of the columns is another with other parts."""
    same = [name for name in states if not name.endswith(" from 0") or states.keys() == others.keys()]
    return all(torch.equal(states[name], others[name]) for name in same)


def _difference(tables: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest, over the largest weight of its table."""
    return max(float((tables[name] - others[name]).abs().max() / tables[name].abs().max()) for name in tables)


def shards_of_states(*, group: int | None, sharding: str) -> dict[str, Any]:
    """What local_shards.py makes of the entries of a state dict: whether they give the tables, and more."""
    model = build(group, sharding=sharding)
    tables, _ = gathered(model, group or 4)
    state = {name: entry for name, entry in model.state_dict().items() if is_sharded(entry)}
    assert len(state) == len(tables)
    mine = {name: local_shards(entry) for name, entry in state.items()}
    assert all(shards == sorted(shards, key=lambda shard: shard[:2]) for shards in mine.values())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    same = []
    for name, entry in state.items():
        whole = torch.full(whole_shape(entry), float("nan"))
        for of_rank in every[: group or 4]:
            for row, column, values in of_rank[name]:
                whole[row : row + values.size(0), column : column + values.size(1)] = values
        same.append(torch.equal(whole, tables[name.split(".")[-2]]))
    return {
        "kinds": [type(entry).__name__ for entry in state.values()],
        "whole": all(same),
        "shapes": all(whole_shape(entry) == tables[name.split(".")[-2]].shape for name, entry in state.items()),
        "told": [is_cut_by_columns(entry) for entry in state.values()],
        "cut": [
            any(values.size(1) < whole_shape(entry)[1] for of_rank in every for *_, values in of_rank[name])
            for name, entry in state.items()
        ],
    }


def without_gradients() -> dict[str, Any]:
    """Lookups that get no gradient: on the first replica, on all, and while their graph is kept."""
    model = build(1, sharding="table_wise", optimizer="EXACT_SGD")
    assert isinstance(model, HierarchicalModelParallel)
    device, found = model.device, {}
    rank = dist.get_rank()
    keys = BAG_KEYS
    before, _ = gathered(model, 1)

    def step(learns: bool, keep: list[Any]) -> None:
        pooled = model.module.bags(batch_of(keys, 1, device, True))
        total = sum(pooled[key].sum() for key in keys)
        if learns:
            total.backward()
        keep[:] = [total.detach()]

    kept: list[Any] = []
    step(rank != 0, kept)
    after, found["replicas"] = gathered(model, 1)
    found["moved"] = not torch.equal(before["b0"], after["b0"])
    step(False, kept)
    again, _ = gathered(model, 1)
    found["stays"] = all(torch.equal(after[name], again[name]) for name in after)
    step(True, kept)
    step(rank % 2 == 0, kept)
    with torch.no_grad():
        model.module.bags(batch_of(keys, 2, device, True))
    last, found["replicas later"] = gathered(model, 1)
    found["moved later"] = not torch.equal(again["b0"], last["b0"])
    return found


def dropped_early() -> bool:
    """Whether replicas end alike where one drops the bags before it looks the sequences up, and the others learn."""
    model = build(1, sharding="table_wise", optimizer="EXACT_SGD")
    for step in range(3):
        bags = model.module.bags(batch_of(BAG_KEYS, step, model.device, True))
        loss = sum(bags[key].sum() for key in BAG_KEYS) if dist.get_rank() else torch.zeros(())
        del bags
        sequences = model.module.sequences(batch_of(SEQUENCE_KEYS, step, model.device, True))
        loss = loss + sum(sequences[key].values().sum() for key in SEQUENCE_KEYS)
        loss.backward()
        del loss, sequences
    return gathered(model, 1)[1]


def read_by_one() -> bool:
    """Whether replicas end alike where only the first reads parameters between two backward passes."""
    model = build(1, optimizer="EXACT_SGD", exchange="reduce_scatter")
    for step in range(4):
        bags = model.module.bags(batch_of(BAG_KEYS, step, model.device, True))
        sequences = model.module.sequences(batch_of(SEQUENCE_KEYS, step, model.device, True))
        bags["f0"].sum().backward()
        if dist.get_rank() == 0:
            list(model.named_parameters())
        sequences["q0"].values().sum().backward()
        if dist.get_rank() == 0:
            model.finish()
    return gathered(model, 1)[1]


def failed_exchange() -> list[str]:
    """What the ways to read tables, and a lookup, say after the exchange has failed in its thread."""
    model = build(1, optimizer="EXACT_SGD")
    finish = LookupExchange.finish

    def fail(self: LookupExchange) -> None:
        finish(self)
        raise ConnectionError("the peer is gone")

    LookupExchange.finish = fail  # type: ignore[method-assign]
    try:
        model.module.bags(batch_of(BAG_KEYS, 0, model.device, True))["f0"].sum().backward()
        found = []
        for read in (model.finish, model.state_dict, model.finish, lambda: _no_grad_lookup(model)):  # type: ignore[attr-defined]
            try:
                read()
                found.append("nothing")
            except Exception as error:
                found.append(f"{error} / {error.__cause__}")
    finally:
        LookupExchange.finish = finish  # type: ignore[method-assign]
    return found


def _no_grad_lookup(model: DistributedModelParallel) -> None:
    with torch.no_grad():
        model.module.bags(batch_of(BAG_KEYS, 1, model.device, True))["f0"].sum()


def looked_up_twice(*, group: int, backward_passes: int) -> bool:
    """Whether a module that a step looks up twice ends as TorchRec's, whose second lookup is updated first.

    Args:
        group: ranks of a group.
        backward_passes: 1 for both lookups; 2: one for each, after which the first is updated first.
    """
    keys, tables = BAG_KEYS, []
    for size in (None, group):
        model = build(size, optimizer="EXACT_ADAGRAD")
        for step in range(3):
            first = model.module.bags(batch_of(keys, step, model.device, True))
            second = model.module.bags(batch_of(keys, step + 50, model.device, True))
            losses = [sum((factors(found[key]) * found[key]).sum() for key in keys) for found in (first, second)]
            for loss in [sum(losses)] if backward_passes == 1 else losses:
                loss.backward()
        tables.append(gathered(model, size or dist.get_world_size())[0])
    return all(torch.equal(tables[0][name], tables[1][name]) for name in tables[0])


def second_gradient() -> str:
    """What a lookup says that is used for two backward passes."""
    model = build(2, optimizer="EXACT_SGD")
    found = model.module.bags(batch_of(BAG_KEYS, 0, model.device, True))
    loss = found["f0"].sum()
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def reads(*, group: int) -> dict[str, bool]:
    """Whether each way to read the tables carries out what is pending."""
    found = {}
    model = build(group, optimizer="EXACT_ADAGRAD")
    assert isinstance(model, HierarchicalModelParallel)
    keys = BAG_KEYS
    optimizer = model.fused_optimizer

    def look_up() -> None:
        with torch.no_grad():
            model.module.bags(batch_of(keys, 1, model.device, True))["f0"].sum()

    def in_inference_mode() -> None:  # in which fbgemm's tables on CPU cannot be looked up at all
        with torch.inference_mode():
            model.finish()

    ways: dict[str, Any] = {
        "a lookup": look_up,
        "in inference mode": in_inference_mode,
        "state_dict": model.state_dict,
        "of the module": model.module.state_dict,
        "of a collection": model.module.bags.state_dict,
        "eval": model.eval,
        "named_parameters": lambda: list(model.named_parameters()),
        "parameters": lambda: list(model.parameters()),
        "optimizer": lambda: model.fused_optimizer.state_dict(),
        "optimizer that was kept": optimizer.state_dict,
        "load": lambda: model.load_state_dict(model.state_dict()),
        "finish": model.finish,
    }
    for name, way in ways.items():
        model.train()
        model.module.bags(batch_of(keys, 0, model.device, True))["f0"].sum().backward()
        exchange = model._exchange
        assert exchange is not None
        pending = exchange.pending
        way()
        found[name] = pending > 0 and exchange.pending == 0
    return found


def state_dicts(path: str) -> dict[str, Any]:
    """Saved by groups of 2 and loaded by groups of 1, 2, 4 and by TorchRec; saved by TorchRec and loaded by groups."""
    import torch.distributed.checkpoint as dcp

    first = build(2)
    trained(first, 3, dyadic=True)
    expected, _ = gathered(first, 2)

    def saved(model: Any, where: str) -> None:
        dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=where)

    def loaded(model: Any, where: str) -> None:
        state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=where)
        model.load_state_dict(state["model"])
        model.fused_optimizer.load_state_dict(state["optimizer"])

    saved(first, f"{path}/groups")
    found: dict[str, Any] = {}
    trained(first, 2, dyadic=True)
    later, _ = gathered(first, 2)
    for group in (1, 2, 4, None):
        model = build(group)
        loaded(model, f"{path}/groups")
        tables, _ = gathered(model, group or 4)
        same = all(torch.equal(expected[name], tables[name]) for name in tables)
        trained(model, 2, dyadic=True)
        tables, _ = gathered(model, group or 4)
        found[str(group)] = [same, all(torch.equal(later[name], tables[name]) for name in tables)]
        if group is None:
            saved(model, f"{path}/plain")
            again = build(2)
            loaded(again, f"{path}/plain")
            read, _ = gathered(again, 2)
            found["from TorchRec"] = all(torch.equal(tables[name], read[name]) for name in read)
    return found


def _refused_collisions() -> str:
    tables = [EmbeddingConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
    collision = MCHManagedCollisionModule(8, torch.device("cpu"), LFU_EvictionPolicy(), 1)
    module = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables, device=torch.device("meta")), ManagedCollisionCollection({"t": collision}, tables)
    )
    plan = HierarchicalShardingPlan({}, group_size=2, world_size=4)
    try:
        HierarchicalModelParallel(module, plan=plan, device=torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return "made"


def refusals() -> list[str]:
    """Messages for what is not allowed."""
    forget_groups()
    messages = []
    wrong: list[dict[str, Any]] = [
        {"group": 2, "wire_dtype": torch.float64},
        {"group": 2, "exchange": "ring"},
        {"group": 2, "sync_interval": 0},
        {"group": 2, "fused_params": {"gradient_clipping": True, "max_gradient": 1.0}},
        {"group": 2, "fused_params": {"weight_decay": 0.1}, "exchange": "dense"},
        {"group": 2, "sharding": "not_fused"},
    ]
    for case in wrong:
        try:
            build(**case)
            messages.append("made")
        except ValueError as error:
            messages.append(str(error))
    messages.append(_refused_collisions())
    try:
        model, made = Model("SUM", torch.device("cpu")), sharders("EXACT_SGD")
        plan = plan_of(model, made, "row_wise", 2, torch.device("cpu"))
        plan.world_size = 8
        HierarchicalModelParallel(model, plan=plan, sharders=made, device=torch.device("cpu"))
    except ValueError as error:
        messages.append(str(error))
    return messages


def averaged() -> list[bool]:
    """With sync="average" every second time: whether replicas are equal before and after each call of `sync`."""
    model = build(2, sync="average", sync_interval=2)
    assert isinstance(model, HierarchicalModelParallel)
    found = []
    for step in range(2):
        trained(model, step + 1, dyadic=False)
        found.append(gathered(model, 2)[1])
        model.sync()
        found.append(gathered(model, 2)[1])
    return found


def pipelined(*, name: str, group: int | None, device: str = "cpu") -> list[float]:
    """Losses of one of TorchRec's pipelines, or (no name) of the plain loop, by groups or by TorchRec alone."""
    forget_groups()
    where = device_of(device)
    model = small_model.Model(where)
    tables = [value for value in model.parameters() if value.is_meta]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1, "eps": 1e-6})
    made: list[Any] = [TheirBags(), EmbeddingCollectionSharder()]
    ranks = group or dist.get_world_size()
    modules = {}
    for place, sharder in zip(("bags", "sequences"), made, strict=True):
        module = model.get_submodule(place)
        rules = {table: row_wise() for table in sharder.shardable_parameters(module)}
        modules[place] = construct_module_sharding_plan(
            module, rules, sharder, local_size=min(ranks, 2), world_size=ranks, device_type=where.type
        )
    plan = HierarchicalShardingPlan(modules, group_size=ranks, world_size=dist.get_world_size())  # type: ignore[arg-type]
    kind: Any = HierarchicalModelParallel if group else DistributedModelParallel
    sharded = kind(model, device=where, plan=plan, sharders=made)
    with torch.no_grad():
        for table, ((row, column), weights) in local_rows(sharded):
            seed = torch.Generator().manual_seed(len(table))
            whole = torch.rand(small_model.ROWS[table], small_model.DIM, generator=seed) - 0.5
            weights.copy_(whole[row : row + weights.size(0), column : column + weights.size(1)])
        for number, value in enumerate(sharded.module.logit.parameters()):
            value.copy_(torch.rand(value.shape, generator=torch.Generator().manual_seed(number)) - 0.5)
    source = small_model.batches(8, rank=dist.get_rank())
    if not name:
        return small_model.plain_losses(sharded, source, where)
    options = {"start_batch": 0} if name == "TrainPipelineSemiSync" else {}
    pipeline = getattr(train_pipelines, name)(sharded, small_model.dense_optimizer(sharded), where, **options)
    return small_model.pipeline_losses(pipeline, source)


class _Scored(nn.Module):
    """Sequences of two tables and a dense layer over each row."""

    def __init__(self, tables: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(
            [
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                for name, (rows, dim) in tables.items()
            ],
            device=torch.device("meta"),
        )
        self.over = nn.Linear(8, 3)
        with torch.no_grad():
            for number, value in enumerate(self.over.parameters()):
                value.copy_(torch.rand(value.shape, generator=torch.Generator().manual_seed(20 + number)) - 0.5)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """The sum over all rows, so that ranks with more of them weigh more."""
        scores = torch.cat([self.over(rows.values()) for rows in self.sequences(batch).values()])
        return ((scores - 0.5) ** 2).sum()


def planned(*, group: int) -> dict[str, float]:
    """A step of SGD by a plan of HierarchicalShardingPlanner, unequal batches, against one process in float64.

    Returns:
        The largest difference of a change of the tables on this rank, and of a dense gradient; the largest change.
    """
    forget_groups()
    device, rank, world = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    tables = {"a": (50, 8), "b": (30, 8)}
    keys = ["f_a", "f_b"]

    def batch(of_rank: int) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(of_rank)
        samples = of_rank  # none on rank 0
        lengths = torch.randint(0, 9, (2 * samples,), generator=generator)
        values = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor(keys, values, lengths=lengths)

    whole = {
        name: torch.rand(size, generator=torch.Generator().manual_seed(len(size))) for name, size in tables.items()
    }
    module = _Scored(tables)
    expected = {name: rows.double().requires_grad_() for name, rows in whole.items()}
    over = copy.deepcopy(module.over).double()
    for other in range(world):
        ids = batch(other)
        scores = torch.cat([over(expected[name][ids[f"f_{name}"].values()]) for name in tables])
        (((scores - 0.5) ** 2).sum() / world).backward()  # TorchRec takes the mean over ranks

    made = [EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0})]
    topology = cpu_topology(ranks_per_node=2, nodes=world // 2, memory_bytes=1 << 30, intra=1e9, inter=1e7)
    plan = planner(topology, group_size=group).collective_plan(module, made, dist.group.WORLD)
    text = str(plan)
    model = HierarchicalModelParallel(module, plan=plan, sharders=made, device=device)
    assert str(plan) == text
    with torch.no_grad():
        for name, ((row, column), weights) in local_rows(model):
            weights.copy_(whole[name][row : row + weights.size(0), column : column + weights.size(1)])
    model(batch(rank)).backward()
    model.finish()
    error = moved = 0.0
    for name, ((row, column), weights) in local_rows(model):
        grad = expected[name].grad
        assert grad is not None
        part = (slice(row, row + weights.size(0)), slice(column, column + weights.size(1)))
        change = weights.double() - whole[name][part].double()
        error = max(error, float((change + grad[part]).abs().max()))
        moved = max(moved, float(grad.abs().max()))
    dense = 0.0
    for value, plain in zip(model.module.over.parameters(), over.parameters(), strict=True):
        dense = max(dense, float((value.grad - plain.grad).abs().max() / plain.grad.abs().max()))
    return {"error": error, "moved": moved, "dense": dense}
