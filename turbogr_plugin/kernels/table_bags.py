"""Bags of fbgemm's table lookups: which value belongs to which bag and feature, and where a pooled bag goes.

fbgemm orders bags by feature, then by sample: bag f * B + b. With variable batch sizes, feature f has its own B; its
samples come rank by rank, and the pooled output is one flat vector ordered by rank, feature and sample. Nothing here
waits for the device.

Left out: repair of bad input (fbgemm_bounds_check.py). Values that no bag claims, and ids that no table has, are told
apart here all the same (`Values.absent`), because fbgemm uses the id -1 for a row that was pruned away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turbogr_plugin.kernels.table_rows import Rows, Tables


@dataclass(frozen=True)
class VariableBatch:
    """Batch sizes by feature and rank, as fbgemm describes them; R ranks."""

    bag_offsets: Tensor
    """[T+1] int32: first bag of each feature (B_offsets)."""
    rank_offsets: Tensor
    """[T, R+1] int32: first sample of each rank within a feature (B_offsets_rank_per_feature)."""
    output_begin: Tensor
    """[R, T] int64: element of the output where the bags of a rank and a feature begin."""
    output_size: int
    """Number of elements of the output."""
    output: Tensor | None = None
    """[elements]: an output made by the caller for several groups of tables, of which this group fills its part."""

    def without_output(self) -> VariableBatch:
        """The same batch, for a backward pass."""
        return replace(self, output=None)


@dataclass(frozen=True)
class Values:
    """The N ids of a batch, resolved."""

    rows: Rows
    """Feature and row of each id; row 0 where the id is absent."""
    bag: Tensor
    """[N] int64, in [0, number of bags): the nearest bag where no bag claims the id."""
    absent: Tensor
    """[N] bool: no bag claims the id, or its table has no such row."""


def check_bags(tables: Tables, offsets: Tensor, variable: VariableBatch | None) -> int:
    """Number of bags.

    Raises:
        ValueError: the number of offsets fits no number of bags per feature.
    """
    bags = offsets.numel() - 1
    if bags < 0 or offsets.dim() != 1:
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}, needed is [number of bags + 1]")
    if variable is None and bags % tables.features:
        raise ValueError(
            f"offsets has {bags + 1} elements: {bags} bags cannot be the same number for each of "
            f"{tables.features} features"
        )
    return bags


def features_of_bags(bag: Tensor, bags: int, features: int, bag_offsets: Tensor | None) -> Tensor:
    """[N] int64: feature of each bag in `bag` [N] int64."""
    if bag_offsets is None:
        return torch.div(bag, max(bags // features, 1), rounding_mode="floor")
    return torch.searchsorted(bag_offsets.to(torch.int64), bag, right=True).sub(1).clamp(0, features - 1)


def bags_of_positions(offsets: Tensor, count: int) -> Tensor:
    """[count] int64: bag of each position; -1 before the first bag, the number of bags behind the last.

    Args:
        offsets: [bags + 1], non-decreasing.
        count: number of positions.
    """
    position = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, position, right=True) - 1


def resolve_values(tables: Tables, indices: Tensor, offsets: Tensor, variable: VariableBatch | None) -> Values:
    """Finds feature, row and bag of each id.

    Args:
        tables: the tables that are looked up.
        indices: [N] int32 or int64.
        offsets: [bags + 1] int32 or int64, non-decreasing.
        variable: batch sizes, if they are not one for all features.
    """
    bags = check_bags(tables, offsets, variable)
    found = bags_of_positions(offsets.contiguous(), indices.numel())
    bag = found.clamp(0, max(bags - 1, 0))
    feature = features_of_bags(bag, bags, tables.features, None if variable is None else variable.bag_offsets)
    index = indices.to(torch.int64)
    absent = (index < 0) | (index >= tables.heights.index_select(0, feature))
    absent = absent | (found != bag) if bags else torch.ones_like(absent)
    return Values(Rows(feature, index.masked_fill(absent, 0)), bag, absent)


def bag_lengths(offsets: Tensor) -> Tensor:
    """[bags] float32: number of ids of each bag, present or not, at least 1."""
    return (offsets[1:] - offsets[:-1]).clamp(min=1).to(torch.float32)


def arrange_bags(pooled: Tensor, tables: Tables, dtype: torch.dtype, variable: VariableBatch | None) -> Tensor:
    """Pooled bags as fbgemm returns them.

    Args:
        pooled: [bags, max_D].
        tables: the tables that were looked up.
        dtype: dtype of the output.
        variable: batch sizes, if they are not one for all features.

    Returns:
        [B, total_D], or with variable batch sizes the flat output, which is `variable.output` itself where it is given.
    """
    pooled = pooled.to(dtype)
    bags = pooled.shape[0]
    if variable is None:
        batch = bags // tables.features
        if tables.uniform:
            by_feature = pooled.view(tables.features, batch, tables.max_d)
            # A reshape of tables of one column is a view with strides that no allocation has.
            return by_feature.transpose(0, 1).reshape(batch, tables.total_d).contiguous()
        output = pooled.new_empty(batch, tables.total_d)
    elif variable.output is not None:
        output = variable.output
    else:
        output = pooled.new_empty(variable.output_size)
    if bags:
        places = _output_places(bags, tables, variable)
        output.view(-1, tables.unit).index_put_((places.view(-1),), pooled.view(-1, tables.unit))
    return output


def collect_bags(output: Tensor, tables: Tables, bags: int, variable: VariableBatch | None) -> Tensor:
    """The inverse of `arrange_bags`, for gradients: [bags, max_D], surplus columns repeat the last ones."""
    if bags == 0:
        return output.new_empty(0, tables.max_d)
    if variable is None and tables.uniform:
        return output.reshape(-1, tables.features, tables.max_d).transpose(0, 1).reshape(bags, tables.max_d)
    places = _output_places(bags, tables, variable)
    return output.reshape(-1, tables.unit).index_select(0, places.view(-1)).view(bags, tables.max_d)


def _output_places(bags: int, tables: Tables, variable: VariableBatch | None) -> Tensor:
    """[bags, max_D / unit] int64: unit of the flat output behind each unit of the pooled bags."""
    bag = torch.arange(bags, device=tables.d_offsets.device)
    if variable is None:
        batch = bags // tables.features
        feature = torch.div(bag, batch, rounding_mode="floor")
        sample = bag - feature * batch
        begin = sample * tables.total_d + tables.d_offsets.to(torch.int64).index_select(0, feature)
    else:
        feature, begin = variable_bag_begins(bag, tables, variable)
    return torch.div(begin, tables.unit, rounding_mode="floor").unsqueeze(1) + tables.source_units(feature)


def variable_bag_begins(bag: Tensor, tables: Tables, variable: VariableBatch) -> tuple[Tensor, Tensor]:
    """Feature of each bag and the element of the flat output where the bag begins, both [N] int64."""
    ranks = variable.rank_offsets.shape[1] - 1
    first = variable.bag_offsets[:-1].to(torch.int64).unsqueeze(1) + variable.rank_offsets[:, :-1].to(torch.int64)
    first = first.reshape(-1)  # [T * R]: first bag of each feature and rank; ends of empty ones coincide with begins
    group = torch.searchsorted(first, bag, right=True).sub(1).clamp(min=0)
    feature = torch.div(group, ranks, rounding_mode="floor")
    sample = bag - first.index_select(0, group)
    begin = variable.output_begin.t().reshape(-1).index_select(0, group)
    return feature, begin + sample * tables.widths.index_select(0, feature)
