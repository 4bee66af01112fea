"""Full-corpus evaluation and recommendation over a sharded item table, streamed in chunks.

No candidate sampling: every user's held-out item is ranked among all items. Per step, on every rank:

    encode          the next users of this rank -> queries [B, D]                      (the model's own collectives)
    gather          queries, targets and histories of all ranks -> [Q, D], Q = sum of B
    score           all queries against this rank's rows, chunk by chunk; the owner of a target reads its score there
    count           items before each target in this rank's rows, then summed over ranks (`ranking.py`)

Item vectors never travel, and no rank holds more than one block of Q x chunk scores. Scores are computed twice, first
to read the targets' scores and then to count: a target score from any other product could differ in its last bit from
the one that it is compared with. Ranks without users left take part with empty batches.

Counts are integers and the metrics are exactly rounded means, so equal scores give bit-equal results on any number of
ranks. This module knows no model, no loader and no configuration; the trainer brings `encode` and the batches.

Shapes: B queries of this rank, Q of all ranks, T seen items (jagged by offsets), I items, D embedding dim, K results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from turbogr_plugin.backend.rank_exchange import RankExchange, caught
from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.offsets import lengths_to_offsets
from turbogr_plugin.training.item_corpus import ItemCorpus
from turbogr_plugin.training.metrics import DEFAULT_CUTOFFS, check_cutoffs, ranking_metrics
from turbogr_plugin.training.ranking import SeenItems, TargetRankCounter, check_item_indices, check_jagged

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, kw_only=True)
class EvaluationQueries:
    """What one rank asks in one step; all tensors on the corpus's device, B may be 0 (queries is then [0, D])."""

    queries: Tensor
    """[B, D] float: one query vector per user, as scored in training."""

    users: Tensor
    """[B] int64: dense user index; no user twice in a whole evaluation."""

    targets: Tensor
    """[B] int64: dense index of the held-out item."""

    seen_values: Tensor
    """[T] int64: items of the whole history before the target, not only of the part the model read; jagged."""

    seen_offsets: Tensor
    """[B + 1] int64."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Ranks and metrics over all users of all ranks, identical on every rank; tensors on the CPU, by ascending user."""

    users: Tensor
    """[U] int64: dense user index."""

    filtered_ranks: Tensor
    """[U] int64, 1-based: rank of the target among the items not seen before it."""

    unfiltered_ranks: Tensor
    """[U] int64, 1-based: rank of the target among all items."""

    filtered: dict[str, float]
    """Metrics of the filtered ranks, `{"hr@10": .., "ndcg@10": .., ..., "mrr": ..}`."""

    unfiltered: dict[str, float]
    """Metrics of the unfiltered ranks."""


@dataclass(frozen=True, kw_only=True)
class TopItems:
    """The best items of this rank's queries, best first; where fewer than K remain, -1 with score -inf."""

    items: Tensor
    """[B, K] int64: dense item index."""

    scores: Tensor
    """[B, K] float32."""


@torch.no_grad()
def evaluate(
    encode: Callable[[BatchT], EvaluationQueries],
    batches: Iterable[BatchT],
    corpus: ItemCorpus,
    *,
    empty_batch: BatchT,
    cutoffs: Sequence[int] = DEFAULT_CUTOFFS,
) -> EvaluationResult:
    """Rank every user's target among all items; a collective of the corpus's group.

    Args:
        encode: batch -> queries. It may hold collectives (a sharded lookup): all ranks call it equally often, a rank
            whose batches have ended with `empty_batch`. Puts the model into eval mode and autocast as it wishes.
        batches: this rank's users; ranks may have different numbers of batches, or none.
        corpus: the item table.
        empty_batch: a batch of no users.
        cutoffs: K's of HR@K and NDCG@K.

    Returns:
        The same result on every rank.

    Raises:
        InputError: bad cutoffs, no user on any rank, or NaN scores. Raised on every rank.
        ValueError: queries that do not fit the corpus, or a user evaluated twice. The rank at fault raises it, the
            others a RuntimeError that repeats its message; so with an exception of `batches`. An exception inside
            `encode` cannot be shared, since the other ranks may wait in its collectives; the launcher ends them.
    """
    cutoffs = check_cutoffs(cutoffs)
    kept: list[Tensor] = []
    for batch in _agreed_batches(batches, empty_batch, corpus.exchange):
        kept.append(_rank_step(encode(batch), corpus).cpu())
    table = torch.cat(kept) if kept else torch.zeros(0, 3, dtype=torch.int64)
    users, order = torch.sort(table[:, 0])
    repeated = users[1:][users[1:] == users[:-1]]
    if repeated.numel():
        raise ValueError(f"user {int(repeated[0])} was evaluated twice; a rank without users left brings empty batches")
    filtered_ranks, unfiltered_ranks = table[order, 1], table[order, 2]
    return EvaluationResult(
        users=users,
        filtered_ranks=filtered_ranks,
        unfiltered_ranks=unfiltered_ranks,
        filtered=ranking_metrics(filtered_ranks, cutoffs),
        unfiltered=ranking_metrics(unfiltered_ranks, cutoffs),
    )


@torch.no_grad()
def top_k(corpus: ItemCorpus, queries: Tensor, seen_values: Tensor, seen_offsets: Tensor, k: int) -> TopItems:
    """The K best unseen items of each of this rank's queries, ties by smaller item index; a collective of the group.

    Args:
        corpus: the item table.
        queries: [B, D] float; B may be 0 and differ between ranks.
        seen_values: [T] int64, items to leave out, jagged; none at all recommends seen items too.
        seen_offsets: [B + 1] int64.
        k: K, the same on every rank; may exceed the number of items.

    Returns:
        Items and scores of this rank's queries. An item whose score is -inf counts as none.

    Raises:
        InputError: K is below 1, or scores are NaN. Raised on every rank.
        ValueError: queries that do not fit the corpus, or K's that differ between ranks.
    """
    exchange = corpus.exchange

    def check() -> None:
        if k < 1:
            raise InputError(f"k is {k}; at least one item has to be asked for")
        _check_queries(queries, seen_values, seen_offsets, corpus)

    sizes = exchange.agree(caught(check), queries.size(0), seen_values.numel(), k, doing="checking the queries")
    if len({row[2] for row in sizes}) > 1:
        raise ValueError(f"k differs between ranks: {[row[2] for row in sizes]}")
    counts, seen_counts = [row[0] for row in sizes], [row[1] for row in sizes]
    all_queries = torch.cat(exchange.gather_rows(queries.float(), counts))
    all_lengths = torch.cat(exchange.gather_rows(seen_offsets.diff(), counts))
    all_seen = torch.cat(exchange.gather_rows(seen_values, seen_counts))
    seen = SeenItems(all_seen, lengths_to_offsets(all_lengths))

    # The best so far, by ascending item index; -1 stands for "none" and is smaller than every index.
    scores = all_queries.new_full((all_queries.size(0), k), -torch.inf)
    items = torch.full_like(scores, -1, dtype=torch.int64)
    nan_scores = torch.zeros(1, dtype=torch.int64, device=corpus.device)
    for first_item, rows in corpus.chunks():
        chunk = corpus.score(all_queries, rows)
        nan_scores += chunk.isnan().sum()
        # No error yet: the other ranks would wait for this one.
        chunk.masked_fill_(chunk.isnan(), -torch.inf)
        chunk[seen.in_chunk(first_item, rows.size(0))] = -torch.inf
        indices = torch.arange(first_item, first_item + rows.size(0), device=corpus.device).expand_as(chunk)
        scores, items = _keep_best(torch.cat((scores, chunk), dim=1), torch.cat((items, indices), dim=1), k)
    exchange.sum_(nan_scores)
    if int(nan_scores):
        raise InputError(f"{int(nan_scores)} scores are NaN: the model's weights are no use (a diverged training?)")

    begin = sum(counts[: exchange.rank])
    own = slice(begin, begin + counts[exchange.rank])
    equal_sizes = [all_queries.size(0)] * exchange.world_size
    candidate_scores = torch.cat([part[own] for part in exchange.gather_rows(scores, equal_sizes)], dim=1)
    candidate_items = torch.cat([part[own] for part in exchange.gather_rows(items, equal_sizes)], dim=1)
    candidate_items, order = torch.sort(candidate_items, dim=1, stable=True)
    scores, items = _keep_best(candidate_scores.gather(1, order), candidate_items, k)
    # Adding 0 makes -0 a plain 0: a radix sort would order the two, and break the tie by them.
    scores, order = torch.sort(scores + 0.0, dim=1, descending=True, stable=True)
    return TopItems(items=items.gather(1, order).masked_fill(scores == -torch.inf, -1), scores=scores)


def _agreed_batches(batches: Iterable[BatchT], empty_batch: BatchT, exchange: RankExchange) -> Iterator[BatchT]:
    """This rank's batches, then `empty_batch` until the batches of all ranks have ended."""
    iterator = iter(batches)
    while True:
        batch, has_batch, error = empty_batch, 0, None
        try:
            batch = next(iterator)
            has_batch = 1
        except StopIteration:
            pass
        except Exception as raised:
            error = raised
        if not any(row[0] for row in exchange.agree(error, has_batch, doing="reading an evaluation batch")):
            return
        yield batch


def _rank_step(step: EvaluationQueries, corpus: ItemCorpus) -> Tensor:
    """[Q, 3] int64: user, filtered rank and unfiltered rank of the queries of all ranks, on every rank."""
    exchange = corpus.exchange

    def check() -> None:
        _check_queries(step.queries, step.seen_values, step.seen_offsets, corpus)
        for name, column in (("users", step.users), ("targets", step.targets)):
            if column.dtype != torch.int64 or list(column.shape) != [step.queries.size(0)]:
                raise ValueError(
                    f"{name} is {column.dtype} {list(column.shape)}; int64 [{step.queries.size(0)}] is expected"
                )
        check_item_indices(step.targets, corpus.num_items, name="targets")

    sizes = exchange.agree(
        caught(check), step.queries.size(0), step.seen_values.numel(), doing="checking the evaluation queries"
    )
    counts, seen_counts = [row[0] for row in sizes], [row[1] for row in sizes]
    queries = torch.cat(exchange.gather_rows(step.queries.float(), counts))
    columns = torch.stack((step.users, step.targets, step.seen_offsets.diff()), dim=1)
    users, targets, lengths = torch.cat(exchange.gather_rows(columns, counts)).unbind(dim=1)
    seen_values = torch.cat(exchange.gather_rows(step.seen_values, seen_counts))

    target_scores = queries.new_zeros(queries.size(0))
    for first_item, rows in corpus.chunks():
        here = ((targets >= first_item) & (targets < first_item + rows.size(0))).nonzero().squeeze(1)
        if here.numel():
            target_scores[here] = corpus.score(queries, rows)[here, targets[here] - first_item]
    exchange.sum_(target_scores)

    counter = TargetRankCounter(targets, target_scores, seen_values, lengths_to_offsets(lengths))
    for first_item, rows in corpus.chunks():
        counter.update(corpus.score(queries, rows), first_item)
    exchange.sum_(counter.partial_counts)
    return torch.stack((users, *counter.result()), dim=1)


def _check_queries(queries: Tensor, seen_values: Tensor, seen_offsets: Tensor, corpus: ItemCorpus) -> None:
    if queries.dim() != 2 or queries.size(1) != corpus.dim or not queries.is_floating_point():
        raise ValueError(f"queries is {queries.dtype} {list(queries.shape)}; float [B, {corpus.dim}] is expected")
    if queries.device.type != corpus.device.type:
        raise ValueError(f"queries is on {queries.device}; the item table is on {corpus.device}")
    check_jagged(seen_values, seen_offsets, queries.size(0), name="seen")
    check_item_indices(seen_values, corpus.num_items, name="seen_values")


def _keep_best(scores: Tensor, items: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The K best columns of each row, still by ascending item index; of equal scores the first columns.

    torch.topk alone leaves open which of equal scores it returns, so only its threshold is used.

    Args:
        scores: [Q, N] without NaN, N >= K.
        items: [Q, N] int64, ascending in each row.
        k: K.
    """
    threshold = scores.topk(k, dim=1).values[:, -1:]
    above, level = scores > threshold, scores == threshold
    missing = k - above.sum(dim=1, keepdim=True)
    kept = above | (level & (level.cumsum(dim=1, dtype=torch.int32) <= missing))
    columns = kept.nonzero()[:, 1].view(-1, k)
    return scores.gather(1, columns), items.gather(1, columns)
