"""Checkpoints of a sharded model on two gloo ranks: resuming, resharding, and errors and kills of one rank.

One group of two processes runs all cases (starting a process costs seconds of imports) and notes the outcome of each; a
rank alone in a subgroup is the run on one rank. The last case kills a rank.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardingEnv

from tests import forked
from turbogr_plugin.errors import InputError
from turbogr_plugin.training import safetensors_storage
from turbogr_plugin.training.checkpoints import (
    initialize_optimizer_state,
    latest_checkpoint,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from turbogr_plugin.training.optimizers import OptimizerConfig, build_optimizer, fuse_table_optimizer

TABLES = {"rows": (37, "row_wise"), "whole": (20, "table_wise"), "columns": (24, "column_wise"), "few": (1, "row_wise")}
"""Rows and sharding of each table. 37 rows divide unevenly; of the one row, a rank holds nothing."""
DIM = 16


class Model(nn.Module):
    """Sequence embeddings of four tables, summed over a row, dropout, a linear layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f_{name}"])
            for name, (rows, _) in TABLES.items()
        ]
        self.embeddings = EmbeddingCollection(tables=tables, device=torch.device("meta"))
        self.dropout = nn.Dropout(0.3)
        self.hidden = nn.Linear(DIM, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        looked_up = self.embeddings(features)
        rows = [
            torch.segment_reduce(looked_up[key].values(), "sum", lengths=looked_up[key].lengths(), initial=0)
            for key in (f"f_{name}" for name in TABLES)
        ]
        outputs = self.out(torch.relu(self.hidden(self.dropout(torch.stack(rows).sum(0))))).squeeze(1)
        return (outputs - labels).square().mean()


def _batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(TABLES), 8), generator=generator)
    values = [
        torch.randint(0, rows, (int(lengths[i].sum()),), generator=generator)
        for i, (rows, _) in enumerate(TABLES.values())
    ]
    keys = [f"f_{name}" for name in TABLES]
    return (
        KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=lengths.flatten()),
        torch.randn(8, generator=generator),
    )


class Run:
    """A sharded model with both optimizers, on the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, *, seed: int, hidden: int = 6) -> None:
        torch.manual_seed(seed)
        self.group, self.rank = group, dist.get_rank(group)
        world_size = dist.get_world_size(group)
        sharders = [EmbeddingCollectionSharder()]
        model = Model(hidden)
        config = OptimizerConfig(learning_rate=0.02, table_learning_rate=0.3, weight_decay=0.1, warmup_steps=8)
        fuse_table_optimizer(model.embeddings.parameters(), config)
        constraints = {
            name: ParameterConstraints(sharding_types=[sharding], min_partition=DIM // 2)
            for name, (_, sharding) in TABLES.items()
        }
        topology = Topology(world_size=world_size, compute_device="cpu", local_world_size=world_size)
        plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).collective_plan(
            model, sharders, group
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(group),
            device=torch.device("cpu"),
            plan=plan,
            sharders=sharders,
        )
        self.optimizer = build_optimizer(self.model, config)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(*_batch(step, self.rank))
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def evaluate(self, ranks: list[int]) -> float:
        """Mean loss over the evaluation batches of these ranks, without dropout."""
        self.model.eval()
        losses = [self.model(*_batch(99, rank)).item() for rank in ranks]
        self.model.train()
        return sum(losses) / len(losses)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def full_state(self) -> dict[str, Tensor]:
        """Every tensor of any rank whole, put together without the code under test."""
        own: dict[str, Any] = dict(_tensors(self.state()))
        shapes = {path: list(t.metadata().size) for path, t in own.items() if isinstance(t, ShardedTensor)}
        of_ranks: list[dict[str, list[int]]] = [{}] * dist.get_world_size(self.group)
        dist.all_gather_object(of_ranks, shapes, group=self.group)
        whole = {path: tensor.detach().clone() for path, tensor in own.items() if path not in shapes}
        for path, shape in sorted({path: shape for shapes in of_ranks for path, shape in shapes.items()}.items()):
            whole[path] = torch.zeros(shape)
            for shard in own[path].local_shards() if path in own else ():
                spans = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                whole[path][tuple(slice(start, start + size) for start, size in spans)] = shard.tensor
            dist.all_reduce(whole[path], group=self.group)
        return whole

    def save(self, directory: Path, step: int) -> Path:
        return save_checkpoint(
            directory,
            step=step,
            state=self.state(),
            per_rank=rng_state(),
            extra={"position": step * 16},
            process_group=self.group,
        )

    def resume(self, directory: Path) -> dict[str, Any]:
        found = latest_checkpoint(directory)
        assert found is not None
        initialize_optimizer_state(self.optimizer)
        state, own = self.state(), rng_state()
        extra = load_checkpoint(found, state, per_rank=own, process_group=self.group)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_rng_state(own)
        return extra


def _tensors(state: dict[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _tensors(value, f"{path}{key}/")
        else:
            yield f"{path}{key}", value


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert torch.equal(found[path], tensor), path


def _raised(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _same_on_all_ranks(error: Exception | None) -> None:
    told: list[Any] = [None, None]
    dist.all_gather_object(told, (type(error).__name__, str(error)))
    assert told[0] == told[1]


class Cases:
    """The cases, in the order in which they run; each must leave the group usable (but for the last)."""

    def __init__(self, folder: Path) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.world, self.rank, self.two, self.one = world, dist.get_rank(), folder / "two", folder / "one"
        self.alone = dist.new_group([0])
        run = Run(world, seed=1)
        run.train(range(3))
        run.save(self.two, 3)
        self.saved = run.full_state()
        self.evaluated = run.evaluate([0, 1])
        self.after = run.train(range(3, 6))

    def resumed_on_the_same_ranks_the_losses_are_bit_equal(self) -> None:
        assert any("momentum1" in path for path in self.saved)
        assert any("exp_avg_sq" in path for path in self.saved)
        assert sum("__warmup" in path for path in self.saved) == 2
        run = Run(self.world, seed=2)
        assert run.resume(self.two) == {"position": 48}
        _assert_same(run.full_state(), self.saved)
        rates = [group["lr"] for group in run.optimizer.param_groups]
        assert all(0.1 < rate / full < 1 for rate, full in zip(rates, [0.3] * (len(rates) - 1) + [0.02], strict=True))
        assert run.train(range(3, 6)) == self.after

    def two_ranks_resume_on_one_with_all_values(self) -> None:
        if self.rank == 0:
            run = Run(self.alone, seed=3)
            before = torch.get_rng_state()
            assert run.resume(self.two) == {"position": 48}
            assert torch.equal(torch.get_rng_state(), before), "another number of ranks keeps its own generator"
            _assert_same(run.full_state(), self.saved)
            assert run.evaluate([0, 1]) == pytest.approx(self.evaluated, rel=1e-5)
            losses = run.train(range(3, 6))
            assert max(losses) < 100
            run.save(self.one, 6)
            torch.save(run.full_state(), self.one / "expected.pt")
        dist.barrier()

    def one_rank_resumes_on_two_with_all_values(self) -> None:
        run = Run(self.world, seed=4)
        run.resume(self.one)
        _assert_same(run.full_state(), torch.load(self.one / "expected.pt"))
        losses = run.train(range(6, 9))
        assert max(losses) < 100
        run.save(self.one, 9)
        dist.barrier()

    def a_checkpoint_of_another_model_is_refused_on_every_rank(self) -> None:
        run = Run(self.world, seed=5, hidden=7)
        before = run.full_state()
        error = _raised(lambda: run.resume(self.two))
        assert isinstance(error, InputError)
        assert "model.hidden.weight has the shape [6, 16], the model [7, 16]" in str(error)
        _same_on_all_ranks(error)
        after = run.full_state()
        _assert_same(
            {k: v for k, v in after.items() if "model/" in k}, {k: v for k, v in before.items() if "model/" in k}
        )

    def no_pickle_is_loaded(self) -> None:
        assert {file.suffix for file in (self.two / "step-00000003").iterdir()} == {".json", ".safetensors"}
        plain = self.two.parent / f"plain-{self.rank}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_saver.save({"a": torch.zeros(1)}, checkpoint_id=plain, no_dist=True)
        run = Run(self.world, seed=6)
        refuse = mock.Mock(side_effect=AssertionError("a pickle is loaded"))
        with (
            mock.patch.object(pickle, "load", refuse),
            mock.patch.object(pickle, "loads", refuse),
            mock.patch.object(pickle, "Unpickler", refuse),
            mock.patch.object(torch, "load", refuse),
        ):
            run.resume(self.two)
            assert refuse.call_count == 0
            # The same patches do catch torch's own storage.
            logging.disable(logging.WARNING)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(CheckpointException):
                    state_dict_loader.load({"a": torch.zeros(1)}, checkpoint_id=plain, no_dist=True)
            logging.disable(logging.NOTSET)
            assert refuse.call_count > 0
        _assert_same(run.full_state(), self.saved)

    def a_full_disk_on_one_rank_is_an_error_on_all_and_the_former_stays(self) -> None:
        run = Run(self.world, seed=7)
        run.resume(self.two)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for failing_rank, function in [(1, "_write_tensor"), (0, "_write_tensor"), (0, "write_json")]:
            with (
                mock.patch.object(safetensors_storage, function, side_effect=full)
                if self.rank == failing_rank
                else (mock.MagicMock())
            ):
                error = _raised(lambda: run.save(self.two, 4))
            assert isinstance(error, InputError), error
            assert "No space left on device" in str(error)
            assert f"rank {failing_rank}" in str(error)
            _same_on_all_ranks(error)
            assert [entry.name for entry in self.two.iterdir()] == ["step-00000003"]
            dist.barrier()
        run.save(self.two, 4)  # the group and the folder are in order
        _assert_same(run.full_state(), self.saved)

    def tensors_of_a_device_mesh_are_kept_with_several_shards_per_rank(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(24.0).reshape(3, 8)

        def state(scale: float) -> dict[str, Any]:
            columns = (whole * scale)[:, 4 * self.rank : 4 * self.rank + 4]
            pieces = LocalShardsWrapper(
                [columns[:, :1].clone(), columns[:, 1:].clone()], [(0, 4 * self.rank), (0, 4 * self.rank + 1)]
            )
            wrapped = DTensor.from_local(
                pieces, mesh, [Shard(1)], run_check=False, shape=whole.size(), stride=whole.stride()
            )
            return {"model": {"rows": distribute_tensor(whole * scale, mesh, [Shard(0)]), "pieces": wrapped}}

        folder = self.two.parent / "mesh"
        save_checkpoint(folder, step=1, state=state(1), extra={}, process_group=self.world)
        loaded, found = state(0), latest_checkpoint(folder)
        assert found is not None
        load_checkpoint(found, loaded, process_group=self.world)
        assert torch.equal(loaded["model"]["rows"].full_tensor(), whole)
        assert torch.equal(
            torch.cat(loaded["model"]["pieces"].to_local().local_shards(), 1), whole[:, 4 * self.rank :][:, :4]
        )
        plain = {"model": {"rows": torch.zeros(3, 8), "pieces": torch.zeros(3, 8)}}
        load_checkpoint(found, plain, process_group=self.world)
        assert torch.equal(plain["model"]["rows"], whole)
        assert torch.equal(plain["model"]["pieces"], whole)

    def state_that_cannot_be_stored_on_one_rank_is_an_error_on_all(self) -> None:
        state = {"model": {"weight": torch.zeros(2), "odd": object() if self.rank == 1 else 1}}
        error = _raised(lambda: save_checkpoint(self.two, step=5, state=state, extra={}, process_group=self.world))
        assert isinstance(error, TypeError)
        assert "rank 1: model.odd" in str(error)
        _same_on_all_ranks(error)

    def a_file_that_one_rank_cannot_read_is_an_error_on_all(self) -> None:
        run = Run(self.world, seed=8)
        unreadable = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
        with mock.patch.object(safetensors_storage, "safe_open", unreadable) if self.rank == 1 else mock.MagicMock():
            error = _raised(lambda: run.resume(self.two))
        assert isinstance(error, InputError)
        assert "rank 1" in str(error)
        assert "Input/output error" in str(error)
        _same_on_all_ranks(error)

    def a_rank_killed_in_the_middle_of_a_save_leaves_the_last_complete_one(self) -> None:
        run = Run(self.world, seed=9)
        run.resume(self.two)
        written = []

        def write_and_die(file: Any, tensor: Tensor) -> None:
            written.append(tensor)
            if len(written) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            file.write(bytes(tensor.numel() * tensor.element_size()))

        with (
            mock.patch.object(safetensors_storage, "_write_tensor", write_and_die)
            if self.rank == 1
            else (mock.MagicMock())
        ):
            error = _raised(lambda: run.save(self.two, 5))
        assert error is not None, "the surviving rank must not believe in the checkpoint"
        found = latest_checkpoint(self.two)
        assert found is not None
        assert found.step == 4


CASES = [name for name in vars(Cases) if not name.startswith("_")]
KILLING = CASES[-1]


def _rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    outcomes: dict[str, str] = {}

    def note(name: str, outcome: str) -> None:
        outcomes[name] = outcome
        (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        cases = Cases(folder)
        for name in CASES:
            note(name, "begun")
            try:
                getattr(cases, name)()
            except BaseException:
                note(name, traceback.format_exc())
                break  # the ranks are out of step
            note(name, "passed")
    except BaseException:
        note("setup", traceback.format_exc())
    os._exit(0)  # the group has lost a rank; its destructors would wait


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], list[int | None]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = forked.context()
    processes = [context.Process(target=_rank_main, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        if process.is_alive():
            process.kill()
            process.join()
    noted = []
    for rank, process in enumerate(processes):
        file = folder / f"outcomes-{rank}.json"
        noted.append(json.loads(file.read_text()) if file.exists() else {"setup": f"exit code {process.exitcode}"})
    return noted, [process.exitcode for process in processes]


@pytest.mark.timeout(110)
@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(outcomes: tuple[list[dict[str, str]], list[int | None]], case: str) -> None:
    noted, exit_codes = outcomes
    for rank, of_rank in enumerate(noted):
        assert "setup" not in of_rank, of_rank["setup"]
        if case == KILLING and rank == 1:
            assert of_rank.get(case) == "begun"
            assert exit_codes[1] == -signal.SIGKILL
        else:
            outcome = of_rank.get(case, "not reached: an earlier case failed")
            assert outcome == "passed", f"rank {rank}: {outcome}"
