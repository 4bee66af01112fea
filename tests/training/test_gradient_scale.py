"""Loss and gradients of unequal ranks against one process in float64, and initial values of sharded tables.

One group of two processes runs all cases (starting a process costs seconds of imports) and notes the outcome of each.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests import forked
from tests.data.small_store import random_sequences, write_small_store
from turbogr_plugin.backend.collectives import on_first_rank, process_group
from turbogr_plugin.data.batch import ITEM, NEGATIVE, SequenceBatch, collate_sequences
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.models.hstu import HSTUConfig
from turbogr_plugin.models.retrieval import ITEM_TABLE, LossConfig, RetrievalHead, SequentialRetriever
from turbogr_plugin.negatives.uniform import NegativesConfig
from turbogr_plugin.sharding import keyed_init
from turbogr_plugin.sharding.constraints import sequence_table_constraints
from turbogr_plugin.sharding.keyed_init import init_sharded_tables, keyed_normal_rows
from turbogr_plugin.training.gradient_scale import GlobalMean, SumDataParallelWrapper
from turbogr_plugin.training.task import RetrievalTask

WORLD_SIZE = 2
ITEMS, DIM, SEED = 23, 8, 6
WEIGHT = f"model.item_embeddings.embeddings.{ITEM_TABLE}.weight"
NEGATIVES = NegativesConfig(count=6, sharing="sequence")
LOSS = LossConfig(temperature=0.2)
#: Of the tables. Large, so that the change of a weight, which is rounded to that of the weight, keeps its digits.
LEARNING_RATE = 8.0

#: Per step: (user, length) of the samples of rank 0 and of rank 1.
STEPS = {
    "unequal": ([(0, 7), (3, 2), (5, 4)], [(1, 3)]),
    "one_without_targets": ([(0, 3), (2, 5)], [(4, 1), (6, 1)]),
    "one_without_samples": ([(7, 6), (1, 2)], []),
    "nobody_with_targets": ([(7, 1)], [(2, 1)]),
}


def _batch(store: InteractionStore, samples: list[tuple[int, int]], step: int) -> SequenceBatch:
    users = np.array([user for user, _ in samples], dtype=np.int64)
    starts = np.asarray(store.offsets)[users]
    ends = starts + np.array([length for _, length in samples], dtype=np.int64)
    return collate_sequences(store, users, starts, ends, negatives=NEGATIVES, seed=SEED, epoch=0, step=step)


def _whole(weight: Tensor | ShardedTensor, shape: tuple[int, int], group: dist.ProcessGroup) -> Tensor:
    """A table of any sharding, put together without the code under test; NaN where no rank holds an element."""
    whole, holders = torch.zeros(shape), torch.zeros(shape)
    assert isinstance(weight, ShardedTensor)
    for shard in weight.local_shards():
        part = tuple(
            slice(start, start + size)
            for start, size in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        )
        whole[part] = shard.tensor
        holders[part] += 1
    dist.all_reduce(whole, group=group)
    dist.all_reduce(holders, group=group)
    return torch.where(holders == 1, whole, float("nan"))


def _assert_near(found: Tensor, expected: Tensor, name: str) -> None:
    """Equal to float32's rounding.

    Logits reach 1 / temperature = 5 with an error of some 1e-6 after two blocks, of which the softmax makes a relative
    error; sums over some 20 targets add theirs. Elements far below the largest are differences of such terms, so the
    error is measured against the largest. A wrong scale (a count of one rank, an average over ranks) is off by tens of
    per cent.
    """
    error = float((found.double() - expected).abs().max())
    largest = float(expected.abs().max())
    assert error <= 2e-5 * largest, f"{name}: error {error:.3g} against a largest element of {largest:.3g}"


class Cases:
    """Each public method is a case; they run in this order on both ranks."""

    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, group.rank()
        self.store = write_small_store(
            folder / f"store-{self.rank}", [row * 3 for row in random_sequences(8, ITEMS, seed=2)], num_items=ITEMS
        )
        self.config = HSTUConfig(dim=DIM, blocks=2, heads=2, qk_dim=3, value_dim=5, max_length=10, time_buckets=9)

    def _sharded(self, sharding: str) -> DistributedModelParallel:
        torch.manual_seed(SEED)
        retriever = SequentialRetriever(
            self.config, num_items=ITEMS, loss=LOSS, sharing=NEGATIVES.sharing, device=torch.device("meta")
        )
        tables = retriever.item_embeddings.parameters()
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": LEARNING_RATE})
        sharders = [EmbeddingCollectionSharder()]
        task = RetrievalTask(retriever, self.group)
        plan = EmbeddingShardingPlanner(
            topology=Topology(world_size=WORLD_SIZE, compute_device="cpu", local_world_size=WORLD_SIZE),
            constraints={ITEM_TABLE: ParameterConstraints(sharding_types=[sharding])},
        ).collective_plan(task, sharders, self.group)
        return DistributedModelParallel(
            task,
            env=ShardingEnv.from_process_group(self.group),
            device=torch.device("cpu"),
            plan=plan,
            sharders=sharders,
            data_parallel_wrapper=SumDataParallelWrapper(),
        )

    def _table(self, model: DistributedModelParallel) -> Tensor:
        return _whole(model.state_dict()[WEIGHT], (ITEMS, DIM), self.group).double()

    def _single_process(
        self, dense: dict[str, Tensor], table: Tensor, samples: list[tuple[int, int]], step: int
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss, dense gradients and table gradient of the whole global batch by plain autograd in float64."""
        head = RetrievalHead(self.config, LOSS, NEGATIVES.sharing, torch.float32).double()
        head.load_state_dict(dense)
        table = table.clone().requires_grad_()
        batch = _batch(self.store, samples, step)
        looked_up = {
            ITEM: JaggedTensor(values=table[batch.item_ids], offsets=batch.offsets),
            NEGATIVE: JaggedTensor(
                values=table[batch.negative_ids], lengths=torch.tensor([batch.negative_ids.numel()])
            ),
        }
        loss = head(looked_up, batch) / max(1, batch.query_index.numel())
        loss.backward()
        gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
        assert table.grad is not None
        return loss.detach(), gradients, table.grad

    def _compare(self, sharding: str, steps: list[str]) -> None:
        model = self._sharded(sharding)
        dense = {
            name.removeprefix("model.head."): value.double()
            for name, value in model.state_dict().items()
            if name != WEIGHT
        }
        for step, name in enumerate(steps):
            ranks = STEPS[name]
            init_sharded_tables(model, {WEIGHT: ITEM_TABLE}, seed=SEED, std=0.5)
            before = self._table(model)
            for parameter in model.parameters():
                parameter.grad = None
            loss, detached = model(_batch(self.store, ranks[self.rank], step))
            loss.backward()
            assert torch.equal(loss.detach(), detached)
            total = detached.clone()
            dist.all_reduce(total, group=self.group)
            expected_loss, expected_dense, expected_table = self._single_process(
                dense, before, [*ranks[0], *ranks[1]], step
            )
            _assert_near(total, expected_loss, f"{name}: sum of the losses")
            found_dense = {
                n.removeprefix("model.head."): p.grad
                for n, p in model.named_parameters()
                if n != WEIGHT and p.grad is not None
            }
            found_dense = {n.split("model.head.")[-1]: g for n, g in found_dense.items()}
            assert found_dense.keys() == expected_dense.keys() == dense.keys(), f"{name}: {sorted(found_dense)}"
            for n, expected in expected_dense.items():
                _assert_near(found_dense[n], expected, f"{name}: {n}")
            table_gradient = (before - self._table(model)) / LEARNING_RATE
            _assert_near(table_gradient, expected_table, f"{name}: item table")
            if name == "nobody_with_targets":
                assert total.item() == 0
                assert not expected_table.any()
            else:
                assert expected_table.any()

    def gradients_of_a_row_wise_table_equal_one_process(self) -> None:
        self._compare("row_wise", list(STEPS))

    def gradients_of_a_table_wise_table_equal_one_process(self) -> None:
        # DDP keeps what it sees of the graph in the first step: here that of nobody and of empty ranks.
        self._compare("table_wise", list(reversed(STEPS)))

    def initial_values_are_those_of_the_whole_table_in_any_plan(self) -> None:
        tables = {"rows": (37, "row_wise"), "whole": (20, "table_wise"), "columns": (24, "column_wise")}
        tables["few"] = (1, "row_wise")  # of one row, a rank holds nothing
        dim = 16
        model = nn.Module()
        model.embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                for name, (rows, _) in tables.items()
            ],
            device=torch.device("meta"),
        )
        sharders = [EmbeddingCollectionSharder()]
        plan = EmbeddingShardingPlanner(
            topology=Topology(world_size=WORLD_SIZE, compute_device="cpu", local_world_size=WORLD_SIZE),
            constraints={
                name: ParameterConstraints(sharding_types=[sharding], min_partition=dim // 2)
                for name, (_, sharding) in tables.items()
            },
        ).collective_plan(model, sharders, self.group)
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(self.group),
            device=torch.device("cpu"),
            plan=plan,
            sharders=sharders,
        )
        names = {f"embeddings.embeddings.{name}.weight": name for name in tables}
        with mock.patch.object(keyed_init, "_CHUNK_ROWS", 8):  # several pieces, the last one cut short
            init_sharded_tables(sharded, names, seed=5, std=0.3)
        state = sharded.state_dict()
        for path, name in names.items():
            rows = tables[name][0]
            expected = keyed_normal_rows(name, torch.arange(rows), dim, seed=5, std=0.3)
            # A rank that holds none of a table may not list it; all ranks take part in putting it together.
            assert torch.equal(_whole(state[path], (rows, dim), self.group), expected), name

    def the_planner_keeps_to_the_constraints_of_sequence_tables(self) -> None:
        model = nn.Module()
        model.embeddings = EmbeddingCollection(
            tables=[
                # Small enough for data_parallel and wide enough for column_wise, which a free planner may prefer.
                EmbeddingConfig(name="small", num_embeddings=4, embedding_dim=512, feature_names=["f"])
            ],
            device=torch.device("meta"),
        )
        plan = EmbeddingShardingPlanner(
            topology=Topology(world_size=WORLD_SIZE, compute_device="cpu", local_world_size=WORLD_SIZE),
            constraints=sequence_table_constraints(["small"]),
        ).collective_plan(model, [EmbeddingCollectionSharder()], self.group)
        assert plan.plan["embeddings"]["small"].sharding_type in ("row_wise", "table_wise")

    def the_first_rank_works_alone_and_keeps_its_result(self) -> None:
        ran: list[int] = []

        def work() -> str:
            ran.append(self.rank)
            return "done"

        assert on_first_rank(work, self.group) == ("done" if self.rank == 0 else None)
        assert ran == ([0] if self.rank == 0 else [])

    def bad_input_on_the_first_rank_is_raised_on_all(self) -> None:
        def work() -> None:
            raise InputError("no such folder: /nowhere")

        with pytest.raises(InputError, match=r"^no such folder: /nowhere$"):
            on_first_rank(work, self.group)

    def another_failure_of_the_first_rank_reaches_all(self) -> None:
        def work() -> None:
            raise KeyError("lost")

        expected = KeyError if self.rank == 0 else RuntimeError
        with pytest.raises(expected, match="lost" if self.rank == 0 else r"rank 0 failed: 'lost'"):
            on_first_rank(work, self.group)


CASES = [name for name in vars(Cases) if not name.startswith("_")]


def _rank_main(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    outcomes: dict[str, str] = {}

    def note(name: str, outcome: str) -> None:
        outcomes[name] = outcome
        (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))

    try:
        with process_group(torch.device("cpu"), timeout=timedelta(seconds=40)) as group:
            assert (group.rank(), group.size()) == (rank, WORLD_SIZE)
            cases = Cases(folder, group)
            for name in CASES:
                case: Callable[[], None] = getattr(cases, name)
                try:
                    case()
                except BaseException:
                    note(name, traceback.format_exc())
                    break  # the ranks are out of step
                note(name, "passed")
    except BaseException:
        note("setup", traceback.format_exc())
    os._exit(0)  # destructors would wait for a rank that has failed


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = forked.context()
    processes = [context.Process(target=_rank_main, args=(rank, folder, port)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.is_alive():
            process.kill()
            process.join()
    noted: list[dict[str, Any]] = []
    for rank, process in enumerate(processes):
        file = folder / f"outcomes-{rank}.json"
        noted.append(json.loads(file.read_text()) if file.exists() else {"setup": f"exit code {process.exitcode}"})
    return noted


@pytest.mark.timeout(110)
@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(outcomes: list[dict[str, str]], case: str) -> None:
    for rank, of_rank in enumerate(outcomes):
        assert "setup" not in of_rank, of_rank["setup"]
        outcome = of_rank.get(case, "not reached: an earlier case failed")
        assert outcome == "passed", f"rank {rank}: {outcome}"


def test_the_sample_reduction_weights_the_means_of_ranks_by_their_samples() -> None:
    mean = GlobalMean("sample")
    ranks = [
        (torch.tensor(12.0), 6, 2),
        (torch.tensor(0.0), 0, 1),
        (torch.tensor(35.0), 7, 5),
    ]  # loss, targets, samples
    total = torch.tensor(float(sum(mean.counted(targets=t, samples=s) for _, t, s in ranks)), dtype=torch.float64)
    shares = [mean(loss, targets, samples, (total, None)) for loss, targets, samples in ranks]
    assert float(total) == 8
    torch.testing.assert_close(sum(shares), torch.tensor(2 / 8 * (12 / 6) + 5 / 8 * (35 / 7)))


def test_the_target_reduction_is_the_mean_over_all_targets() -> None:
    mean = GlobalMean("target")
    assert mean.counted(targets=6, samples=2) == 6
    total = torch.tensor(13.0, dtype=torch.float64)
    shares = [mean(torch.tensor(loss), 6, 2, (total, None)) for loss in (12.0, 35.0)]
    torch.testing.assert_close(sum(shares), torch.tensor(47 / 13))
