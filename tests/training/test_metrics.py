"""Ranking metrics against torchmetrics and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG

from turbogr_plugin.errors import InputError
from turbogr_plugin.training.metrics import ranking_metrics, user_metrics


def test_worked_example_has_the_values_of_the_definitions() -> None:
    metrics = ranking_metrics(torch.tensor([1, 3, 11, 200]), cutoffs=(1, 3, 10))
    assert metrics == {
        "hr@1": 0.25,
        "ndcg@1": 0.25,
        "hr@3": 0.5,
        "ndcg@3": (1.0 + 1.0 / 2.0) / 4,
        "hr@10": 0.5,
        "ndcg@10": (1.0 + 1.0 / 2.0) / 4,
        "mrr": pytest.approx((1 + 1 / 3 + 1 / 11 + 1 / 200) / 4, abs=1e-15),
    }


@pytest.mark.parametrize("k", [1, 10, 50])
def test_rank_equal_to_k_is_a_hit_and_the_next_rank_is_not(k: int) -> None:
    at, after = ranking_metrics(torch.tensor([k]), (k,)), ranking_metrics(torch.tensor([k + 1]), (k,))
    assert at[f"hr@{k}"] == 1.0
    assert at[f"ndcg@{k}"] == pytest.approx(1 / math.log2(k + 1), abs=1e-15)
    assert (after[f"hr@{k}"], after[f"ndcg@{k}"]) == (0.0, 0.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_agree_with_torchmetrics_on_random_score_matrices(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    users, items = 60, 80
    scores = torch.rand(users, items, generator=generator)
    targets = torch.randint(items, (users,), generator=generator)
    target_scores = scores.gather(1, targets[:, None])
    ranks = 1 + (scores > target_scores).sum(dim=1)
    relevant = torch.zeros(users, items, dtype=torch.bool)
    relevant[torch.arange(users), targets] = True
    indexes = torch.arange(users)[:, None].expand(users, items)
    arguments = (scores.flatten(), relevant.flatten())
    metrics = ranking_metrics(ranks, cutoffs=(10, 50))
    for k in (10, 50):
        hit_rate, ndcg = RetrievalHitRate(top_k=k), RetrievalNormalizedDCG(top_k=k)
        assert metrics[f"hr@{k}"] == pytest.approx(float(hit_rate(*arguments, indexes=indexes.flatten())), abs=1e-6)
        assert metrics[f"ndcg@{k}"] == pytest.approx(float(ndcg(*arguments, indexes=indexes.flatten())), abs=1e-6)
    assert metrics["mrr"] == pytest.approx(float(RetrievalMRR()(*arguments, indexes=indexes.flatten())), abs=1e-6)


def test_order_of_users_does_not_change_a_single_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    ranks = torch.randint(1, 10**6, (50_000,), generator=generator)
    assert ranking_metrics(ranks) == ranking_metrics(ranks[torch.randperm(50_000, generator=generator)])


def test_means_are_the_means_of_the_users_contributions() -> None:
    ranks = torch.tensor([4, 1, 60, 12])
    means = ranking_metrics(ranks)
    assert list(means) == ["hr@10", "ndcg@10", "hr@50", "ndcg@50", "mrr"]
    for name, values in user_metrics(ranks).items():
        assert values.shape == (4,)
        assert means[name] == pytest.approx(float(values.mean()), abs=1e-15)


def test_no_users_is_an_error_and_not_a_nan() -> None:
    with pytest.raises(InputError, match="no user"):
        ranking_metrics(torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("cutoffs", [(), (0,), (-1, 10), (10, 10), (True,), (1.5,)], ids=str)
def test_impossible_cutoffs_are_named(cutoffs: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cutoffs"):
        ranking_metrics(torch.tensor([1]), cutoffs)


def test_ranks_that_are_no_ranks_are_rejected() -> None:
    with pytest.raises(TypeError, match="float32"):
        ranking_metrics(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="holds 0"):
        ranking_metrics(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="shape"):
        ranking_metrics(torch.tensor([[1]]))
