"""Tables of an exchange whose rows all travel, since so many of them are touched that this takes fewer bytes.

All rows of such a table stand for its touched ones, zeros where none came, so no ids are needed; everything after that
is the exchange of any other table. Rows that stay zero are dropped from the sums, so this is for optimizers that leave
a row without gradient alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr_plugin.sharding.exchange_wire import id_dtype
from turbogr_plugin.sharding.touched_rows import TableLayout


@dataclass(frozen=True)
class DenseTables:
    """Which tables of a module they are."""

    layout: TableLayout
    places: frozenset[int]
    """In the layout's order."""

    @classmethod
    def cheapest(cls, layout: TableLayout, counts: Sequence[Sequence[int]], wire: torch.dtype) -> DenseTables:
        """Those of which all rows take fewer bytes than the touched ones, as far as it is known before ids are.

        Args:
            layout: of the tables.
            counts: touched rows of each table in the layout's order, by rank.
            wire: dtype of the rows.
        """
        ranks = len(counts)
        # By slices, where the union of the ids is at least the largest part; by all-gather it is no less.
        shares = 2 * (ranks - 1) / ranks
        id_bytes = id_dtype(layout.bounds[-1]).itemsize
        found = set()
        for place, table in enumerate(layout.order):
            row, most = layout.dims[table] * wire.itemsize, max(of_rank[place] for of_rank in counts)
            if shares * layout.rows[table] * row < most * (shares * row + (ranks - 1) * id_bytes):
                found.add(place)
        return cls(layout, frozenset(found))

    @classmethod
    def every(cls, layout: TableLayout) -> DenseTables:
        """All tables."""
        return cls(layout, frozenset(range(len(layout.order))))

    @classmethod
    def none(cls, layout: TableLayout) -> DenseTables:
        """No table."""
        return cls(layout, frozenset())

    def others(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """The ids of the other tables."""
        parts = ids.split(list(counts))
        kept = [part for place, part in enumerate(parts) if place not in self.places]
        return torch.cat(kept) if kept else ids.new_empty(0)

    def other_count(self, counts: Sequence[int]) -> int:
        """How many ids the other tables have."""
        return sum(count for place, count in enumerate(counts) if place not in self.places)

    def all_counts(self, counts: Sequence[int]) -> list[int]:
        """Rows that travel, by table."""
        layout = self.layout
        return [
            layout.rows[layout.order[place]] if place in self.places else count for place, count in enumerate(counts)
        ]

    def all_ids(self, others: Tensor, counts: Sequence[int]) -> Tensor:
        """The linear ids of all rows that travel.

        Args:
            others: as `others` gives them.
            counts: touched rows of each table.
        """
        parts, begin = [], 0
        for place, count in enumerate(counts):
            if place in self.places:
                parts.append(torch.arange(*self.layout.bounds[place : place + 2], device=others.device))
            else:
                parts.append(others[begin : begin + count])
                begin += count
        return torch.cat(parts)

    def spread(self, rows: Sequence[Tensor], ids: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The rows of each width that travel.

        Args:
            rows: for each width those of the touched ids.
            ids: the touched ids.
            counts: of them, by table.
        """
        layout, of_table = self.layout, ids.split(list(counts))
        found = []
        for width, block in zip(layout.widths, rows, strict=True):
            parts = list(block.split([counts[place] for place in width.tables]))
            for number, place in enumerate(width.tables):
                if place in self.places:
                    whole = block.new_zeros(layout.rows[layout.order[place]], width.dim)
                    whole[of_table[place] - layout.bounds[place]] = parts[number]
                    parts[number] = whole
            found.append(torch.cat(parts))
        return found

    def kept(self, ids: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
        """For each width a mask of the rows: those of other tables, and what is not zero."""
        layout, found, begin = self.layout, [], 0
        for width, block in zip(layout.widths, rows, strict=True):
            of_width = ids[begin : begin + len(block)]
            begin += len(block)
            keep = block.any(dim=1)
            for place in width.tables:
                if place not in self.places:
                    keep |= (of_width >= layout.bounds[place]) & (of_width < layout.bounds[place + 1])
            found.append(keep)
        return found
