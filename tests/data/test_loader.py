from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.small_store import random_sequences, write_small_store
from turbogr_plugin.data.batch import NEGATIVE, SequenceBatch
from turbogr_plugin.data.loader import (
    EvaluationBatch,
    Held,
    TrainingSteps,
    evaluation_batch,
    evaluation_batches,
    training_batches,
)
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.negatives.uniform import NegativesConfig

MAX_LENGTH = 4
GLOBAL_BATCH = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> InteractionStore:
    rows = [[1, 2, 3], *random_sequences(24, 30, seed=1), [4, 5, 6]]
    return write_small_store(tmp_path_factory.mktemp("loader") / "store", rows)


def _steps(store: InteractionStore, *, rank: int = 0, world_size: int = 1, **changes: Any) -> TrainingSteps:
    arguments: dict[str, Any] = {
        "max_length": MAX_LENGTH,
        "global_batch_size": GLOBAL_BATCH,
        "negatives": NegativesConfig(count=3),
        "seed": 9,
    }
    return TrainingSteps(store, rank=rank, world_size=world_size, **{**arguments, **changes})


def _trainable(store: InteractionStore) -> list[int]:
    return [user for user in range(store.num_users) if len(store.sequence(user)[0]) >= 4]


def _rows(batch: SequenceBatch) -> list[tuple[int, list[int], list[int], list[int]]]:
    """(user, items, times, negatives) of each sample."""
    sizes = batch.offsets.diff().tolist()
    negative_sizes = batch.features[NEGATIVE].lengths().tolist() if sizes else []
    parts = (
        batch.sample_ids.tolist(),
        (part.tolist() for part in batch.item_ids.split(sizes)),
        (part.tolist() for part in batch.times.split(sizes)),
        (part.tolist() for part in batch.negative_ids.split(negative_sizes)),
    )
    return list(zip(*parts, strict=True)) if sizes else []


def _same(first: SequenceBatch, second: SequenceBatch) -> bool:
    return _rows(first) == _rows(second) and first.step == second.step and first.seed == second.seed


def test_a_sample_is_the_latest_part_of_the_history_without_the_two_held_out_items(store: InteractionStore) -> None:
    steps = _steps(store)
    for step in range(steps.steps_per_epoch):
        batch = steps[step]
        assert batch.step == step
        for user, items, times, _ in _rows(batch):
            history, history_times = (part.tolist()[:-2][-(MAX_LENGTH + 1) :] for part in store.sequence(user))
            assert items == history
            assert times == history_times
        assert steps.tokens_of_step(step) == batch.tokens


def test_every_user_with_two_training_interactions_comes_once_per_epoch(store: InteractionStore) -> None:
    steps = _steps(store)
    expected = _trainable(store)
    assert 0 < len(expected) < store.num_users
    assert steps.steps_per_epoch == -(-len(expected) // GLOBAL_BATCH)
    orders = []
    for epoch in range(3):
        of_epoch = range(epoch * steps.steps_per_epoch, (epoch + 1) * steps.steps_per_epoch)
        order = [user for step in of_epoch for user in steps[step].sample_ids.tolist()]
        assert sorted(order) == expected
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_the_global_batch_out_in_as_many_steps(store: InteractionStore, world_size: int) -> None:
    alone = _steps(store)
    ranks = [_steps(store, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {rank.steps_per_epoch for rank in ranks} == {alone.steps_per_epoch}
    for step in (0, alone.steps_per_epoch - 1, alone.steps_per_epoch, 2 * alone.steps_per_epoch + 1):
        parts = [_rows(rank[step]) for rank in ranks]
        whole = _rows(alone[step])
        for r, part in enumerate(parts):
            assert part == whole[r::world_size]
        assert {rank.tokens_of_step(step) for rank in ranks} == {alone[step].tokens}


def test_a_rank_without_samples_in_the_last_step_gets_an_empty_batch(store: InteractionStore) -> None:
    size = len(_trainable(store)) - 1  # leaves one sample for the second step
    last = _steps(store, rank=1, world_size=2, global_batch_size=size)[1]
    assert last.tokens == 0 and last.sample_ids.numel() == 0 and last.step == 1


@pytest.mark.parametrize("first", [0, 1, 4, 7])
def test_batches_from_a_step_on_equal_those_of_the_whole_run(store: InteractionStore, first: int) -> None:
    last = 9
    whole = [_steps(store)[step] for step in range(last)]
    resumed = list(training_batches(_steps(store), first, last, workers=0))
    assert len(resumed) == last - first
    assert all(_same(a, b) for a, b in zip(resumed, whole[first:], strict=True))


def test_worker_processes_give_the_same_batches_in_order(store: InteractionStore) -> None:
    expected = list(training_batches(_steps(store), 1, 8, workers=0))
    found = list(training_batches(_steps(store), 1, 8, workers=2))
    assert [batch.step for batch in found] == list(range(1, 8))
    assert all(_same(a, b) for a, b in zip(found, expected, strict=True))


def test_batches_leave_the_global_random_generator_alone(store: InteractionStore) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    list(training_batches(_steps(store), 0, 3, workers=0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]  # noqa: NPY002


def test_seeds_give_other_orders_and_negatives(store: InteractionStore) -> None:
    one, other = _steps(store), _steps(store, seed=10)
    assert one.users_of_step(0).tolist() != other.users_of_step(0).tolist()
    everything = {"global_batch_size": 100}
    negatives = [
        {row[0]: row[3] for row in _rows(steps[step])}
        for steps, step in [
            (_steps(store, **everything), 0),
            (_steps(store, **everything), 1),
            (_steps(store, seed=10, **everything), 0),
        ]
    ]
    for user in _trainable(store):
        assert len({tuple(drawn[user]) for drawn in negatives}) == 3


def test_a_store_with_nothing_to_predict_is_refused(tmp_path: Path) -> None:
    store = write_small_store(tmp_path / "store", [[0, 1, 2], [2, 1, 0]])
    with pytest.raises(InputError, match=r"store has no user with two training interactions"):
        _steps(store)


def test_a_batch_size_below_one_is_refused(store: InteractionStore) -> None:
    with pytest.raises(ValueError, match="global_batch_size must be at least 1, got 0"):
        _steps(store, global_batch_size=0)


WITHHELD: dict[Held | None, int] = {"validation": 2, "test": 1, None: 0}


@pytest.mark.parametrize("held", list(WITHHELD))
def test_evaluation_gives_the_history_before_the_target(store: InteractionStore, held: Held | None) -> None:
    users = np.array([0, 5, 3, 24, 25])
    batch = evaluation_batch(store, users, held, max_length=MAX_LENGTH)
    seen = batch.seen_values.split(batch.seen_offsets.diff().tolist())
    rows = [(user, items, times) for user, items, times, _ in _rows(batch.sequences)]
    for n, user in enumerate(users):
        items, times = (part.tolist() for part in store.sequence(user))
        end = len(items) - WITHHELD[held]
        assert rows[n] == (user, items[:end][-MAX_LENGTH:], times[:end][-MAX_LENGTH:])
        assert seen[n].tolist() == items[:end]
        assert int(batch.targets[n]) == (items[end] if held else -1)
    assert batch.sequences.negative_ids.numel() == 0
    assert batch.targets.dtype == batch.seen_values.dtype == batch.seen_offsets.dtype == torch.int64


def test_the_test_history_ends_with_the_validation_item(store: InteractionStore) -> None:
    users = np.arange(store.num_users)
    validation = evaluation_batch(store, users, "validation", max_length=MAX_LENGTH)
    test = evaluation_batch(store, users, "test", max_length=MAX_LENGTH)
    assert test.sequences.item_ids[test.sequences.offsets[1:] - 1].tolist() == validation.targets.tolist()
    assert test.seen_values[test.seen_offsets[1:] - 1].tolist() == validation.targets.tolist()


def _samples(batches: list[EvaluationBatch]) -> list[list[int]]:
    return [batch.sequences.sample_ids.tolist() for batch in batches]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 12])
def test_evaluation_ranks_share_the_users_out_in_as_many_steps(
    store: InteractionStore, count: int, world_size: int
) -> None:
    users = np.arange(store.num_users)[::-1][:count]
    ranks = [
        _samples(
            list(evaluation_batches(store, users, "test", max_length=3, batch_size=2, rank=rank, world_size=world_size))
        )
        for rank in range(world_size)
    ]
    assert {len(steps) for steps in ranks} == {-(-count // (2 * world_size))}
    assert max((len(batch) for steps in ranks for batch in steps), default=0) <= 2
    assert sorted(user for steps in ranks for batch in steps for user in batch) == sorted(users.tolist())


def test_an_evaluation_batch_of_no_users_is_empty(store: InteractionStore) -> None:
    batch = evaluation_batch(store, np.empty(0, dtype=np.int64), "test", max_length=MAX_LENGTH)
    assert batch.sequences.tokens == batch.targets.numel() == batch.seen_values.numel() == 0
    assert batch.seen_offsets.tolist() == [0]
