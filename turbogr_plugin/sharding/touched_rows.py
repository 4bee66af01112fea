"""Which rows of a table module a lookup has touched, and the gradient of each: what replicas of the tables exchange.

fbgemm keeps the tables of a module side by side; each has features, and a feature looks rows of its table up. Here each
row of the module has one number, its linear id, so that all tables are sorted, exchanged and summed at once. Tables of
one width lie next to each other in these numbers: their rows form one matrix, so nothing is padded.

Left out: batches whose features differ in the number of samples (variable batch).

Letters: N looked-up ids, F features, B bags of a feature, T tables, U different ids, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor

from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.jagged_unique import jagged_unique


@dataclass(frozen=True)
class TablesOfWidth:
    """Neighbours in the order of linear ids."""

    dim: int
    tables: tuple[int, ...]
    """Their places in `TableLayout.order`."""
    features: tuple[int, ...]


@dataclass(frozen=True)
class TableLayout:
    """How the rows of a table module are numbered."""

    rows: tuple[int, ...]
    """Of each table, in the module's order."""
    dims: tuple[int, ...]
    feature_tables: tuple[int, ...]
    """The table of each feature."""
    pooling: int
    """fbgemm's PoolingMode."""

    @classmethod
    def of(cls, tables: Any) -> TableLayout:
        """That of one of fbgemm's modules of tables with a fused optimizer."""
        return cls(
            rows=tuple(int(spec[0]) for spec in tables.embedding_specs),
            dims=tuple(int(spec[1]) for spec in tables.embedding_specs),
            feature_tables=tuple(int(table) for table in tables.feature_table_map),
            pooling=int(tables.pooling_mode),
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Tables in the order of their linear ids: by width, then as in the module."""
        return tuple(sorted(range(len(self.rows)), key=lambda table: (self.dims[table], table)))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """[T + 1]: the first linear id of each table in `order`, and the number of all rows."""
        found = [0]
        for table in self.order:
            found.append(found[-1] + self.rows[table])
        return tuple(found)

    @cached_property
    def widths(self) -> tuple[TablesOfWidth, ...]:
        """Ascending."""
        found = []
        for dim in sorted(set(self.dims)):
            places = tuple(place for place, table in enumerate(self.order) if self.dims[table] == dim)
            features = tuple(f for f, table in enumerate(self.feature_tables) if self.dims[table] == dim)
            found.append(TablesOfWidth(dim, places, features))
        return tuple(found)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """[T]: the linear id of row 0 of each table, in the module's order."""
        return tuple(self.bounds[self.order.index(table)] for table in range(len(self.rows)))

    @property
    def pooled(self) -> bool:
        """Whether a bag of rows becomes one."""
        return self.pooling != PoolingMode.NONE.value

    def counts(self, ids: Tensor) -> list[int]:
        """[T] in `order`: how many of the ascending linear ids belong to each table. A device is waited for."""
        bounds = torch.tensor(self.bounds, device=ids.device)
        return torch.searchsorted(ids, bounds).diff().tolist()

    def rows_of_width(self, counts: list[int]) -> list[int]:
        """How many of the counted rows are of each width."""
        return [sum(counts[place] for place in width.tables) for width in self.widths]


@dataclass(frozen=True)
class TouchedRows:
    """The different ids of one lookup, and how their gradients follow from that of its result."""

    layout: TableLayout
    ids: Tensor
    """[U] int64, linear, ascending."""
    counts: list[int]
    """[T] in the layout's order: how many of them belong to each table."""
    places: Tensor
    """[N]: the place of each looked-up id among `ids`."""
    bags: Tensor | None
    """[N] of pooled tables: the bag of each looked-up id, F B of them, those of a feature together."""
    bag_bounds: Tensor | None
    """[F + 1] of pooled tables of several widths: where the ids of each feature begin."""
    scale: Tensor | None
    """[N]: factor of each looked-up row in its bag; None: 1."""

    @classmethod
    def of(cls, layout: TableLayout, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> TouchedRows:
        """Those of a lookup.

        Args:
            layout: of the tables.
            indices: [N] rows of the tables, by feature.
            offsets: [F B + 1] where the ids of each bag begin.
            weights: [N] factors of the rows, or None.
        """
        features = len(layout.feature_tables)
        bags = (offsets.numel() - 1) // features
        offsets = offsets.long()
        bounds = offsets[:: bags or 1][: features + 1] if bags else offsets.new_zeros(features + 1)
        shift = torch.tensor([layout.starts[table] for table in layout.feature_tables], device=indices.device)
        count = indices.numel()
        linear = indices.long() + shift.repeat_interleave(bounds.diff(), output_size=count)
        ids, _, places = jagged_unique(linear)
        of_bag = scale = None
        if layout.pooled:
            lengths = offsets.diff()
            of_bag = torch.arange(features * bags, device=indices.device).repeat_interleave(lengths, output_size=count)
            scale = None if weights is None else weights.detach().float()
            if layout.pooling == PoolingMode.MEAN.value:
                scale = lengths.float().reciprocal()[of_bag]
        several = layout.pooled and len(layout.widths) > 1
        return cls(layout, ids, layout.counts(ids), places, of_bag, bounds if several else None, scale)

    def gradients(self, grad: Tensor) -> list[Tensor]:
        """The gradient of each row: the sum over its positions, in their order.

        Args:
            grad: of the lookup's result, [N, D], of pooled tables [B, sum of D over the features].

        Returns:
            For each width of the layout [rows of that width, D], float32, in the order of `ids`.
        """
        if self.bags is None:
            return [coalesce_rows(self.places, grad)[1].float()]
        begins = [0]
        for table in self.layout.feature_tables:
            begins.append(begins[-1] + self.layout.dims[table])
        batch = grad.shape[0]
        found = []
        for width in self.layout.widths:
            columns = [grad[:, begins[f] : begins[f + 1]] for f in width.features]
            bags = torch.stack(columns).view(len(columns) * batch, width.dim)
            places, of_bag, scale = self.places, self.bags, self.scale
            if self.bag_bounds is not None:
                mine, moved = self._positions(width, batch)
                places, of_bag = places[mine], moved
                scale = None if scale is None else scale[mine]
            rows = bags[of_bag]
            found.append(coalesce_rows(places, rows if scale is None else rows * scale[:, None])[1].float())
        return found

    def _positions(self, width: TablesOfWidth, batch: int) -> tuple[Tensor, Tensor]:
        """The looked-up ids of one width [n], and the bag of each, counted among the features of that width."""
        assert self.bags is not None and self.bag_bounds is not None
        bounds = self.bag_bounds.tolist()
        positions, bags = [], []
        for number, feature in enumerate(width.features):
            begin, end = bounds[feature], bounds[feature + 1]
            positions.append(torch.arange(begin, end, device=self.bags.device))
            bags.append(self.bags[begin:end] + (number - feature) * batch)
        return torch.cat(positions), torch.cat(bags)
