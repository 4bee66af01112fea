"""fbgemm's prefix sums and what is made of offsets directly, for `npu`.

Results keep the dtype of the input, as fbgemm's do; int32 input therefore wraps where its sum passes 2^31, in the one
result the caller asked for in int32. Kernels that only use sums inside compute them in int64 (segments.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.segments import (
    check_count,
    check_indices,
    check_offsets_shape,
    complete_offsets,
    gather,
    search,
    segment_ids,
    size_or_sync,
)


def asynchronous_complete_cumsum(t_in: Tensor) -> Tensor:
    """[N] to [N + 1] or [K, N] to [K, N + 1]: 0, then the running sums along the last dimension.

    Raises:
        ValueError: for other than one or two dimensions.
    """
    if t_in.dim() not in (1, 2):
        raise ValueError(f"t_in must have one or two dimensions, got shape {tuple(t_in.shape)}")
    return pad(torch.cumsum(t_in, -1, dtype=t_in.dtype), (1, 0))


def asynchronous_batched_complete_cumsum(values: Tensor) -> Tensor:
    """[K, N] to [K, N + 1]: 0, then the running sums of each row.

    Raises:
        ValueError: for other than two dimensions.
    """
    if values.dim() != 2:
        raise ValueError(f"values must have two dimensions, got shape {tuple(values.shape)}")
    return asynchronous_complete_cumsum(values)


def asynchronous_inclusive_cumsum(t_in: Tensor) -> Tensor:
    """Running sums over all elements, each with its own element, in the shape of `t_in`."""
    return torch.cumsum(t_in.reshape(-1), 0, dtype=t_in.dtype).view(t_in.shape)


def asynchronous_exclusive_cumsum(t_in: Tensor) -> Tensor:
    """Running sums over all elements, each without its own element, in the shape of `t_in`."""
    if t_in.numel() == 0:
        return t_in.new_empty(t_in.shape)
    return pad(torch.cumsum(t_in.reshape(-1)[:-1], 0, dtype=t_in.dtype), (1, 0)).view(t_in.shape)


def offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """Positions within their segments: [range_size], in the dtype of `offsets`.

    Args:
        offsets: [S] int32 or int64, where each segment begins; the last one ends at `range_size`.
        range_size: number of positions. Positions before `offsets[0]` count from 0.

    Raises:
        ValueError: for offsets of another shape or dtype, or a negative size.
    """
    check_indices(offsets, "offsets")
    check_count(range_size, "range_size")
    places = torch.arange(range_size, device=offsets.device)
    begins = offsets.to(torch.int64)
    last = search(begins, places)
    began = gather(begins, last - 1).masked_fill_(last == 0, 0)
    return (places - began).to(offsets.dtype)


def lengths_range(t_in: Tensor, shape: list[int] | None = None) -> Tensor:
    """0 ... length - 1 for each of the lengths, one behind the other, in the dtype of `t_in`.

    Without `shape` the host waits for the device: the result's size is the sum of the lengths.

    Args:
        t_in: [S] int32 or int64 lengths.
        shape: sizes whose product is the sum of the lengths.

    Raises:
        ValueError: for lengths of another shape or dtype, or a negative size.
    """
    check_indices(t_in, "t_in")
    size = None if shape is None else int(torch.Size(shape).numel())
    return offsets_range(complete_offsets(t_in)[:-1], size_or_sync(size, t_in, "shape")).to(t_in.dtype)


def repeat_arange(lengths: Tensor) -> Tensor:
    """0 ... length - 1 for each of the lengths [S]; the host waits for the device to learn the size of the result."""
    return lengths_range(lengths)


def segment_sum_csr(batch_size: int, csr_seg: Tensor, values: Tensor) -> Tensor:
    """Sums of runs of values: output[i] = sum(values[csr_seg[i] * batch_size : csr_seg[i + 1] * batch_size]).

    Integers are summed by differences of one running sum, exact and in a fixed order; floating-point values are added
    segment by segment, because differences would cancel.

    Args:
        batch_size: how many values one step of `csr_seg` stands for.
        csr_seg: [S + 1] int32 or int64; multiplied in int64.
        values: any shape, read flat.

    Returns:
        [S], in the dtype of `values`.

    Raises:
        ValueError: for offsets of another shape or dtype, or a negative batch size.
    """
    check_offsets_shape(csr_seg, "csr_seg")
    check_count(batch_size, "batch_size")
    segments, flat = csr_seg.numel() - 1, values.reshape(-1)
    bounds = csr_seg.to(torch.int64) * batch_size
    if not values.is_floating_point():
        sums = complete_offsets(flat)
        return gather(sums, bounds).diff().to(values.dtype)
    places = torch.arange(flat.numel(), device=values.device)
    inside = (places >= bounds[:1]) & (places < bounds[-1:])
    # values of no segment go to a spare row
    row = segment_ids(bounds, flat.numel()).masked_fill_(~inside, segments)
    return values.new_zeros(segments + 1).index_add_(0, row, flat)[:segments]


KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(
        schema="fbgemm::asynchronous_complete_cumsum(Tensor t_in) -> Tensor", function=asynchronous_complete_cumsum
    ),
    NpuKernel(
        schema="fbgemm::asynchronous_batched_complete_cumsum(Tensor values) -> Tensor",
        function=asynchronous_batched_complete_cumsum,
    ),
    NpuKernel(
        schema="fbgemm::asynchronous_inclusive_cumsum(Tensor t_in) -> Tensor", function=asynchronous_inclusive_cumsum
    ),
    NpuKernel(
        schema="fbgemm::asynchronous_exclusive_cumsum(Tensor t_in) -> Tensor", function=asynchronous_exclusive_cumsum
    ),
    NpuKernel(schema="fbgemm::offsets_range(Tensor offsets, SymInt range_size) -> Tensor", function=offsets_range),
    NpuKernel(schema="fbgemm::lengths_range(Tensor t_in, SymInt[]? shape=None) -> Tensor", function=lengths_range),
    NpuKernel(schema="fbgemm::repeat_arange(Tensor lengths) -> Tensor", function=repeat_arange),
    NpuKernel(
        schema="fbgemm::segment_sum_csr(SymInt batch_size, Tensor csr_seg, Tensor values) -> Tensor",
        function=segment_sum_csr,
    ),
)
