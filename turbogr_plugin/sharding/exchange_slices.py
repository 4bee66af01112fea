"""The ids of all replicas cut into one slice per replica: what each sends to whom where each adds one slice.

Slices are cut from the union of the ids, so that popular ids, which cluster, do not make one of them the largest, and
by the elements of their rows, since tables differ in width. Every rank computes the same from all ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr_plugin.sharding.touched_rows import TableLayout

Part = tuple[list[int], int, int]
"""Rows by table, and where they begin and end among the ids of their rank."""


@dataclass(frozen=True)
class ExchangeSlices:
    """The ids of all ranks, cut into one slice per rank with as many elements each."""

    ids: Tensor
    """[V] of all, ascending."""
    sent: list[Part]
    """This rank's ids in each slice."""
    arriving: list[Part]
    """Each rank's ids in this rank's slice."""
    sums: list[list[int]]
    """Rows by table of each slice."""
    most_elements: int
    """That a rank sends, in both steps."""

    @classmethod
    def of(
        cls, layout: TableLayout, ids: Sequence[Tensor], counts: Sequence[list[int]], every: Tensor, rank: int
    ) -> ExchangeSlices:
        """The same on every rank, but for what is this rank's."""
        ranks, of_union = len(ids), layout.rows_of_width(layout.counts(every))
        whole = _elements(layout, of_union, every.numel())
        cuts = [_position(layout, of_union, whole * number // ranks) for number in range(ranks)] + [every.numel()]
        last = every.new_tensor([layout.bounds[-1]])
        firsts = torch.cat([every, last])[torch.tensor(cuts, device=every.device)]
        bounds = [torch.searchsorted(part, firsts).tolist() for part in ids]

        sent = [0] * ranks
        for other, count in enumerate(counts):
            places = [_elements(layout, layout.rows_of_width(count), place) for place in bounds[other]]
            sent[other] += places[-1] - (places[other + 1] - places[other])
            begin, end = (_elements(layout, of_union, cuts[number]) for number in (other, other + 1))
            sent[other] += (ranks - 1) * (end - begin)

        def part(of_rank: int, number: int) -> Part:
            begin, end = bounds[of_rank][number], bounds[of_rank][number + 1]
            return layout.counts(ids[of_rank][begin:end]), begin, end

        return cls(
            every,
            [part(rank, number) for number in range(ranks)],
            [part(other, rank) for other in range(ranks)],
            [layout.counts(every[begin:end]) for begin, end in itertools.pairwise(cuts)],
            max(sent),
        )


def _elements(layout: TableLayout, rows: Sequence[int], count: int) -> int:
    """Of the first `count` rows, where `rows` are of each width."""
    found = 0
    for width, of_width in zip(layout.widths, rows, strict=True):
        found += width.dim * min(count, of_width)
        count = max(0, count - of_width)
    return found


def _position(layout: TableLayout, rows: Sequence[int], elements: int) -> int:
    """How many rows have that many elements, rounded down."""
    found = 0
    for width, of_width in zip(layout.widths, rows, strict=True):
        taken = min(elements // width.dim, of_width)
        found += taken
        elements -= taken * width.dim
        if taken < of_width:
            break
    return found


def rows_between(layout: TableLayout, counts: list[int], rows: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """The rows from `begin` to `end` in the order of ids, of each width."""
    found, first = [], 0
    for block, count in zip(rows, layout.rows_of_width(counts), strict=True):
        found.append(block[max(0, begin - first) : max(0, end - first)])
        first += count
    return found
