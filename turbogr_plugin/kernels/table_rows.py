"""Rows of embedding tables that lie behind one another in one flat buffer, as fbgemm's table-batched modules hold them.

A group of tables is looked up by features; several features may share a table and tables may differ in width. All sizes
that decide a shape are known on the host, so that nothing here waits for the device. Addresses are int64 throughout:
a buffer may have more than 2^31 elements.

A block of rows is [N, max_D]. Where a table is narrower than max_D, the surplus columns repeat the row's last
columns, when reading as well as when writing: an elementwise update gives them equal values, and equal values written
to one place are harmless. Whoever sums over a row masks them (`Tables.columns`).

Left out: the choice of rows (table_bags.py), their update (reference/lookup_update.py), caches and unified memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tables:
    """Shapes of the tables behind T features."""

    d_offsets: Tensor
    """[T+1] int32 or int64: column of the pooled output where each feature begins."""
    first_row: Tensor
    """[T+1] int64: number of rows in all earlier tables, then the number of all rows (fbgemm's hash_size_cumsum)."""
    total_d: int
    """Sum of the features' widths."""
    max_d: int
    """Largest width."""
    unit: int = 1
    """A number that divides all widths; tables of several widths are addressed in units of so many columns. fbgemm's
    fused tables have widths that 4 divides, which makes their addresses a fourth as many."""
    aligned: bool = True
    """Whether the largest width divides the begin of each table and the size of the buffer. Beside tables of other
    widths, which no feature reads, it may not; `unit` then divides their widths too."""

    @property
    def features(self) -> int:
        """T."""
        return self.d_offsets.numel() - 1

    @property
    def uniform(self) -> bool:
        """Whether all features have one width."""
        return self.total_d == self.features * self.max_d

    @property
    def matrix(self) -> bool:
        """Whether a buffer is a matrix of rows."""
        return self.uniform and self.aligned

    @cached_property
    def widths(self) -> Tensor:
        """[T] int64: width of each feature's table."""
        begins = self.d_offsets.to(torch.int64)
        return begins[1:] - begins[:-1]

    @cached_property
    def heights(self) -> Tensor:
        """[T] int64: number of rows of each feature's table.

        The distance to the next greater `first_row`: a table without rows must lie behind all others, else its features
        are taken for those of the table behind it, as in fbgemm, whose operators are told no more.
        """
        begins, _ = self.first_row.sort()
        following = torch.searchsorted(begins, self.first_row[:-1], right=True)
        return begins.index_select(0, following.clamp(max=self.features)) - self.first_row[:-1]

    def columns(self, feature: Tensor) -> Tensor | None:
        """[N, max_D] bool: which columns of a block of rows are real; None if all are."""
        if self.uniform:
            return None
        column = torch.arange(self.max_d, device=feature.device)
        return column < self.widths.index_select(0, feature).unsqueeze(1)

    def source_units(self, feature: Tensor) -> Tensor:
        """[N, max_D / unit] int64: the unit of a row that each unit of a block repeats."""
        last = torch.div(self.widths, self.unit, rounding_mode="floor") - 1
        unit = torch.arange(self.max_d // self.unit, device=feature.device)
        return torch.minimum(unit, last.index_select(0, feature).unsqueeze(1))

    def source_columns(self, feature: Tensor) -> Tensor:
        """[N, max_D] int64: the column that each column of a block repeats."""
        column = torch.arange(self.unit, device=feature.device)
        return (self.source_units(feature).unsqueeze(2) * self.unit + column).view(-1, self.max_d)


@dataclass(frozen=True)
class FlatTables:
    """One flat buffer: weights, or a state of the optimizer with one value per weight or per row."""

    values: Tensor
    """[E], fp32, fp16 or bf16."""
    begin: Tensor
    """[T] int64: where the table of each feature begins in `values`."""


@dataclass(frozen=True)
class Rows:
    """N rows, each by one of its features and its index in the table."""

    feature: Tensor
    """[N] int64."""
    index: Tensor
    """[N] int64."""


def lookup_rows(buffer: FlatTables, tables: Tables, rows: Rows) -> Tensor:
    """Reads rows.

    Returns:
        [N, max_D] in the buffer's dtype. An index that no table has reads some row of the buffer, or zeros if the
        buffer is empty: never outside of it.
    """
    count = rows.index.numel()
    if buffer.values.numel() == 0:
        return buffer.values.new_zeros(count, tables.max_d)
    places = _places(buffer, tables, rows)
    if tables.matrix:
        return buffer.values.view(-1, tables.max_d).index_select(0, places)
    return buffer.values.view(-1, tables.unit).index_select(0, places.view(-1)).view(count, tables.max_d)


def store_rows(buffer: FlatTables, tables: Tables, rows: Rows, block: Tensor) -> None:
    """Writes rows in place; rows that come more than once must bring equal values.

    Args:
        buffer: where the rows lie.
        tables: their shapes.
        rows: [N].
        block: [N, max_D], rounded to the buffer's dtype.
    """
    if buffer.values.numel() == 0:
        return
    places = _places(buffer, tables, rows)
    columns = tables.max_d if tables.matrix else tables.unit
    rounded = block.to(buffer.values.dtype).reshape(-1, columns)
    buffer.values.view(-1, columns).index_put_((places.view(-1),), rounded)


def lookup_row_values(buffer: FlatTables, rows: Rows) -> Tensor:
    """Reads one value per row: [N, 1]."""
    if buffer.values.numel() == 0:
        return buffer.values.new_zeros(rows.index.numel(), 1)
    return buffer.values.index_select(0, _row_places(buffer, rows)).unsqueeze(1)


def store_row_values(buffer: FlatTables, rows: Rows, values: Tensor) -> None:
    """Writes one value per row ([N, 1]) in place; rows that come more than once must bring equal values."""
    if buffer.values.numel() > 0:
        buffer.values.index_put_((_row_places(buffer, rows),), values.squeeze(1).to(buffer.values.dtype))


def add_rows(buffer: FlatTables, tables: Tables, rows: Rows, block: Tensor) -> Tensor:
    """Sums rows that may come more than once, in their order, into zeros of the buffer's shape.

    Args:
        buffer: gives shape and layout.
        tables: shapes of the tables.
        rows: [N].
        block: [N, max_D] float32 or float64; surplus columns are not added.

    Returns:
        [E] in the dtype of `block`.
    """
    total = torch.zeros_like(buffer.values, dtype=block.dtype)
    if buffer.values.numel() == 0:
        return total
    places = _places(buffer, tables, rows)
    if tables.matrix:
        return total.view(-1, tables.max_d).index_add_(0, places, block).view(-1)
    columns = tables.columns(rows.feature)
    added = (block if columns is None else block.masked_fill(~columns, 0.0)).reshape(-1, tables.unit)
    return total.view(-1, tables.unit).index_add_(0, places.view(-1), added).view(-1)


def _places(buffer: FlatTables, tables: Tables, rows: Rows) -> Tensor:
    """[N] rows of the buffer seen as a matrix if the tables have one width, else [N, max_D / unit] units."""
    columns = tables.max_d if tables.matrix else tables.unit
    begin = torch.div(buffer.begin, columns, rounding_mode="floor").index_select(0, rows.feature)
    if tables.matrix:
        places = begin + rows.index
    else:
        width = torch.div(tables.widths, columns, rounding_mode="floor").index_select(0, rows.feature)
        places = (begin + rows.index * width).unsqueeze(1) + tables.source_units(rows.feature)
    return places.clamp(max=buffer.values.numel() // columns - 1)


def _row_places(buffer: FlatTables, rows: Rows) -> Tensor:
    places = buffer.begin.index_select(0, rows.feature) + rows.index
    return places.clamp(max=buffer.values.numel() - 1)
