"""Sampled softmax with temperature: each target against its negatives, summed over the targets.

    loss = sum over targets t of  -log( exp(s_t) / (exp(s_t) + sum over n of exp(s_n)) )  with  s_x = o_t . e_x / tau

A negative that is the target itself is left out of the sum. Ids are compared as int64: float32 would confuse ids above
2^24. The sum, not the mean, is returned: the caller divides by the count of valid targets of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from turbogr_plugin.negatives.uniform import NegativeSharing


def _shared_logits(queries: Tensor, negatives: Tensor, target_ids: Tensor, negative_ids: Tensor) -> Tensor:
    """Negative logits [n, R] of queries [n, D] with shared negatives [R, D]."""
    logits = queries @ negatives.T
    return logits.masked_fill(target_ids[:, None] == negative_ids[None], float("-inf"))


def _positive_lengths(target_lengths: Tensor, host_target_offsets: Sequence[int] | None) -> list[int]:
    """On the host, without the zeros."""
    if host_target_offsets is None:
        lengths: list[int] = target_lengths.tolist()
    else:
        lengths = [end - start for start, end in pairwise(host_target_offsets)]
    return [length for length in lengths if length > 0]


def sampled_softmax(
    queries: Tensor,
    targets: Tensor,
    negatives: Tensor,
    *,
    target_ids: Tensor,
    negative_ids: Tensor,
    target_lengths: Tensor,
    sharing: NegativeSharing,
    temperature: float,
    host_target_offsets: Sequence[int] | None = None,
) -> Tensor:
    """Sum of the sampled-softmax loss over all targets.

    Args:
        queries: [T, D], the model's output at the position before each target.
        targets: [T, D], embeddings of the targets.
        negatives: [N, D]: T * R rows in the order of the targets (sharing "none"), or R rows for each sample that has
            targets (sharing "sequence").
        target_ids: [T] int64.
        negative_ids: [N] int64.
        target_lengths: [B], targets of each sample, adding up to T.
        sharing: how the negatives were drawn, see negatives.uniform.
        temperature: divides the logits; positive.
        host_target_offsets: [B + 1] offsets of `target_lengths`, where the caller has them on the host; without them
            sharing "sequence" waits for the device to read the lengths.

    Returns:
        float32 (float64 for float64 input) scalar; 0 for T = 0.

    Raises:
        ValueError: a temperature that is not positive, or numbers of rows that do not fit together.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    total = queries.shape[0]
    lengths = [] if sharing == "none" else _positive_lengths(target_lengths, host_target_offsets)
    groups = total if sharing == "none" else len(lengths)
    if targets.shape != queries.shape or negatives.shape[0] != negative_ids.numel() or target_ids.numel() != total:
        raise ValueError(
            f"queries {tuple(queries.shape)}, targets {tuple(targets.shape)} and {target_ids.numel()} target ids must "
            f"agree, and negatives {tuple(negatives.shape)} with {negative_ids.numel()} negative ids"
        )
    if negatives.shape[0] % max(groups, 1) or (groups == 0 and negatives.shape[0]):
        raise ValueError(f"{negatives.shape[0]} negatives do not divide over {groups} groups of targets")
    work = torch.float64 if queries.dtype == torch.float64 else torch.float32
    queries, targets, negatives = queries.to(work), targets.to(work), negatives.to(work)
    if groups == 0:
        return (queries.sum() + targets.sum() + negatives.sum()) * 0
    count = negatives.shape[0] // groups
    positive = (queries * targets).sum(1, keepdim=True)
    if sharing == "none":
        logits = torch.einsum("td,trd->tr", queries, negatives.view(total, count, -1))
        logits = logits.masked_fill(target_ids[:, None] == negative_ids.view(total, count), float("-inf"))
    else:
        if sum(lengths) != total:
            raise ValueError(f"target_lengths must add up to the {total} targets, got {sum(lengths)}")
        rows = zip(
            queries.split(lengths),
            negatives.split(count),
            target_ids.split(lengths),
            negative_ids.split(count),
            strict=True,
        )
        logits = torch.cat([_shared_logits(*row) for row in rows])
    both = torch.cat([positive, logits], 1) / temperature
    return (torch.logsumexp(both, 1) - both[:, 0]).sum()
