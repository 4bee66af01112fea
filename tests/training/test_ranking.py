"""Target ranks against a brute-force sort by (-score, item index), with exact ties, repeats and every chunking."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turbogr_plugin.errors import InputError
from turbogr_plugin.training.ranking import SeenItems, TargetRankCounter, target_ranks


def sorted_rank(scores: list[float], target: int, removed: set[int]) -> int:
    """The oracle: sort all items that are not removed, find the target."""
    items = [item for item in range(len(scores)) if item == target or item not in removed]
    return sorted(items, key=lambda item: (-scores[item], item)).index(target) + 1


def random_case(seed: int, queries: int, items: int, levels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with `levels` distinct values (few: many exact ties), targets and histories with repeats, some empty."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (queries, items), generator=generator).float() - levels // 2
    targets = torch.randint(items, (queries,), generator=generator)
    lengths = torch.randint(0, 2 * items, (queries,), generator=generator)
    lengths[::4] = 0
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    values = torch.randint(items, (int(offsets[-1]),), generator=generator)
    return scores, targets, values, offsets


def oracle(scores: Tensor, targets: Tensor, values: Tensor, offsets: Tensor) -> tuple[list[int], list[int]]:
    filtered, unfiltered = [], []
    for query, target in enumerate(targets.tolist()):
        seen = set(values[offsets[query] : offsets[query + 1]].tolist())
        filtered.append(sorted_rank(scores[query].tolist(), target, seen))
        unfiltered.append(sorted_rank(scores[query].tolist(), target, set()))
    return filtered, unfiltered


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_equal_those_of_a_sort_with_ties_by_item_index(seed: int, levels: int) -> None:
    case = random_case(seed, queries=25, items=19, levels=levels)
    filtered, unfiltered = target_ranks(*case)
    assert (filtered.tolist(), unfiltered.tolist()) == oracle(*case)
    assert filtered.dtype == unfiltered.dtype == torch.int64


def test_every_chunking_in_any_order_gives_the_same_ranks() -> None:
    scores, targets, values, offsets = random_case(7, queries=20, items=23, levels=4)
    expected = oracle(scores, targets, values, offsets)
    target_scores = scores.gather(1, targets[:, None])[:, 0]
    for chunk in range(1, 25):
        counter = TargetRankCounter(targets, target_scores, values, offsets)
        for first in reversed(range(0, 23, chunk)):
            counter.update(scores[:, first : first + chunk], first)
        filtered, unfiltered = counter.result()
        assert (filtered.tolist(), unfiltered.tolist()) == expected, f"chunk size {chunk}"


def test_counts_of_counters_over_disjoint_shards_add_up() -> None:
    scores, targets, values, offsets = random_case(8, queries=10, items=30, levels=3)
    target_scores = scores.gather(1, targets[:, None])[:, 0]
    counters = [TargetRankCounter(targets, target_scores, values, offsets) for _ in range(3)]
    for counter, (first, last) in zip(counters, [(0, 11), (11, 11), (11, 30)], strict=True):
        counter.update(scores[:, first:last], first)
    counters[0].partial_counts += counters[1].partial_counts + counters[2].partial_counts
    filtered, unfiltered = counters[0].result()
    assert (filtered.tolist(), unfiltered.tolist()) == oracle(scores, targets, values, offsets)


def test_target_stays_even_where_the_history_holds_it_and_repeats_are_removed_once() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    filtered, unfiltered = target_ranks(
        scores, torch.tensor([2]), torch.tensor([0, 0, 0, 2, 2, 3]), torch.tensor([0, 6])
    )
    assert (filtered.tolist(), unfiltered.tolist()) == ([2], [3])


def test_equal_scores_rank_by_item_index() -> None:
    scores = torch.zeros(4, 4)
    _, unfiltered = target_ranks(
        scores, torch.arange(4), torch.zeros(0, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    )
    assert unfiltered.tolist() == [1, 2, 3, 4]


def test_infinite_scores_are_legal() -> None:
    scores = torch.tensor([[-torch.inf, 1.0, torch.inf], [-torch.inf, -torch.inf, 0.0]])
    _, unfiltered = target_ranks(
        scores, torch.tensor([1, 1]), torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    )
    assert unfiltered.tolist() == [2, 3]


def test_no_queries_give_no_ranks() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    filtered, unfiltered = target_ranks(torch.zeros(0, 5), empty, empty, torch.zeros(1, dtype=torch.int64))
    assert filtered.shape == unfiltered.shape == (0,)


def test_nan_scores_are_an_error_that_counts_them() -> None:
    scores = torch.zeros(2, 6)
    scores[0, 1] = scores[1, 2] = scores[1, 5] = torch.nan
    empty, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InputError, match="3 scores and 1 of 2 target scores are NaN"):
        target_ranks(scores, torch.tensor([0, 5]), empty, offsets)


def test_bad_arguments_are_named() -> None:
    scores, targets, values, offsets = random_case(0, queries=3, items=5, levels=2)
    with pytest.raises(ValueError, match=r"targets holds 1 item indices outside 0 \.\.\. 4, the first is 5"):
        target_ranks(scores, torch.tensor([0, 5, 1]), values, offsets)
    with pytest.raises(ValueError, match="seen_values holds 1 item"):
        target_ranks(scores, targets, torch.tensor([-1]), torch.tensor([0, 1, 1, 1]))
    with pytest.raises(ValueError, match="seen_offsets"):
        target_ranks(scores, targets, values, offsets[:-1])
    with pytest.raises(ValueError, match="never fall"):
        target_ranks(scores, targets, torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2]))
    counter = TargetRankCounter(targets, scores[:, 0], values, offsets)
    with pytest.raises(ValueError, match="first_item is -1"):
        counter.update(scores, -1)
    with pytest.raises(ValueError, match="float64"):
        counter.update(scores.double(), 0)


def test_seen_items_of_a_chunk_are_distinct_and_relative_to_it() -> None:
    seen = SeenItems(torch.tensor([7, 3, 7, 4, 9]), torch.tensor([0, 3, 3, 5]))
    rows, columns = seen.in_chunk(first_item=4, num_items=4)
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [(0, 3), (2, 0)]
