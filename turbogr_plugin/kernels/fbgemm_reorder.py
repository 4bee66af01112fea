"""fbgemm's reordering of batched ads (HSTU's data code uses it), for `npu`: from request-major to feature-major.

A batch holds requests, each with some ads; lengths come request by request, feature by feature within it. The result
is feature by feature, ad by ad within it. With broadcasting the input has one entry per request, repeated for its ads.

Left out: cat_reorder_batched_ad_indices and reorder_batched_sequence_embeddings (serving).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.segments import check_count, check_offsets_shape, gather, segment_ids, segments_of


def reorder_batched_ad_lengths(
    cat_ad_lengths: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_lengths: bool = False,
    max_batch_size: int = 0,
) -> Tensor:
    """Lengths, feature by feature.

    Args:
        cat_ad_lengths: R * T (broadcast) or A * T lengths, of any dtype.
        batch_offsets: [R + 1] int32 or int64, where each request's ads begin.
        num_ads_in_batch: A, the number of ads.
        broadcast_lengths: one entry per request stands for all its ads.
        max_batch_size: where positive, room for that many ads per feature; the rest is zero.

    Returns:
        [T * A] ([T * max_batch_size]); without either option in the shape of the input.

    Raises:
        ValueError: for sizes that contradict each other.
    """
    features = _features(cat_ad_lengths.numel(), batch_offsets, num_ads_in_batch, broadcast_lengths)
    if max_batch_size > 0 and (broadcast_lengths or max_batch_size < num_ads_in_batch):
        raise ValueError(
            f"max_batch_size must be at least num_ads_in_batch = {num_ads_in_batch}, without broadcasting,"
            f" got {max_batch_size} with broadcast_lengths={broadcast_lengths}"
        )
    room = max_batch_size if max_batch_size > 0 else num_ads_in_batch
    ad = torch.arange(room, device=cat_ad_lengths.device)
    feature = torch.arange(features, device=cat_ad_lengths.device).unsqueeze(1)
    lengths = gather(cat_ad_lengths.reshape(-1), _entry(feature, ad, batch_offsets, features, broadcast_lengths))
    if room > num_ads_in_batch:
        lengths.masked_fill_(ad >= num_ads_in_batch, 0)
    plain = not broadcast_lengths and max_batch_size <= 0
    return lengths.view(cat_ad_lengths.shape if plain else (-1,))


def reorder_batched_ad_indices(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Tensor,
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_indices: bool = False,
    num_indices_after_broadcast: int = -1,
) -> Tensor:
    """Indices in the order of `reorder_batched_ad_lengths`.

    Args:
        cat_ad_offsets: offsets of the lengths as they come, int32 or int64.
        cat_ad_indices: [N] of any dtype.
        reordered_cat_ad_offsets: [T * A + 1], offsets of the reordered lengths.
        batch_offsets: [R + 1] int32 or int64, where each request's ads begin.
        num_ads_in_batch: A, the number of ads.
        broadcast_indices: one entry per request stands for all its ads.
        num_indices_after_broadcast: size of the result where they are broadcast.

    Returns:
        [num_indices_after_broadcast] or [N].

    Raises:
        ValueError: for sizes that contradict each other, or a negative size with broadcasting.
    """
    check_offsets_shape(cat_ad_offsets, "cat_ad_offsets")
    check_offsets_shape(reordered_cat_ad_offsets, "reordered_cat_ad_offsets")
    entries = cat_ad_offsets.numel() - 1
    features = _features(entries, batch_offsets, num_ads_in_batch, broadcast_indices)
    if reordered_cat_ad_offsets.numel() - 1 != features * num_ads_in_batch:
        raise ValueError(
            f"reordered_cat_ad_offsets must have {features} * {num_ads_in_batch} + 1 elements,"
            f" got {reordered_cat_ad_offsets.numel()}"
        )
    if broadcast_indices:
        check_count(num_indices_after_broadcast, "num_indices_after_broadcast")
    total = num_indices_after_broadcast if broadcast_indices else cat_ad_indices.numel()
    if num_ads_in_batch == 0 or features == 0:
        return cat_ad_indices.new_zeros(total)
    bounds = reordered_cat_ad_offsets.to(torch.int64)
    segment = segment_ids(bounds, total)
    entry = _entry(segment // num_ads_in_batch, segment % num_ads_in_batch, batch_offsets, features, broadcast_indices)
    place = torch.arange(total, device=segment.device) - gather(bounds, segment)
    return gather(cat_ad_indices.reshape(-1), gather(cat_ad_offsets.to(torch.int64), entry) + place)


def _features(entries: int, batch_offsets: Tensor, ads: int, broadcast: bool) -> int:
    """The number of features that so many lengths are of."""
    check_offsets_shape(batch_offsets, "batch_offsets")
    check_count(ads, "num_ads_in_batch")
    groups = batch_offsets.numel() - 1 if broadcast else ads
    if entries and (groups == 0 or entries % groups):
        raise ValueError(f"{entries} lengths are no whole number of features of {groups} entries each")
    return entries // groups if groups else 0


def _entry(feature: Tensor, ad: Tensor, batch_offsets: Tensor, features: int, broadcast: bool) -> Tensor:
    """The entry of the input that stands for a feature of an ad."""
    begins = batch_offsets.to(torch.int64)
    request = segments_of(begins, ad)
    if broadcast:
        return features * request + feature
    begin = gather(begins, request)
    return features * begin + feature * (gather(begins, request + 1) - begin) + ad - begin


_LENGTHS = "Tensor cat_ad_lengths, Tensor batch_offsets, SymInt num_ads_in_batch, bool broadcast_lengths=False"
_INDICES = "Tensor cat_ad_offsets, Tensor cat_ad_indices, Tensor reordered_cat_ad_offsets, Tensor batch_offsets"

KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(
        schema=f"fbgemm::reorder_batched_ad_lengths({_LENGTHS}, SymInt max_batch_size=0) -> Tensor",
        function=reorder_batched_ad_lengths,
    ),
    NpuKernel(
        schema=f"fbgemm::reorder_batched_ad_indices({_INDICES}, SymInt num_ads_in_batch, bool broadcast_indices=False,"
        " SymInt num_indices_after_broadcast=-1) -> Tensor",
        function=reorder_batched_ad_indices,
    ),
)
