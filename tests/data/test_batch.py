from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.small_store import random_sequences, write_small_store
from turbogr_plugin.data.batch import ITEM, NEGATIVE, SequenceBatch, collate_sequences, gather_rows, in_seconds
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.negatives.uniform import NegativesConfig, NegativeSharing, uniform_negatives

SEED, EPOCH, STEP = 5, 3, 21


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> InteractionStore:
    return write_small_store(tmp_path_factory.mktemp("batch") / "store", random_sequences(8, 30, seed=1))


def _collate(
    store: InteractionStore, spans: list[tuple[int, int, int]], negatives: NegativesConfig | None
) -> SequenceBatch:
    """The batch of (user, first, one past the last place) spans."""
    users = np.array([user for user, _, _ in spans], dtype=np.int64)
    begin = np.asarray(store.offsets)[users]
    return collate_sequences(
        store,
        users,
        begin + np.array([first for _, first, _ in spans], dtype=np.int64),
        begin + np.array([end for _, _, end in spans], dtype=np.int64),
        negatives=negatives,
        seed=SEED,
        epoch=EPOCH,
        step=STEP,
    )


SPANS = [
    [(3, 0, 3), (0, 1, 3), (7, 2, 2), (5, 0, 1), (6, 0, 3)],
    [(2, 1, 1)],
    [(2, 0, 1), (4, 0, 2)],
]


@pytest.mark.parametrize("sharing", ["none", "sequence", None])
@pytest.mark.parametrize("spans", SPANS, ids=range(len(SPANS)))
def test_a_batch_equals_a_loop_over_its_samples(
    store: InteractionStore, spans: list[tuple[int, int, int]], sharing: NegativeSharing | None
) -> None:
    config = NegativesConfig(count=3, sharing=sharing) if sharing else None
    batch = _collate(store, spans, config)
    items: list[int] = []
    times: list[int] = []
    queries: list[int] = []
    negatives: list[int] = []
    negative_lengths = []
    for user, first, end in spans:
        all_items, all_times = store.sequence(user)
        queries += [len(items) + place for place in range(max(end - first - 1, 0))]
        items += all_items[first:end].tolist()
        times += all_times[first:end].tolist()
        targets = max(end - first - 1, 0)
        drawn: list[int] = []
        if config:
            ids, _ = uniform_negatives(
                config,
                num_items=store.num_items,
                seed=SEED,
                epoch=EPOCH,
                samples=torch.tensor([user]),
                target_offsets=torch.tensor([0, targets]),
            )
            drawn = ids.tolist()
        negatives += drawn
        negative_lengths.append(len(drawn))
    lengths = [end - first for _, first, end in spans]
    assert batch.item_ids.tolist() == items
    assert batch.times.tolist() == times
    assert batch.offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.sample_ids.tolist() == [user for user, _, _ in spans]
    assert batch.query_index.tolist() == queries
    assert batch.target_lengths.tolist() == [max(length - 1, 0) for length in lengths]
    assert np.diff(batch.host_target_offsets).tolist() == batch.target_lengths.tolist()
    assert batch.host_target_offsets[0] == 0
    assert batch.negative_ids.tolist() == negatives
    assert (batch.tokens, batch.seed, batch.step) == (len(items), SEED, STEP)
    assert batch.features.keys() == [ITEM, NEGATIVE]
    assert batch.features.stride() == len(spans)
    assert batch.features[ITEM].values().tolist() == items
    assert batch.features[ITEM].lengths().tolist() == lengths
    assert batch.features[NEGATIVE].values().tolist() == negatives
    assert batch.features[NEGATIVE].lengths().tolist() == negative_lengths
    for tensor in (*_tensors(batch), batch.features.values(), batch.features.lengths()):
        assert tensor.dtype == torch.int64


def _tensors(batch: SequenceBatch) -> list[Tensor]:
    return [batch.offsets, batch.times, batch.sample_ids, batch.query_index, batch.target_lengths]


@pytest.mark.parametrize("negatives", [None, NegativesConfig(), NegativesConfig(sharing="sequence")])
def test_a_batch_of_no_samples_is_empty(store: InteractionStore, negatives: NegativesConfig | None) -> None:
    batch = _collate(store, [], negatives)
    assert batch.tokens == batch.item_ids.numel() == batch.negative_ids.numel() == 0
    assert batch.offsets.tolist() == [0]
    assert all(part.numel() == 0 for part in _tensors(batch)[1:])
    assert batch.features.lengths().sum() == 0


@pytest.mark.parametrize(("unit", "expected"), [("ms", [0, 1, 1, 2]), ("s", [999, 1000, 1999, 2000])])
def test_times_of_a_batch_are_whole_seconds(tmp_path: Path, unit: Any, expected: list[int]) -> None:
    store = write_small_store(tmp_path / "store", [[0, 1, 2, 0]], [[999, 1000, 1999, 2000]], time_unit=unit)
    assert _collate(store, [(0, 0, 4)], None).times.tolist() == expected


def test_milliseconds_before_the_epoch_round_down() -> None:
    assert in_seconds(np.array([-1, -1000, -1001, 1]), "ms").tolist() == [-1, -1, -2, 0]


def test_a_batch_does_not_share_memory_with_the_store(store: InteractionStore) -> None:
    batch = _collate(store, [(0, 0, 3)], None)
    batch.times.add_(1)  # the memory maps are read-only: a view would fail or crash
    batch.features.values().add_(1)
    assert store.sequence(0)[0][:3].tolist() == (batch.item_ids - 1).tolist()


def test_a_batch_moves_whole(store: InteractionStore) -> None:
    batch = _collate(store, SPANS[0], NegativesConfig(count=3))
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert isinstance(moved, SequenceBatch)
    assert all(tensor.is_meta for tensor in (*_tensors(moved), moved.features.values(), moved.features.lengths()))
    assert (moved.tokens, moved.seed, moved.step) == (batch.tokens, SEED, STEP)
    assert moved.features.values().shape == batch.features.values().shape
    same = batch.to(torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(_tensors(same), _tensors(batch), strict=True))
    assert torch.equal(same.item_ids, batch.item_ids)


def test_every_tensor_of_a_batch_is_pinned_and_recorded_on_the_stream(
    store: InteractionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = _collate(store, SPANS[0], NegativesConfig(count=3))
    held = {tensor.data_ptr() for tensor in (*_tensors(batch), batch.features.values(), batch.features.lengths())}
    pinned: list[int] = []
    recorded: list[int] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    # Neither exists on CPU alone: what is held here is that no tensor is forgotten.
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor.data_ptr()))
    assert torch.equal(batch.pin_memory().item_ids, batch.item_ids)
    batch.record_stream(None)  # type: ignore[arg-type]
    assert held <= set(pinned)
    assert held <= set(recorded)


@pytest.mark.parametrize("rows", [[], [(0, 0)], [(5, 3), (0, 0), (2, 2), (7, 1)], [(4, 0), (1, 1)]], ids=str)
def test_gathered_rows_are_their_ranges_one_after_the_other(rows: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    found = gather_rows(starts, lengths)
    assert found.dtype == np.int64
    assert found.tolist() == [start + i for start, length in rows for i in range(length)]
