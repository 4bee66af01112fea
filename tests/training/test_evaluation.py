"""Sharded evaluation and top K against one full score matrix, on one process and on two and three gloo processes.

Weights and queries are small integers, so every product is exact, ties are plenty and ranks are compared for equality.
One spawned group of three runs everything, the cases of two ranks in a process group of its first two: starting a
process costs seconds of imports.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from tests import forked
from turbogr_plugin.backend.rank_exchange import RankExchange
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.evaluation import EvaluationQueries, evaluate, top_k
from turbogr_plugin.training.item_corpus import ItemCorpus, ItemShard, local_item_rows
from turbogr_plugin.training.metrics import ranking_metrics

CPU = torch.device("cpu")
DIM = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One evaluation, made from its seed in parent and ranks alike.

    `borders` are the rows where a rank's shard begins or ends; `steps` are the users per step of each rank.
    """

    seed: int
    num_items: int
    borders: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    chunk_items: int
    normalize: bool = False
    k: int = 5

    @property
    def name(self) -> str:
        kind = "normalized" if self.normalize else "plain"
        return f"seed{self.seed}-{self.borders}-{self.steps}-chunk{self.chunk_items}-k{self.k}-{kind}"

    def table(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.normalize:  # signed unit vectors times powers of two: exact before and after normalisation
            axes = torch.eye(DIM)[torch.randint(DIM, (self.num_items,), generator=generator)]
            return (
                axes * torch.tensor([-4.0, 0.5, 1.0, 2.0])[torch.randint(4, (self.num_items, 1), generator=generator)]
            )
        return torch.randint(-2, 3, (self.num_items, DIM), generator=generator).float()

    def users(self, rank: int) -> Iterator[Tensor]:
        """Users of each step of a rank: numbered through, but backwards, so that the result's order is not theirs."""
        first = 100 - sum(sum(steps) for steps in self.steps[:rank])
        for count in self.steps[rank]:
            yield torch.arange(first, first - count, -1)
            first -= count

    def all_users(self) -> Tensor:
        return torch.cat([users for rank in range(len(self.steps)) for users in self.users(rank)] or [torch.zeros(0)])

    def ask(self, users: Tensor) -> EvaluationQueries:
        """Query, target and history depend on the user alone."""
        queries, targets, histories = [torch.zeros(0, DIM)], [torch.zeros(0, dtype=torch.int64)], []
        for user in users.tolist():
            generator = torch.Generator().manual_seed(1000 * self.seed + user)
            queries.append(torch.randint(-2, 3, (1, DIM), generator=generator).float())
            targets.append(torch.randint(self.num_items, (1,), generator=generator))
            length = int(torch.randint(self.num_items, (1,), generator=generator)) if user % 3 else 0
            histories.append(torch.randint(self.num_items, (length,), generator=generator))
        lengths = torch.tensor([0, *(len(history) for history in histories)])
        values = torch.cat([torch.zeros(0, dtype=torch.int64), *histories])
        return EvaluationQueries(
            queries=torch.cat(queries),
            users=users,
            targets=torch.cat(targets),
            seen_values=values,
            seen_offsets=lengths.cumsum(0),
        )

    def corpus(self, rank: int, group: dist.ProcessGroup | None = None) -> ItemCorpus:
        first, last = self.borders[rank : rank + 2]
        # Two shards a rank, handed over in the wrong order: tables may be cut finer than ranks.
        middle = (first + last) // 2
        table = self.table()
        shards = [ItemShard(middle, table[middle:last]), ItemShard(first, table[first:middle])]
        return ItemCorpus(
            shards,
            num_items=self.num_items,
            device=CPU,
            normalize=self.normalize,
            chunk_items=self.chunk_items,
            process_group=group,
        )

    def full_scores(self, queries: Tensor) -> Tensor:
        table = self.table().double()
        if self.normalize:
            table = table / table.norm(dim=1, keepdim=True)
        return queries.double() @ table.T


def cases(world_size: int) -> list[Case]:
    """Uneven rows and users, ranks without rows, without users and with fewer steps; chunk sizes 1, 7 and huge."""
    layouts: dict[int, list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]] = {
        1: [((0, 23), ((3, 0, 5),)), ((0, 23), ((1,),))],
        2: [
            ((0, 9, 23), ((3, 4), (1, 0, 2, 6))),
            ((0, 0, 23), ((5,), ())),
            ((0, 22, 23), ((0, 0), (4,))),
        ],
        3: [
            ((0, 4, 5, 23), ((3, 1), (), (7,))),
            ((0, 23, 23, 23), ((), (2, 2, 2), ())),
            ((0, 8, 16, 23), ((1,), (0,), (5, 0, 1))),
        ],
    }
    made: list[Case] = []
    for number, (borders, steps) in enumerate(layouts[world_size]):
        for chunk_items, normalize in ((1, False), (7, False), (7, True), (10**6, False)):
            made.append(
                Case(
                    seed=number,
                    num_items=23,
                    borders=borders,
                    steps=steps,
                    chunk_items=chunk_items,
                    normalize=normalize,
                    k=(5, 1, 30)[len(made) % 3],  # a few, one, more than there are items
                )
            )
    return made


def evaluate_case(case: Case, rank: int, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Run by every rank: evaluation, and top K of the rank's users in one call."""
    corpus = case.corpus(rank, group)
    calls = 0

    def encode(users: Tensor) -> EvaluationQueries:
        nonlocal calls
        calls += 1
        corpus.exchange.sum_(torch.ones(1))  # stands for the lookup's collectives: hangs if a rank skips a call
        return case.ask(users)

    empty = torch.zeros(0, dtype=torch.int64)
    result = evaluate(encode, case.users(rank), corpus, empty_batch=empty, cutoffs=(1, 10))
    own = torch.cat([empty, *case.users(rank)])
    asked = case.ask(own)
    top = top_k(corpus, asked.queries, asked.seen_values, asked.seen_offsets, case.k)
    return {
        "users": result.users,
        "filtered_ranks": result.filtered_ranks,
        "unfiltered_ranks": result.unfiltered_ranks,
        "filtered": result.filtered,
        "unfiltered": result.unfiltered,
        "calls": calls,
        "own": own,
        "top_items": top.items,
        "top_scores": top.scores,
    }


def check_against_full_scores(case: Case, by_rank: list[dict[str, Any]]) -> None:
    """The oracle: sort all items of one float64 score matrix by (-score, item)."""
    users = case.all_users().sort().values
    asked = case.ask(users)
    scores = case.full_scores(asked.queries).tolist()
    filtered, unfiltered, best = [], [], {}
    for row, (user, target) in enumerate(zip(users.tolist(), asked.targets.tolist(), strict=True)):
        seen = set(asked.seen_values[asked.seen_offsets[row] : asked.seen_offsets[row + 1]].tolist())
        order = sorted(range(case.num_items), key=lambda item: (-scores[row][item], item))
        unfiltered.append(order.index(target) + 1)
        filtered.append([item for item in order if item == target or item not in seen].index(target) + 1)
        unseen = [(item, scores[row][item]) for item in order if item not in seen]
        best[user] = (unseen + [(-1, float("-inf"))] * case.k)[: case.k]
    steps = max(len(steps) for steps in case.steps)
    for rank, result in enumerate(by_rank):
        where = f"rank {rank} of {case.name}"
        assert result["users"].tolist() == users.tolist(), where
        assert result["filtered_ranks"].tolist() == filtered, where
        assert result["unfiltered_ranks"].tolist() == unfiltered, where
        assert result["filtered"] == ranking_metrics(torch.tensor(filtered), (1, 10)), where
        assert result["unfiltered"] == ranking_metrics(torch.tensor(unfiltered), (1, 10)), where
        assert result["calls"] == steps, where
        for row, user in enumerate(result["own"].tolist()):
            assert result["top_items"][row].tolist() == [item for item, _ in best[user]], where
            assert result["top_scores"][row].tolist() == [score for _, score in best[user]], where


def failures(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    """Errors that one rank alone could see; every rank tells what it got, and the group goes on after each."""
    case = cases(2)[0]
    corpus = case.corpus(rank, group)
    empty = torch.zeros(0, dtype=torch.int64)
    told: dict[str, str] = {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            told[name] = "nothing was raised"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    def broken_batches() -> Iterator[Tensor]:
        yield torch.arange(50, 52) + 10 * rank
        if rank == 1:
            raise OSError("the disk is gone")

    def bad_target(users: Tensor) -> EvaluationQueries:
        asked = case.ask(users)
        if rank == 1:
            asked.targets[0] = 23
        return asked

    def nan_query(users: Tensor) -> EvaluationQueries:
        asked = case.ask(users)
        if rank == 0:
            asked.queries[0, 0] = torch.nan
        return asked

    def run(encode: Any, batches: Any) -> None:
        evaluate(encode, batches, corpus, empty_batch=empty)

    one_user = [torch.tensor([50 + rank])]
    attempt("broken batches", lambda: run(case.ask, broken_batches()))
    attempt("bad target", lambda: run(bad_target, one_user))
    attempt("nan", lambda: run(nan_query, one_user))
    attempt("no users", lambda: run(case.ask, []))
    attempt("same user twice", lambda: run(case.ask, [torch.tensor([7])]))
    asked = case.ask(one_user[0])
    nan_queries = asked.queries * (torch.nan if rank == 1 else 1.0)
    attempt("nan in top k", lambda: top_k(corpus, nan_queries, asked.seen_values, asked.seen_offsets, 3))
    attempt("other k", lambda: top_k(corpus, asked.queries, asked.seen_values, asked.seen_offsets, 3 + rank))
    attempt("k of 0", lambda: top_k(corpus, asked.queries, asked.seen_values, asked.seen_offsets, rank))
    rows = torch.zeros(4, DIM)

    def open_corpus(first_row: int, rows: Tensor, num_items: int) -> None:
        ItemCorpus([ItemShard(first_row, rows)], num_items=num_items, device=CPU, process_group=group)

    attempt("row missing", lambda: open_corpus(5 * rank, rows, 9))
    attempt("row twice", lambda: open_corpus(3 * rank, rows, 7))
    attempt("rows end early", lambda: open_corpus(4 * rank, rows, 9))
    attempt("other dim", lambda: open_corpus(4 * rank, rows[:, rank:], 8))
    return told


def torchrec_tables(group: dist.ProcessGroup) -> dict[str, Any]:
    """The rows that `local_item_rows` finds in TorchRec's own state, per sharding type."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection

    fused = EmbeddingComputeKernel.FUSED.value
    choices = {
        "row_wise": row_wise(compute_kernel=fused),
        "table_wise": table_wise(rank=1, compute_kernel=fused),
        "data_parallel": data_parallel(),
        "column_wise": column_wise(ranks=[0, 1], compute_kernel=fused),
    }
    found: dict[str, Any] = {}
    for name, choice in choices.items():
        config = EmbeddingConfig(name="item_table", num_embeddings=11, embedding_dim=8, feature_names=["item"])
        collection = EmbeddingCollection(tables=[config], device=CPU)
        sharder = EmbeddingCollectionSharder()
        plan = construct_module_sharding_plan(
            collection, {"item_table": choice}, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
        )
        sharded = sharder.shard(collection, plan, ShardingEnv.from_process_group(group), device=CPU)
        entry = sharded.state_dict()["embeddings.item_table.weight"]
        try:
            shards = local_item_rows(entry, 11, process_group=group)
        except InputError as error:
            found[name] = str(error)
            continue
        # The rows are live views: what is written to them is what the module's state then holds.
        for first_row, rows in shards:
            rows.copy_(torch.arange(first_row, first_row + len(rows)).float()[:, None].expand(-1, 8))
        entry = sharded.state_dict()["embeddings.item_table.weight"]
        again = local_item_rows(entry, 11, process_group=group)
        corpus = ItemCorpus(again, num_items=11, device=CPU, process_group=group)
        found[name] = [(first, len(rows), rows[:, 0].tolist()) for first, rows in corpus.chunks()]
        try:
            local_item_rows(entry, 12)
        except InputError as error:
            found[f"{name} of another store"] = str(error)
    return found


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=3,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        told: dict[str, Any] = {case.name: evaluate_case(case, rank) for case in cases(3)}
        pair = dist.new_group([0, 1])
        if rank < 2:
            told.update({case.name: evaluate_case(case, rank, pair) for case in cases(2)})
            told["failures"] = failures(rank, pair)
            told["torchrec"] = torchrec_tables(pair)
        torch.save(told, f"{folder}/rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def told_by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    forked.context()  # the server that the next line forks from
    start_processes(run_rank, args=(str(folder),), nprocs=3, daemon=True, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.mark.parametrize("case", cases(1), ids=lambda case: case.name)
def test_one_process_ranks_and_recommends_as_the_full_score_matrix_does(case: Case) -> None:
    check_against_full_scores(case, [evaluate_case(case, rank=0)])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_ranks_and_recommends_as_the_full_score_matrix_does(
    world_size: int, told_by_rank: list[dict[str, Any]]
) -> None:
    for case in cases(world_size):
        check_against_full_scores(case, [told[case.name] for told in told_by_rank[:world_size]])


@pytest.mark.timeout(120)
def test_error_on_one_rank_is_raised_on_every_rank_and_nothing_hangs(told_by_rank: list[dict[str, Any]]) -> None:
    first, second = (told["failures"] for told in told_by_rank[:2])
    assert second["broken batches"] == "OSError: the disk is gone"
    assert first["broken batches"] == (
        "RuntimeError: rank 1 failed while reading an evaluation batch: OSError: the disk is gone"
    )
    assert second["bad target"].startswith("ValueError: targets holds 1 item indices outside 0 ... 22, the first is 23")
    assert first["bad target"].startswith("RuntimeError: rank 1 failed while checking the evaluation queries: ")
    assert first["k of 0"] == "InputError: k is 0; at least one item has to be asked for"
    assert second["k of 0"].startswith("InputError: rank 0 failed while checking the queries: InputError: k is 0")
    same = {
        "nan": "InputError: 23 scores and 1 of 2 target scores are NaN",
        "nan in top k": "InputError: 23 scores are NaN",
        "no users": "InputError: there is no user to evaluate",
        "same user twice": "ValueError: user 7 was evaluated twice",
        "other k": "ValueError: k differs between ranks: [3, 4]",
        "row missing": "ValueError: item rows 4 ... 4 are held by no rank",
        "row twice": "ValueError: item rows 3 ... 3 are held twice",
        "rows end early": "ValueError: item rows end at 8; the corpus has 9 items",
        "other dim": "ValueError: item rows of all ranks have dims [3, 4]",
    }
    for name, message in same.items():
        assert first[name].startswith(message), name
        assert second[name] == first[name], name


@pytest.mark.timeout(120)
def test_rows_are_found_in_torchrecs_state_for_every_sharding_type_that_keeps_rows_whole(
    told_by_rank: list[dict[str, Any]],
) -> None:
    first, second = (told["torchrec"] for told in told_by_rank[:2])

    def held(begin: int, end: int) -> list[tuple[int, int, list[float]]]:
        return [(begin, end - begin, [float(row) for row in range(begin, end)])]

    assert (first["row_wise"], second["row_wise"]) == (held(0, 6), held(6, 11))
    assert (first["table_wise"], second["table_wise"]) == ([], held(0, 11))
    assert (first["data_parallel"], second["data_parallel"]) == (held(0, 5), held(5, 11))
    assert first["column_wise"] == second["column_wise"]
    assert "row_wise, table_row_wise, table_wise and data_parallel" in first["column_wise"]
    for name in ("row_wise", "table_wise", "data_parallel"):
        assert "shape [11, 8], the corpus has 12 items" in first[f"{name} of another store"]


def test_unsharded_table_is_scored_whole_and_other_types_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    assert [(first, rows.shape) for first, rows in local_item_rows(weight, 3)] == [(0, (3, 2))]
    with pytest.raises(TypeError, match="list"):
        local_item_rows([1.0], 3)


def test_scores_ignore_a_callers_autocast_and_bf16_tables_are_read_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    table, queries = torch.randn(50, DIM, generator=generator).bfloat16(), torch.randn(3, DIM, generator=generator)
    corpus = ItemCorpus([ItemShard(0, table)], num_items=50, device=CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = corpus.score(queries, table)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), queries.double() @ table.double().T, rtol=1e-5, atol=1e-6)


def test_process_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ValueError, match="not initialized"):
        RankExchange(CPU, process_group=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["chunk_items", "num_items"])
def test_sizes_below_one_are_named(argument: str) -> None:
    sizes: dict[str, Any] = {"num_items": 3, argument: 0}
    with pytest.raises(InputError, match=f"{argument} is 0"):
        ItemCorpus([ItemShard(0, torch.zeros(3, DIM))], device=CPU, **sizes)
