"""Training steps whose samples are balanced over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.small_store import random_sequences, write_small_store
from turbogr_plugin.data.batch import NEGATIVE, SequenceBatch
from turbogr_plugin.data.loader import TrainingSteps, training_batches
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.negatives.uniform import NegativesConfig
from turbogr_plugin.sharding.balance_config import BalanceConfig
from turbogr_plugin.sharding.sequence_cost import SequenceCost

RANKS, GLOBAL_BATCH = 3, 12


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> InteractionStore:
    rows = [*random_sequences(80, 30, seed=1), *([n % 30 for n in range(60)] for _ in range(10))]
    return write_small_store(tmp_path_factory.mktemp("balanced") / "store", rows)


def _ranks(store: InteractionStore, method: Any, world_size: int = RANKS, **options: Any) -> list[TrainingSteps]:
    return [
        TrainingSteps(
            store,
            max_length=50,
            global_batch_size=GLOBAL_BATCH,
            negatives=NegativesConfig(count=2),
            seed=9,
            rank=rank,
            world_size=world_size,
            balance=BalanceConfig(method=method, **options),
            cost=SequenceCost.hstu(16),
        )
        for rank in range(world_size)
    ]


def _samples(batches: list[SequenceBatch]) -> dict[int, tuple[list[int], list[int]]]:
    """Items and negatives by user."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for batch in batches:
        lengths = batch.offsets.diff().tolist()
        negatives = batch.features[NEGATIVE].lengths().tolist() if lengths else []
        parts = zip(batch.item_ids.split(lengths), batch.negative_ids.split(negatives), strict=True) if lengths else []
        for user, (items, drawn) in zip(batch.sample_ids.tolist(), parts, strict=True):
            found[user] = (items.tolist(), drawn.tolist())
    return found


def test_reallocation_spreads_the_same_samples_of_a_step_evenly(store: InteractionStore) -> None:
    plain, balanced = _ranks(store, "none"), _ranks(store, "reallocation")
    assert {steps.steps_per_epoch for steps in (*plain, *balanced)} == {plain[0].steps_per_epoch}
    gaps: dict[str, list[int]] = {"plain": [], "balanced": []}
    for step in range(2 * plain[0].steps_per_epoch - 1):
        of_plain, of_balanced = [rank[step] for rank in plain], [rank[step] for rank in balanced]
        assert _samples(of_plain) == _samples(of_balanced)
        assert sum(batch.tokens for batch in of_balanced) == balanced[0].tokens_of_step(step)
        for name, batches in (("plain", of_plain), ("balanced", of_balanced)):
            tokens = [batch.tokens for batch in batches]
            gaps[name].append(max(tokens) - min(tokens))
    assert np.mean(gaps["balanced"]) < 0.4 * np.mean(gaps["plain"])


@pytest.mark.parametrize("method", ["reallocation", "lookahead"])
def test_every_user_comes_once_per_epoch_and_a_run_can_go_on_anywhere(store: InteractionStore, method: str) -> None:
    ranks = _ranks(store, method, window=4)
    steps = ranks[0].steps_per_epoch
    for epoch in range(2):
        users = [
            user
            for step in range(epoch * steps, (epoch + 1) * steps)
            for rank in ranks
            for user in rank[step].sample_ids.tolist()
        ]
        assert sorted(users) == ranks[0].users.tolist()
    whole = [batch.sample_ids.tolist() for batch in training_batches(ranks[1], 0, 2 * steps, workers=0)]
    rest = list(training_batches(_ranks(store, method, window=4)[1], steps + 2, 2 * steps, workers=2))
    assert [batch.sample_ids.tolist() for batch in rest] == whole[steps + 2 :]
    assert [batch.step for batch in rest] == list(range(steps + 2, 2 * steps))


def test_lookahead_goes_on_with_as_many_ranks_only(store: InteractionStore) -> None:
    identity = _ranks(store, "lookahead")[0].identity()
    _ranks(store, "lookahead")[1].check_resumable(identity)
    with pytest.raises(InputError, match=r"balanced by another plan: .*ranks was 3 and is 2"):
        _ranks(store, "lookahead", world_size=2)[0].check_resumable(identity)
    with pytest.raises(InputError, match=r"plan was None and is lookahead"):
        _ranks(store, "lookahead")[0].check_resumable(_ranks(store, "none")[0].identity())
    _ranks(store, "reallocation", 2)[0].check_resumable(_ranks(store, "reallocation")[0].identity())


def test_the_tokens_of_a_rank_stay_within_the_limit(store: InteractionStore) -> None:
    for rank in _ranks(store, "reallocation", max_tokens=220):
        assert max(rank[step].tokens for step in range(rank.steps_per_epoch)) <= 220
    with pytest.raises(InputError, match="max_tokens is 50, but the longest sample has 51 tokens"):
        _ranks(store, "lookahead", max_tokens=50)


def test_the_configured_cost_takes_the_place_of_the_models(store: InteractionStore) -> None:
    by_model = _ranks(store, "reallocation")[0]
    by_tokens = _ranks(store, "reallocation", linear=1.0)[0]
    by_pairs = _ranks(store, "reallocation", quadratic=1.0)[0]
    drawn = [[rank[step].sample_ids.tolist() for step in range(5)] for rank in (by_model, by_tokens, by_pairs)]
    assert drawn[1] != drawn[2]


def test_bad_values_are_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"method": "sorted"}, "balance.method must be none, reallocation or lookahead, got 'sorted'"),
        ({"window": 0}, "balance.window must be at least 1, got 0"),
        ({"spread": 0.5}, "balance.spread must be at least 1, got 0.5"),
        ({"linear": float("nan")}, "balance.linear must be at least 0, got nan"),
        ({"max_tokens": -1}, "balance.max_tokens must be at least 0, got -1"),
    ):
        arguments: dict[str, Any] = options
        with pytest.raises(InputError, match=message):
            BalanceConfig(**arguments)
