"""fbgemm's deduplication of ids (`use_index_dedup`), for `npu`.

fbgemm has CUDA kernels only, so that TorchRec's index dedup does not run on CPU; it still does not, since stock CPU
behaviour is left alone.

What runs is the family jagged_unique. How many ids are unique only their values tell: the host waits for the device,
once (fbgemm's CUDA kernel twice).

Left out: jagged_hash_size_cumsum and jagged_acc_weights_and_counts, which TorchRec does not call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.lookup_call import UniqueCall
from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.segments import check_indices, check_offsets_shape, complete_offsets, gather, segments_of


def jagged_unique_indices(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each table's ids without their repetitions.

    Features of one table share its ids. Unique ids are sorted by table, then by id. fbgemm finds the table of an id by
    adding the sizes of the tables before it, and counts an id beyond its table's size for the next table
    (pytorch/FBGEMM#5799, mended there for the last table). Here the table itself is the first sort key, and any id is
    counted where it belongs.

    Args:
        hash_size_cumsum: [T + 1], sizes of the tables before each of T features; not used but for T.
        hash_size_offsets: [T + 1], features before each table; tables of no features are skipped.
        offsets: [T * B + 1] int32 or int64, of the bags.
        indices: [N] int32 or int64.

    Returns:
        lengths [T * B], the number of unique ids of each table spread evenly over its bags, in the dtype of `offsets`;
        their offsets [T * B + 1]; the unique ids [U], in the dtype of `indices`; for each id its place among them,
        [N] int64.

    Raises:
        ValueError: for sizes or dtypes that contradict each other.
    """
    features, batch = _check(hash_size_cumsum, hash_size_offsets, offsets, indices)
    if features * batch == 0:
        nothing = torch.zeros(0, dtype=torch.int64, device=indices.device)
        lengths = torch.zeros(features * batch, dtype=offsets.dtype, device=offsets.device)
        return lengths, lengths.new_zeros(features * batch + 1), indices.new_empty(0), nothing
    tables = hash_size_offsets.to(torch.int64)
    begins = gather(offsets.to(torch.int64), tables * batch)
    # Positions that no bag claims go to the nearest table, whatever contradicts itself to no place outside.
    begins = begins.masked_fill(tables <= 0, 0).masked_fill(tables >= features, indices.numel())
    begins = begins.clamp(0, indices.numel()).cummax(0).values
    call = UniqueCall(indices, begins)
    unique_indices, ends, reverse = dispatch.serve("jagged_unique", call, None).unique(call)
    of_table = ends.diff()
    lengths = _spread(of_table, tables, features, batch).to(offsets.dtype)
    return lengths, complete_offsets(lengths).to(offsets.dtype), unique_indices, reverse


def _spread(of_table: Tensor, tables: Tensor, features: int, batch: int) -> Tensor:
    """The unique ids of each table spread evenly over its bags, the first bags getting one more: [T * B] int64."""
    bag = torch.arange(features * batch, device=tables.device)
    table = segments_of(tables, bag // batch)
    begin = gather(tables, table)
    bags = ((gather(tables, table + 1) - begin) * batch).clamp_(min=1)
    share = gather(of_table, table)
    return share // bags + (bag - begin * batch < share % bags)


def _check(cumsum: Tensor, tables: Tensor, offsets: Tensor, indices: Tensor) -> tuple[int, int]:
    """(features, batch size)."""
    check_indices(indices, "indices")
    check_offsets_shape(cumsum, "hash_size_cumsum")
    features = cumsum.numel() - 1
    if features < 1:
        raise ValueError(f"hash_size_cumsum must have at least two elements, got {cumsum.numel()}")
    check_offsets_shape(tables, "hash_size_offsets", segments=features)
    check_offsets_shape(offsets, "offsets")
    if (offsets.numel() - 1) % features:
        raise ValueError(f"offsets must be of whole batches of {features} features, got {offsets.numel() - 1} bags")
    if offsets.numel() == 1 and indices.numel():
        raise ValueError(f"indices must be empty, since there are no bags, got {indices.numel()}")
    return features, (offsets.numel() - 1) // features


KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(
        schema="fbgemm::jagged_unique_indices(Tensor hash_size_cumsum, Tensor hash_size_offsets, Tensor offsets,"
        " Tensor indices) -> (Tensor, Tensor, Tensor, Tensor)",
        function=jagged_unique_indices,
    ),
)
