"""Ranking metrics from the 1-based rank of each user's held-out item: HR@K, NDCG@K and MRR.

With one relevant item per user, every ranking metric is a function of its rank r alone:

    HR@K = [r <= K]        NDCG@K = [r <= K] / log2(r + 1)        MRR = 1 / r

and the reported figure is the mean over users. Means are taken with an exactly rounded sum, so they do not depend on
the order of the users, on the number of ranks that evaluated them or on the number of threads.

How ranks come about (ties, the seen filter) is the business of `ranking.py`; this module knows nothing of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.errors import InputError

DEFAULT_CUTOFFS: tuple[int, ...] = (10, 50)


def check_cutoffs(cutoffs: Sequence[int]) -> tuple[int, ...]:
    """Return the cutoffs K as a tuple.

    Raises:
        InputError: there is none, one is not an integer of at least 1, or one is named twice.
    """
    ks = tuple(cutoffs)
    if not ks or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in ks) or len(set(ks)) != len(ks):
        raise InputError(f"cutoffs is {list(ks)}: give at least one K, each a different integer of at least 1")
    return ks


def user_metrics(ranks: Tensor, cutoffs: Sequence[int] = DEFAULT_CUTOFFS) -> dict[str, Tensor]:
    """The contribution of every user to every metric (for paired tests and bootstraps).

    Args:
        ranks: [U] integer; 1 is the best rank.
        cutoffs: the K's of HR@K and NDCG@K.

    Returns:
        `{"hr@10": [U], "ndcg@10": [U], ..., "mrr": [U]}`, float64, in the order of the cutoffs.

    Raises:
        InputError: no user at all, or bad cutoffs.
        TypeError: `ranks` is not an integer tensor.
        ValueError: `ranks` is not one-dimensional, or a rank is below 1.
    """
    ks = check_cutoffs(cutoffs)
    if ranks.is_floating_point() or ranks.is_complex() or ranks.dtype == torch.bool:
        raise TypeError(f"ranks has dtype {ranks.dtype}; 1-based ranks are integers (int64)")
    if ranks.dim() != 1:
        raise ValueError(f"ranks has shape {list(ranks.shape)}; one rank per user [U] is expected")
    if ranks.numel() == 0:
        raise InputError("there is no user to evaluate: metrics over zero users do not exist; check the split")
    smallest = int(ranks.min())
    if smallest < 1:
        raise ValueError(f"ranks holds {smallest}; ranks count from 1")
    # On the CPU: not every accelerator has float64.
    rank = ranks.cpu().to(torch.float64)
    gain = 1.0 / torch.log2(rank + 1.0)
    per_user: dict[str, Tensor] = {}
    for k in ks:
        hit = (rank <= k).to(torch.float64)
        per_user[f"hr@{k}"] = hit
        per_user[f"ndcg@{k}"] = hit * gain
    per_user["mrr"] = 1.0 / rank
    return per_user


def ranking_metrics(ranks: Tensor, cutoffs: Sequence[int] = DEFAULT_CUTOFFS) -> dict[str, float]:
    """Mean of every metric over the users: `{"hr@10": .., "ndcg@10": .., ..., "mrr": ..}`.

    Arguments and errors are those of `user_metrics`. The result is the same bits for any order of `ranks`.
    """
    return {name: math.fsum(values.tolist()) / values.numel() for name, values in user_metrics(ranks, cutoffs).items()}
