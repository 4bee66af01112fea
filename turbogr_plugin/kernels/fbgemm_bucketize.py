"""fbgemm's bucketization of sparse features over ranks (row-wise sharding), for `npu`.

A table's rows are split into blocks, one or several per rank. Each id goes to the rank that holds its row, and becomes
the row number there. Within a rank the ids keep their order: feature by feature, sample by sample. One stable sort by
rank makes that order, because the input has the order of features and samples already.

Raw ids may be negative or larger than the table. fbgemm reads them as unsigned numbers and spreads them over the ranks
by remainder; so does this, in int64 arithmetic.

Content that contradicts itself: values behind the sum of the lengths count for the last sample; blocks that are no
whole number per rank (fbgemm reads them back to refuse them; that would wait for the device) put the surplus on the
last rank; ids before the first boundary go to rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.segments import (
    as_signed,
    as_unsigned,
    check_indices,
    complete_offsets,
    gather,
    numbers_on,
    search,
    search_in_groups,
    segment_ids,
    segments_of,
    unsigned_divmod,
)


def block_bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Ids by the rank that holds their row.

    Args:
        lengths: [S] int32 or int64, of T features with B samples each (or `batch_size_per_feature`); S = 0 is legal
            (fbgemm's CUDA kernel refuses it, pytorch/FBGEMM#3750).
        indices: [N] int32 or int64.
        bucketize_pos: also return the position of each id in its bag.
        sequence: also return where each id went.
        block_sizes: [T] rows per block of each feature's table; 0 where `block_bucketize_pos` alone decides.
        my_size: number of ranks.
        weights: [N, ...], moved with the ids.
        batch_size_per_feature: [T] samples of each feature.
        max_B: ignored, a launch hint for fbgemm's CUDA kernel.
        block_bucketize_pos: T tensors of rising boundaries: rank r holds rows boundaries[r] ... boundaries[r + 1] - 1.
        keep_orig_idx: ids stay as they are, only their order changes.
        total_num_blocks: [T] blocks of each table, a multiple of `my_size`; without it one per rank.
        keep_orig_idx_per_feature: [T] bool, overrules `keep_orig_idx`.

    Returns:
        lengths [my_size * S] rank by rank, ids [N], weights [N, ...] or None, positions [N] or None (`bucketize_pos`),
        and for each id the place it went to, [N] or None (`sequence`); the dtypes are those of lengths and ids.

    Raises:
        ValueError: for shapes or dtypes that contradict each other, or no rank.
    """
    return block_bucketize_sparse_features_inference(
        lengths,
        indices,
        bucketize_pos,
        sequence,
        block_sizes,
        my_size,
        weights,
        batch_size_per_feature,
        max_B,
        block_bucketize_pos,
        False,
        keep_orig_idx,
        total_num_blocks,
        keep_orig_idx_per_feature,
    )[:5]


def block_bucketize_sparse_features_2d_weights(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor,
    weights_dim: int = 1,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`block_bucketize_sparse_features` with `weights_dim` weights per id; the weights come back as [N, weights_dim].

    Raises:
        ValueError: as there, and for weights that are not N * weights_dim numbers.
    """
    if weights.numel() != indices.numel() * weights_dim:
        raise ValueError(f"weights must be [{indices.numel()}, {weights_dim}], got shape {tuple(weights.shape)}")
    out_lengths, out, out_weights, positions, unbucketize = block_bucketize_sparse_features(
        lengths,
        indices,
        bucketize_pos,
        sequence,
        block_sizes,
        my_size,
        weights.reshape(indices.numel(), weights_dim),
        batch_size_per_feature,
        max_B,
        block_bucketize_pos,
        keep_orig_idx,
        total_num_blocks,
        keep_orig_idx_per_feature,
    )
    assert out_weights is not None
    return out_lengths, out, out_weights, positions, unbucketize


def block_bucketize_sparse_features_inference(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    return_bucket_mapping: bool = False,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`block_bucketize_sparse_features` that can also return the rank of each id, [N], as its sixth result."""
    _check(lengths, indices, block_sizes, my_size, weights, batch_size_per_feature, total_num_blocks)
    samples, total = lengths.numel(), indices.numel()
    if total == 0:
        nothing = torch.empty_like(indices)
        return (
            lengths.new_zeros(my_size * samples),
            nothing,
            None if weights is None else torch.empty_like(weights),
            torch.empty_like(indices) if bucketize_pos else None,
            torch.empty_like(indices) if sequence else None,
            torch.empty_like(indices) if return_bucket_mapping else None,
        )
    flat = indices.reshape(-1)
    offsets = complete_offsets(lengths)
    sample = segment_ids(offsets, total)
    features = block_sizes.numel()
    if batch_size_per_feature is None:
        feature = sample // max(samples // features, 1)
    else:
        feature = segments_of(complete_offsets(batch_size_per_feature), sample)
    rank, row = _assign(flat, feature, block_sizes, my_size, total_num_blocks, block_bucketize_pos)
    if keep_orig_idx_per_feature is not None:
        row = torch.where(gather(keep_orig_idx_per_feature, feature), as_unsigned(flat), row)
    elif keep_orig_idx:
        row = as_unsigned(flat)
    order = torch.sort(rank.to(torch.int32), stable=True).indices
    # sorted by rank, and by sample within it: how many ids a bag has shows where it ends
    ends = search(gather(rank * samples + sample, order), torch.arange(my_size * samples, device=flat.device))
    counts = pad(ends, (1, 0)).diff().to(lengths.dtype)
    places = torch.arange(total, device=flat.device)
    went_to = torch.empty_like(places).scatter_(0, order, places).to(indices.dtype) if sequence else None
    return (
        counts,
        gather(as_signed(row, indices.dtype), order),
        None if weights is None else gather(weights, order),
        gather(places - gather(offsets, sample), order).to(indices.dtype) if bucketize_pos else None,
        went_to,
        rank.to(indices.dtype) if return_bucket_mapping else None,
    )


def _assign(
    indices: Tensor,
    feature: Tensor,
    block_sizes: Tensor,
    my_size: int,
    total_num_blocks: Tensor | None,
    block_bucketize_pos: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """For each id the rank that holds it and the row it has there (unsigned): both [N] int64."""
    ids = as_unsigned(indices)
    block = gather(block_sizes.to(torch.int64), feature)
    if total_num_blocks is None:
        blocks = torch.full_like(block, my_size)
    else:
        # TorchRec passes [1, features] (distributed/sharding/rw_sharding.py); the order is what counts.
        blocks = gather(total_num_blocks.to(torch.int64).reshape(-1), feature).clamp_(min=1)
    if block_bucketize_pos:
        features = block_sizes.numel()
        rank, row = _assign_by_boundaries(ids, feature, block, blocks, my_size, block_bucketize_pos, features)
    else:
        # Sizes of tables reach 2^63 (managed collision: the range of raw ids), so that blocks are counted, not rows.
        per_rank = (blocks // my_size).clamp_(min=1)
        of_id = ids // block.clamp(min=1)
        known = (ids >= 0) & (block > 0) & (of_id < blocks)
        by_remainder, other = unsigned_divmod(ids, blocks)
        rank = torch.where(known, of_id, other) // per_rank
        row = torch.where(known, ids - rank * per_rank * block, by_remainder)
    return rank.clamp_(0, my_size - 1), row


def _assign_by_boundaries(
    ids: Tensor,
    feature: Tensor,
    block: Tensor,
    blocks: Tensor,
    my_size: int,
    boundaries: Sequence[Tensor],
    features: int,
) -> tuple[Tensor, Tensor]:
    """`_assign` for features whose ranks hold unequal numbers of rows."""
    sizes = [boundary.numel() for boundary in boundaries]
    if len(sizes) != features:
        raise ValueError(f"block_bucketize_pos must have one tensor per feature, {features}, got {len(sizes)}")
    if 0 in sizes:
        raise ValueError(f"block_bucketize_pos must have boundaries for each feature, got {sizes} of them")
    values = torch.cat([boundary.reshape(-1).to(torch.int64) for boundary in boundaries])
    begin, end = _features_parts(sizes, feature)
    by_blocks, other = unsigned_divmod(ids, blocks)
    # A block size of 0 spreads the ids over the whole range by remainder.
    sought = torch.where(block == 0, other * gather(values, end - 1) // blocks, ids)
    # Negative stands for larger than any boundary.
    behind = torch.where(sought < 0, end - begin, search_in_groups(values, begin, end, sought, max(sizes)))
    lower = behind - 1
    by_ranks, remainder = unsigned_divmod(sought, torch.full_like(blocks, my_size))
    bounded = lower < my_size
    rank = torch.where(bounded, lower, remainder)
    if_bounded = ids - gather(values, begin + lower.clamp(min=0))
    row = torch.where(block == 0, by_blocks, torch.where(bounded, if_bounded, by_ranks))
    return rank, row


def _features_parts(sizes: Sequence[int], feature: Tensor) -> tuple[Tensor, Tensor]:
    """Where the boundaries of each id's feature begin and end."""
    if len(set(sizes)) == 1:
        begin = feature * sizes[0]
        return begin, begin + sizes[0]
    offsets = numbers_on(feature.device, [0, *accumulate(sizes)], torch.int64)
    return gather(offsets, feature), gather(offsets, feature + 1)


def bucketize_sparse_features(
    lengths: Tensor, indices: Tensor, bucketize_pos: bool, my_size: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Ids spread over ranks by remainder: rank id % my_size, row id // my_size.

    Args:
        lengths: [S] int32 or int64.
        indices: [N] int32 or int64, read as unsigned.
        bucketize_pos: also return the position of each id in its bag.
        my_size: number of ranks.
        weights: [N, ...], moved with the ids.

    Returns:
        lengths [my_size * S], ids [N], weights or None, positions [N] or None.
    """
    # Blocks of no rows hold no id, so that all are spread by remainder.
    no_rows = torch.zeros(1, dtype=torch.int64, device=indices.device)
    return block_bucketize_sparse_features(lengths, indices, bucketize_pos, False, no_rows, my_size, weights)[:4]


def _check(
    lengths: Tensor,
    indices: Tensor,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None,
    batch_sizes: Tensor | None,
    total_num_blocks: Tensor | None,
) -> None:
    check_indices(lengths, "lengths", dim=None)
    check_indices(indices, "indices", dim=None)
    check_indices(block_sizes, "block_sizes")
    if my_size < 1:
        raise ValueError(f"my_size must be positive, got {my_size}")
    features = block_sizes.numel()
    if weights is not None and (weights.dim() < 1 or weights.size(0) != indices.numel()):
        raise ValueError(f"weights must have {indices.numel()} rows like indices, got shape {tuple(weights.shape)}")
    for name, tensor in {"batch_size_per_feature": batch_sizes, "total_num_blocks": total_num_blocks}.items():
        if tensor is not None and tensor.numel() != features:
            raise ValueError(f"{name} must have {features} elements like block_sizes, got {tensor.numel()}")
    if batch_sizes is None and lengths.numel() and (features == 0 or lengths.numel() % features):
        raise ValueError(f"lengths must be whole batches of {features} features, got {lengths.numel()} elements")
    if indices.numel() and not lengths.numel():
        raise ValueError(f"indices must be empty, since lengths are, got {indices.numel()}")


_BEFORE = (
    "Tensor lengths, Tensor indices, bool bucketize_pos, bool sequence, Tensor block_sizes, SymInt my_size, Tensor"
)
_BATCHES = "Tensor? batch_size_per_feature=None, SymInt max_B=-1, Tensor[]? block_bucketize_pos=None, "
_AFTER = "bool keep_orig_idx=False, Tensor? total_num_blocks=None, Tensor? keep_orig_idx_per_feature=None"

KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(
        schema=f"fbgemm::block_bucketize_sparse_features({_BEFORE}? weights=None, {_BATCHES}{_AFTER})"
        " -> (Tensor, Tensor, Tensor?, Tensor?, Tensor?)",
        function=block_bucketize_sparse_features,
    ),
    NpuKernel(
        schema=f"fbgemm::block_bucketize_sparse_features_2d_weights({_BEFORE} weights, SymInt weights_dim=1,"
        f" {_BATCHES}{_AFTER}) -> (Tensor, Tensor, Tensor, Tensor?, Tensor?)",
        function=block_bucketize_sparse_features_2d_weights,
    ),
    NpuKernel(
        schema=f"fbgemm::block_bucketize_sparse_features_inference({_BEFORE}? weights=None, {_BATCHES}"
        f"bool return_bucket_mapping=False, {_AFTER}) -> (Tensor, Tensor, Tensor?, Tensor?, Tensor?, Tensor?)",
        function=block_bucketize_sparse_features_inference,
    ),
    NpuKernel(
        schema="fbgemm::bucketize_sparse_features(Tensor lengths, Tensor indices, bool bucketize_pos, SymInt my_size,"
        " Tensor? weights=None) -> (Tensor, Tensor, Tensor?, Tensor?)",
        function=bucketize_sparse_features,
    ),
)
