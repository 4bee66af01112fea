"""The parts of a sharded table that a rank holds, whichever of torch's two classes its state dict has.

TorchRec gives ShardedTensors, and DTensors where ranks form groups (ShardingEnv2D), whose local tensor is a wrapper of
several shards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor


class LocalShard(NamedTuple):
    """A part of a table."""

    row: int
    """Its first row, and"""
    column: int
    """its first column in the whole table."""
    values: Tensor
    """[rows, columns], a view of the live weights."""


def is_sharded(entry: object) -> bool:
    """Whether `local_shards` knows an entry of a state dict."""
    return isinstance(entry, ShardedTensor) or (
        isinstance(entry, DTensor) and hasattr(entry.to_local(), "local_shards")
    )


def local_shards(entry: Any) -> list[LocalShard]:
    """The shards of this rank in ascending order; none on a rank that holds nothing.

    Args:
        entry: of two dimensions, for which `is_sharded` holds.
    """
    if isinstance(entry, ShardedTensor):
        found = [(shard.metadata.shard_offsets, shard.tensor) for shard in entry.local_shards()]
    else:
        wrapper = entry.to_local()
        parts = wrapper.local_shards()
        # Of a rank without shards TorchRec's wrapper has an offset all the same.
        found = list(zip(wrapper.local_offsets(), parts, strict=True)) if parts else []
    shards = [LocalShard(int(offsets[0]), int(offsets[1]), values.detach()) for offsets, values in found]
    return sorted((shard for shard in shards), key=lambda shard: shard[:2])


def whole_shape(entry: Any) -> tuple[int, ...]:
    """Of the table, not of this rank's part."""
    # Not entry.size(): on a ShardedTensor it goes through a deprecated dispatch that warns.
    return tuple(entry.metadata().size if isinstance(entry, ShardedTensor) else entry.size())


def is_cut_by_columns(entry: Any) -> bool:
    """Whether rows are cut: as every rank knows of a ShardedTensor; of a DTensor those that hold a part of it.

    TorchRec's placements do not tell: a rank without a part has others than the rest.
    """
    if isinstance(entry, ShardedTensor):
        columns = entry.metadata().size[1]
        return any(shard.shard_sizes[1] != columns for shard in entry.metadata().shards_metadata)
    return any(shard.values.size(1) < entry.size(1) for shard in local_shards(entry))
