"""The rank of a held-out item among all items, counted chunk by chunk: the one rule for shards and foreign scores.

    unfiltered rank = 1 + #{items that rank before the target}
    filtered rank   = 1 + #{items that rank before the target and were not seen}

An item ranks before the target when its score is larger, or equal with a smaller item index: ties are decided the same
way on every machine and for every chunking. "Seen" is the user's whole history before the target, each item once; the
target is never removed, even where it occurs in that history.

Counts are integers and additive over disjoint chunks of the corpus, so chunks, shards and ranks may be added in any
order. Everything here is single-process and knows no model: `evaluation.py` adds the ranks' exchange, and a benchmark
feeds the score matrix of another library through `target_ranks`.

Shapes: Q queries, C items of a chunk, I items of the corpus, T seen items of all queries (jagged by offsets [Q + 1]).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.errors import InputError


def check_jagged(values: Tensor, offsets: Tensor, rows: int, *, name: str) -> None:
    """Raise ValueError unless int64 `values` [T] and `offsets` [rows + 1] describe `rows` jagged rows."""
    if values.dim() != 1 or values.dtype != torch.int64:
        raise ValueError(f"{name}_values is {values.dtype} {list(values.shape)}; int64 [T] is expected")
    if offsets.dtype != torch.int64 or list(offsets.shape) != [rows + 1]:
        raise ValueError(f"{name}_offsets is {offsets.dtype} {list(offsets.shape)}; int64 [{rows + 1}] is expected")
    ends = (int(offsets[0]), int(offsets[-1]))
    if ends != (0, values.numel()) or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{name}_offsets runs from {ends[0]} to {ends[1]} over {values.numel()} values; "
            f"offsets start at 0, never fall and end at the number of values"
        )


class SeenItems:
    """The seen filter as distinct (query, item) pairs, ordered by item so that a chunk of items is a slice.

    Args:
        values: [T] int64 item indices, jagged; repeats within a query count once.
        offsets: [Q + 1] int64.

    Raises:
        ValueError: the jagged layout is broken.
    """

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        num_queries = offsets.numel() - 1
        check_jagged(values, offsets, num_queries, name="seen")
        queries = torch.repeat_interleave(
            torch.arange(num_queries, device=values.device), offsets.diff(), output_size=values.numel()
        )
        # Queries ascend already, so a stable sort by item orders the pairs by (item, query) and repeats stand side by
        # side. (A key item * Q + query could overflow; torch.unique over pairs takes seconds at a million.)
        items, order = torch.sort(values, stable=True)
        queries = queries[order]
        distinct = torch.ones_like(items, dtype=torch.bool)
        distinct[1:] = (items[1:] != items[:-1]) | (queries[1:] != queries[:-1])
        self._items: Tensor = items[distinct]
        self._queries: Tensor = queries[distinct]

    def in_chunk(self, first_item: int, num_items: int) -> tuple[Tensor, Tensor]:
        """Row and column, in a score chunk [Q, num_items] starting at `first_item`, of every pair that lies in it."""
        bounds = torch.tensor([first_item, first_item + num_items], device=self._items.device)
        begin, end = torch.searchsorted(self._items, bounds).tolist()
        return self._queries[begin:end], self._items[begin:end] - first_item


class TargetRankCounter:
    """Counts, over chunks of the corpus, the items that rank before each query's target.

    Every item of the corpus is to be shown to `update` once, in any order and any chunking. To add up counters that
    each saw a part of the corpus (shards on other ranks), sum their `partial_counts` in place, then read `result`.

    Args:
        targets: [Q] int64 item indices.
        target_scores: [Q] float: exactly the value that stands in the target's column of the scores.
        seen_values: [T] int64, the whole history before the target, jagged.
        seen_offsets: [Q + 1] int64.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """

    def __init__(self, targets: Tensor, target_scores: Tensor, seen_values: Tensor, seen_offsets: Tensor) -> None:
        if targets.dim() != 1 or targets.dtype != torch.int64:
            raise ValueError(f"targets is {targets.dtype} {list(targets.shape)}; int64 [Q] is expected")
        if target_scores.shape != targets.shape or not target_scores.is_floating_point():
            raise ValueError(
                f"target_scores is {target_scores.dtype} {list(target_scores.shape)}; "
                f"float {list(targets.shape)} is expected"
            )
        check_jagged(seen_values, seen_offsets, targets.numel(), name="seen")
        self._targets = targets
        self._target_scores = target_scores
        self._seen = SeenItems(seen_values, seen_offsets)
        num_queries = targets.numel()
        #: [2 Q + 1] int64: items before the target, seen items before the target, NaN scores met. Sums over shards.
        self.partial_counts: Tensor = torch.zeros(2 * num_queries + 1, dtype=torch.int64, device=targets.device)
        self._before, self._seen_before, self._nan = self.partial_counts.split([num_queries, num_queries, 1])

    def update(self, scores: Tensor, first_item: int) -> None:
        """Count the items `first_item ... first_item + C - 1`.

        Args:
            scores: [Q, C], the dtype of `target_scores`. NaN is remembered here and raised by `result`, so that ranks
                of a distributed run can agree on it first.
            first_item: item index of column 0.

        Raises:
            ValueError: shape, dtype or `first_item` do not fit.
        """
        num_queries = self._targets.numel()
        if scores.dim() != 2 or scores.size(0) != num_queries or scores.dtype != self._target_scores.dtype:
            raise ValueError(
                f"scores is {scores.dtype} {list(scores.shape)}; "
                f"{self._target_scores.dtype} [{num_queries}, C] is expected"
            )
        if first_item < 0:
            raise ValueError(f"first_item is {first_item}; item indices count from 0")
        num_items = scores.size(1)
        items = torch.arange(first_item, first_item + num_items, device=scores.device)
        target_scores = self._target_scores.unsqueeze(1)
        smaller_index = items < self._targets.unsqueeze(1)
        before = torch.where(smaller_index, scores >= target_scores, scores > target_scores)
        self._before += before.sum(dim=1)
        # A target in its own history needs no exception: it never ranks before itself.
        seen_rows, seen_columns = self._seen.in_chunk(first_item, num_items)
        self._seen_before.index_add_(0, seen_rows, before[seen_rows, seen_columns].to(torch.int64))
        self._nan += scores.isnan().sum()

    def result(self) -> tuple[Tensor, Tensor]:
        """Filtered and unfiltered 1-based ranks, [Q] int64 each.

        Raises:
            InputError: scores were NaN; the message says how many.
        """
        nan_scores, nan_targets = int(self._nan), int(self._target_scores.isnan().sum())
        if nan_scores or nan_targets:
            raise InputError(
                f"{nan_scores} scores and {nan_targets} of {self._targets.numel()} target scores are NaN: "
                f"no rank exists. The queries or item embeddings hold NaN or infinite values (a diverged training?)"
            )
        unfiltered = self._before + 1
        return unfiltered - self._seen_before, unfiltered


def target_ranks(scores: Tensor, targets: Tensor, seen_values: Tensor, seen_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Filtered and unfiltered ranks of the targets in a whole score matrix.

    Args:
        scores: [Q, I] float; column = dense item index. -inf for columns that are no items is legal.
        targets: [Q] int64, 0 <= target < I.
        seen_values: [T] int64, the whole history before the target, jagged.
        seen_offsets: [Q + 1] int64.

    Returns:
        (filtered [Q], unfiltered [Q]) int64, 1-based.

    Raises:
        ValueError: shapes, dtypes or item indices do not fit.
        InputError: scores are NaN; the message says how many.
    """
    if scores.dim() != 2 or targets.dim() != 1 or scores.size(0) != targets.numel():
        raise ValueError(f"scores {list(scores.shape)} and targets {list(targets.shape)}; [Q, I] and [Q] are expected")
    check_item_indices(targets, scores.size(1), name="targets")
    check_item_indices(seen_values, scores.size(1), name="seen_values")
    target_scores = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
    counter = TargetRankCounter(targets, target_scores, seen_values, seen_offsets)
    counter.update(scores, first_item=0)
    return counter.result()


def check_item_indices(items: Tensor, num_items: int, *, name: str) -> None:
    """Raise ValueError unless all `items` lie in [0, num_items)."""
    outside = (items < 0) | (items >= num_items)
    if bool(outside.any()):
        raise ValueError(
            f"{name} holds {int(outside.sum())} item indices outside 0 ... {num_items - 1}, the first is "
            f"{int(items[outside][0])}: were the scores made from another store?"
        )
