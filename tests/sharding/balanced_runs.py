"""What runs on several ranks for test_balanced_batches.py; see tests/npu/ranks.py.

The content of a sample is a function of its number, so that whoever gets it can tell whether it arrived whole.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from turbogr_plugin.backend.rank_exchange import RankExchange
from turbogr_plugin.sharding.balanced_batches import BalancedBatches
from turbogr_plugin.sharding.cost_calibration import StepTimes
from turbogr_plugin.sharding.sequence_cost import SequenceCost
from turbogr_plugin.sharding.step_plans import ReallocationPlan

ROWS, DIM = 24, 4


@dataclass
class Samples:
    """A batch with a part of every kind."""

    numbers: Tensor
    ids: KeyedJaggedTensor
    extra: dict[str, Any]


def length_of(number: int) -> int:
    """Tokens of a sample: very unequal, some none."""
    return (number * number * 7) % 41 * (number % 4)


def ids_of(number: int) -> tuple[list[int], list[int], list[int]]:
    """Ids of the keys `item` and `other`, and jagged values besides."""
    items = [(number * 5 + place) % ROWS for place in range(length_of(number))]
    return items, [number % ROWS] * (number % 3), [number, number + 1][: number % 2 + 1]


def batch_of_numbers(numbers: list[int]) -> Samples:
    """The batch of some samples."""
    parts = [ids_of(number) for number in numbers]
    by_key = [[part[key] for part in parts] for key in (0, 1)]
    values = torch.tensor([each for rows in by_key for row in rows for each in row], dtype=torch.int64)
    lengths = torch.tensor([len(row) for rows in by_key for row in rows], dtype=torch.int32)
    weights = values.float() / 8
    jagged = [part[2] for part in parts]
    column = torch.tensor(numbers, dtype=torch.int64)
    return Samples(
        numbers=column,
        ids=KeyedJaggedTensor(["item", "other"], values, weights, lengths=lengths, stride=len(numbers)),
        extra={
            "half": torch.stack([column, -column], dim=1).to(torch.bfloat16),
            "even": column % 2 == 0,
            "nothing": None,
            "jagged": (
                JaggedTensor(
                    torch.tensor([each for row in jagged for each in row], dtype=torch.int16),
                    lengths=torch.tensor([len(row) for row in jagged], dtype=torch.int64),
                ),
                torch.zeros(len(numbers), 2, 0),
            ),
        },
    )


def same(one: Samples, other: Samples) -> bool:
    """Whether two batches are equal in every part, dtypes included."""
    first, second = one.extra["jagged"][0], other.extra["jagged"][0]
    pairs = [
        (one.numbers, other.numbers),
        (one.ids.values(), other.ids.values()),
        (one.ids.lengths(), other.ids.lengths()),
        (one.ids.weights(), other.ids.weights()),
        (one.extra["half"], other.extra["half"]),
        (one.extra["even"], other.extra["even"]),
        (first.values(), second.values()),
        (first.lengths(), second.lengths()),
        (one.extra["jagged"][1], other.extra["jagged"][1]),
    ]
    structure = one.ids.keys() == other.ids.keys() and one.ids.stride() == other.ids.stride()
    return structure and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def _tokens(batch: Samples) -> Tensor:
    return batch.ids["item"].lengths()


def _stream(sizes: list[int], rank: int) -> Iterator[Samples]:
    """Batches of these sizes, of samples whose numbers no other rank has."""
    first = 1000 * rank
    for size in sizes:
        yield batch_of_numbers(list(range(first, first + size)))
        first += size


def balance_each(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`balance` for several cases, one after the other."""
    return {name: balance(**case) for name, case in cases.items()}


def resume_each(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`resume` for several cases, one after the other."""
    return {name: resume(**case) for name, case in cases.items()}


def fail_each(cases: list[str]) -> dict[str, dict[str, Any]]:
    """`fail` for several cases, one after the other."""
    return {how: fail(how) for how in cases}


def resume(sizes: list[list[int]], **options: Any) -> dict[str, Any]:
    """What follows each position, saved ahead of what is given, and what an uninterrupted run gives."""
    rank = dist.get_rank()

    def start(drawn: int) -> BalancedBatches[Samples]:
        stream = itertools.islice(_stream(sizes[rank], rank), drawn, None)
        return BalancedBatches(stream, lengths=_tokens, cost=SequenceCost(linear=1.0, quadratic=0.01), **options)

    first = start(0)
    states, numbers = [first.state_dict()], []
    for batch in first:
        numbers.append(batch.numbers.tolist())
        states.append(first.state_dict())
    later = [first.state_dict(step=step) for step in range(len(numbers) + 1)]
    following = []
    for state in states:
        again = start(state["drawn"])
        again.load_state_dict(state)
        following.append([batch.numbers.tolist() for batch in again])
        assert again.state_dict()["step"] == len(numbers)
    return {"numbers": numbers, "following": following, "same": later == states}


def balance(sizes: list[list[int]], **options: Any) -> dict[str, Any]:
    """Balances streams of batches of `sizes` by rank.

    Returns:
        numbers by batch of this rank, and whether each batch is what its numbers say.
    """
    rank = dist.get_rank()
    batches = BalancedBatches(
        _stream(sizes[rank], rank), lengths=_tokens, cost=SequenceCost(linear=1.0, quadratic=0.01), **options
    )
    numbers, whole = [], []
    for batch in batches:
        numbers.append(batch.numbers.tolist())
        whole.append(same(batch, batch_of_numbers(batch.numbers.tolist())))
    again = list(batches)
    return {"numbers": numbers, "whole": whole, "again": len(again)}


def fail(how: str) -> dict[str, Any]:
    """What each rank raises when rank 1 fails, and how long it takes."""
    rank = dist.get_rank()

    def broken() -> Iterator[Any]:
        yield batch_of_numbers([1, 2, 3])
        if how == "file":
            raise OSError("shard-1.parquet is gone")
        if how == "structure":
            changed = batch_of_numbers([4, 5, 6])
            changed.numbers = changed.numbers.int()
            yield changed
        if how == "long":
            yield batch_of_numbers([39, 40, 115])

    options: dict[str, Any] = {"memory_limit": {"long": 110, "limit": 80}[how]} if how in ("long", "limit") else {}
    if how == "options":
        options["seed"] = rank // 2
    lengths = (lambda batch: batch.numbers[:1]) if how == "lengths" and rank == 1 else _tokens
    batches = BalancedBatches(
        broken() if rank == 1 else _stream([3, 3, 3], rank), lengths=lengths, cost=SequenceCost.tokens(), **options
    )
    if how == "dtype":
        start = batch_of_numbers([1])
        start.numbers = start.numbers.int() if rank == 1 else start.numbers
        batches = BalancedBatches(iter([start]), lengths=_tokens, cost=SequenceCost.tokens())
    began = time.monotonic()
    try:
        list(batches)
    except Exception as error:
        return {"raised": type(error).__name__, "message": f"{error}", "seconds": time.monotonic() - began}
    return {"raised": None}


def compare_plans() -> dict[str, str]:
    """What is said when the ranks' plans are the same, or those of rank 2 have other costs or another seed."""
    exchange, said = RankExchange(torch.device("cpu")), {}
    odd = int(dist.get_rank() == 2)
    for name, costs, seed in (("same", 5, 0), ("costs", 5 + odd, 0), ("seed", 5, odd)):
        plan = ReallocationPlan([1, 2, costs], ranks=4, global_batch_size=2, seed=seed)
        try:
            plan.check_agreement(exchange)
            said[name] = ""
        except ValueError as error:
            said[name] = f"{error}"
    return said


def calibrate() -> list[float]:
    """The cost model fitted from steps that each rank recorded for itself; rank 1 has none."""
    rank = dist.get_rank()
    times = StepTimes()
    for step in range(0 if rank == 1 else 12):
        lengths = [length_of(100 * rank + 7 * step + sample) for sample in range(5)]
        times.record(lengths, 0.5 + sum(2e-3 * length + 1e-5 * length**2 for length in lengths))
    fitted = times.fit(RankExchange(torch.device("cpu")))
    return [fitted.cost.linear, fitted.cost.quadratic, fitted.overhead, fitted.steps]


class _Sum(nn.Module):
    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """As TorchRec's pipelines want it: the loss, and what else there is."""
        found = self.tables(ids)
        loss = found["item"].values().sum() + found["other"].values().sum()
        return loss, loss.detach()


def _ids(batch: Samples) -> KeyedJaggedTensor:
    return batch.ids


def train(balanced: bool, sharding: str, device_type: str) -> list[list[float]]:
    """The table after training by TorchRec's pipeline on unequal streams, balanced or as each rank read them.

    Every gradient is a small dyadic number, so that the order of summation does not matter.
    """
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    rank = dist.get_rank()
    device = torch.device("cpu")
    if device_type == "npu":
        torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
    config = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item", "other"])
    tables = EmbeddingCollection(device=torch.device("meta"), tables=[config])
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 1 / 8})
    sharder = EmbeddingCollectionSharder()
    how = row_wise() if sharding == "row_wise" else table_wise(rank=0)
    plan = construct_module_sharding_plan(tables, {"t": how}, sharder, world_size=2, device_type=device_type)
    model = DistributedModelParallel(
        _Sum(tables), device=device, plan=ShardingPlan(plan={"tables": plan}), sharders=[sharder]
    )
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    stream = _stream([[1, 5, 1], [1, 0, 6]][rank], rank)
    batches: Iterator[KeyedJaggedTensor] = (batch.ids for batch in stream)
    if balanced:
        batches = BalancedBatches(
            stream, lengths=_tokens, cost=SequenceCost.tokens(), group=dist.new_group(backend="gloo"), finish=_ids
        )
    pipeline: Any = TrainPipelineSparseDist(model, model.fused_optimizer, device)
    with suppress(StopIteration):
        while True:
            pipeline.progress(batches)
    (weight,) = model.state_dict().values()
    found = torch.zeros(ROWS, DIM)
    for shard in weight.local_shards():
        first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        found[first : first + rows] = shard.tensor.cpu()
    dist.all_reduce(found)
    rows: list[list[float]] = found.tolist()
    return rows
