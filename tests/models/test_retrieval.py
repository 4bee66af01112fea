"""The retriever on whole batches against each sample alone, target by target, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.data.small_store import random_sequences, write_small_store
from tests.models.padded_hstu import padded_hstu
from turbogr_plugin.data.batch import ITEM, NEGATIVE, SequenceBatch, collate_sequences
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.keyed_dropout import DropoutKey, keep_mask
from turbogr_plugin.models.hstu import HSTUConfig
from turbogr_plugin.models.retrieval import LossConfig, RetrievalHead, SequentialRetriever, l2_normalize
from turbogr_plugin.negatives.uniform import NegativesConfig, NegativeSharing, uniform_negatives

DIM, HEADS, INNER, NUM_ITEMS = 8, 2, 6, 15
SEED, EPOCH, STEP = 3, 2, 11
LENGTHS = [4, 1, 7, 0, 2]  # of the samples: one without a target, one without anything


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> InteractionStore:
    rows = [row * 4 for row in random_sequences(len(LENGTHS), NUM_ITEMS, seed=5)]
    generator = np.random.default_rng(6)
    times = [np.sort(generator.integers(0, 10**6, len(row))).tolist() for row in rows]
    return write_small_store(tmp_path_factory.mktemp("retrieval") / "store", rows, times, num_items=NUM_ITEMS)


def _config(**changes: Any) -> HSTUConfig:
    shape: dict[str, Any] = {
        "dim": DIM,
        "blocks": 2,
        "heads": HEADS,
        "qk_dim": 4,
        "value_dim": INNER // HEADS,
        "max_length": 10,
    }
    return HSTUConfig(**{**shape, "time_buckets": 12, **changes})


def _batch(store: InteractionStore, negatives: NegativesConfig | None, lengths: list[int] = LENGTHS) -> SequenceBatch:
    users = np.arange(len(lengths))
    starts = np.asarray(store.offsets[:-1])[: len(lengths)]
    return collate_sequences(
        store, users, starts, starts + np.array(lengths), negatives=negatives, seed=SEED, epoch=EPOCH, step=STEP
    )


def _head(config: HSTUConfig, loss: LossConfig, sharing: NegativeSharing) -> tuple[RetrievalHead, Tensor]:
    """A head in float64 and the item table."""
    torch.manual_seed(0)
    head = RetrievalHead(config, loss, sharing, torch.float32).double()
    return head, torch.randn(NUM_ITEMS, DIM, dtype=torch.float64).requires_grad_()


def _looked_up(table: Tensor, batch: SequenceBatch) -> dict[str, JaggedTensor]:
    return {
        key: JaggedTensor(values=table[batch.features[key].values()], lengths=batch.features[key].lengths())
        for key in (ITEM, NEGATIVE)
    }


def _encode_alone(
    config: HSTUConfig, head: RetrievalHead, tokens: Tensor, times: list[int], at: list[int], sample: int | None
) -> Tensor:
    """One sequence through the padded oracle; `sample`: the id that keys its dropout, None drops nothing."""
    count = len(times)
    factors = None
    if sample is not None:
        key = DropoutKey(SEED, STEP, torch.full((count,), sample), torch.arange(count))
        rates = [(DIM, config.input_dropout), (INNER, config.dropout), (INNER, config.dropout)]
        factors = [(keep_mask(key, i, width, p).double() / (1 - p))[None] for i, (width, p) in enumerate(rates)]
    weights = dict(head.encoder.named_parameters())
    valid = torch.ones(1, count, dtype=torch.bool)
    return padded_hstu(config, weights, tokens[None], valid, torch.tensor([times]), torch.tensor([at]), factors)[0]


def _unit(x: Tensor, loss: LossConfig) -> Tensor:
    return x / x.norm() if loss.normalize else x


@pytest.mark.parametrize("sharing", ["none", "sequence"])
@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, LossConfig(temperature=0.2)),
        ({"query_time": "next"}, LossConfig(temperature=1.5, normalize=False)),
    ],
    ids=["own", "next"],
)
def test_the_loss_equals_a_direct_sum_over_targets(
    store: InteractionStore, changes: dict[str, Any], loss: LossConfig, sharing: NegativeSharing
) -> None:
    config = _config(**changes)
    negatives = NegativesConfig(count=5, sharing=sharing)
    head, table = _head(config, loss, sharing)
    batch = _batch(store, negatives)
    expected = torch.zeros((), dtype=torch.float64)
    for user, length in enumerate(LENGTHS):
        items, times = (part[:length].tolist() for part in store.sequence(user))
        if length < 2:
            continue
        at = times[:-1] if config.query_time == "own" else times[1:]
        encoded = _encode_alone(config, head, table[items[:-1]], times[:-1], at, user)
        drawn, _ = uniform_negatives(
            negatives,
            num_items=NUM_ITEMS,
            seed=SEED,
            epoch=EPOCH,
            samples=torch.tensor([user]),
            target_offsets=torch.tensor([0, length - 1]),
        )
        for n, target in enumerate(items[1:]):
            own = drawn[5 * n : 5 * n + 5] if sharing == "none" else drawn
            query = _unit(encoded[n], loss)
            candidates = [target, *(item for item in own.tolist() if item != target)]
            logits = torch.stack([query @ _unit(table[item], loss) / loss.temperature for item in candidates])
            expected = expected - torch.log_softmax(logits, 0)[0]
    found = head(_looked_up(table, batch), batch)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    weights = dict(head.named_parameters())
    leaves = [table, *weights.values()]
    for name, got, want in zip(
        ["table", *weights], torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("query_time", ["own", "next"])
def test_an_evaluation_query_is_the_output_at_the_last_token(
    store: InteractionStore, query_time: str, normalize: bool
) -> None:
    config, loss = _config(query_time=query_time), LossConfig(normalize=normalize)
    head, table = _head(config, loss, "none")
    batch = _batch(store, None)
    found = head.eval()(_looked_up(table, batch), batch)
    assert found.shape == (len(LENGTHS), DIM)
    for user, length in enumerate(LENGTHS):
        if length == 0:
            assert not found[user].any(), "a sample without tokens must not take the query of another"
            continue
        items, times = (part[:length].tolist() for part in store.sequence(user))
        at = times if query_time == "own" else times[1:] + times[-1:]
        expected = _encode_alone(config, head, table[items], times, at, None)[-1]
        torch.testing.assert_close(found[user], _unit(expected, loss), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [[], [0, 0], [1, 0]], ids=str)
@pytest.mark.parametrize("sharing", ["none", "sequence"])
def test_a_batch_without_targets_gives_zero_and_a_gradient_of_zeros_for_every_parameter(
    store: InteractionStore, sharing: NegativeSharing, lengths: list[int]
) -> None:
    config = _config()
    torch.manual_seed(0)
    model = SequentialRetriever(config, num_items=NUM_ITEMS, loss=LossConfig(), sharing=sharing)
    batch = _batch(store, NegativesConfig(count=5, sharing=sharing), lengths)
    loss = model(batch)
    assert loss.item() == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert model.eval()(batch).shape == (len(lengths), DIM)


def test_the_model_looks_both_features_up_in_the_item_table(store: InteractionStore) -> None:
    config = _config()
    torch.manual_seed(0)
    model = SequentialRetriever(config, num_items=NUM_ITEMS, loss=LossConfig(), sharing="none")
    table = model.item_embeddings.embeddings["item_table"].weight
    assert table.shape == (NUM_ITEMS, DIM)
    batch = _batch(store, NegativesConfig(count=5))
    torch.testing.assert_close(model(batch), model.head(_looked_up(table, batch), batch))
    model.eval()
    torch.testing.assert_close(model(batch), model.head(_looked_up(table, batch), batch))


def test_bfloat16_runs_the_encoder_lower_and_returns_float32(store: InteractionStore) -> None:
    torch.manual_seed(0)
    exact = SequentialRetriever(_config(), num_items=NUM_ITEMS, loss=LossConfig(temperature=1), sharing="none")
    low = SequentialRetriever(
        _config(), num_items=NUM_ITEMS, loss=LossConfig(temperature=1), sharing="none", precision=torch.bfloat16
    )
    low.load_state_dict(exact.state_dict())
    batch = _batch(store, NegativesConfig(count=5))
    found, expected = low(batch), exact(batch)
    assert found.dtype == torch.float32
    found.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in low.parameters())
    assert found.item() != expected.item()
    # Unit vectors with an error of 2^-8 in each element; some ten targets of loss about log 6.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)
    assert low.eval()(batch).dtype == torch.float32


def test_a_loss_does_not_depend_on_who_shares_the_batch(store: InteractionStore) -> None:
    config, negatives = _config(), NegativesConfig(count=5)
    head, table = _head(config, LossConfig(), "none")
    whole = _batch(store, negatives)
    parts = [_batch(store, negatives, [length if i == user else 0 for i, length in enumerate(LENGTHS)])
             for user in range(len(LENGTHS))]  # fmt: skip
    total = sum(head(_looked_up(table, part), part) for part in parts)
    torch.testing.assert_close(total, head(_looked_up(table, whole), whole), rtol=1e-12, atol=0)
    later = dataclasses.replace(whole, step=STEP + 1)
    assert head(_looked_up(table, later), later).item() != head(_looked_up(table, whole), whole).item()


def test_rows_are_divided_by_their_length_and_zero_stays_zero() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    y = l2_normalize(x)
    torch.testing.assert_close(y, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(InputError, match=r"loss\.temperature must be positive"):
        LossConfig(temperature=temperature)
