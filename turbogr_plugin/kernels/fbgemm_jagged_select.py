"""fbgemm's selections of whole rows, and slices of rows, of jagged tensors, for `npu`.

`jagged_index_select` is composite in fbgemm, with its own backward: it calls `jagged_index_select_2d_forward_v2` and
`jagged_index_add_2d_forward` below. Its offsets have no leading zero. Without an output size it waits for the device;
`jagged_slice` always does, for its checks and its size, in fbgemm's own code.

Content that contradicts itself: row numbers outside the rows are clamped, and what would be added outside the result
is dropped.

Left out: keyed_jagged_index_select_dim1_forward and _backward, which only fbgemm's CUDA autograd calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel, with_autograd
from turbogr_plugin.kernels.segments import (
    check_count,
    check_indices,
    check_offsets_shape,
    complete_offsets,
    copied_from,
    gather,
    segment_ids,
    size_or_sync,
)


def jagged_index_select_2d_forward(
    values: Tensor, indices: Tensor, input_offsets: Tensor, output_offsets: Tensor, num_dense_output_rows: int
) -> Tensor:
    """Rows `indices` of a jagged tensor, one behind the other.

    Args:
        values: [T, D].
        indices: [R] int32 or int64, the rows to take.
        input_offsets: [B], where each row of `values` ends.
        output_offsets: [R], where each row of the result ends.
        num_dense_output_rows: number of values of the result.

    Returns:
        [num_dense_output_rows, D].

    Raises:
        ValueError: for other shapes or dtypes, or a negative size (offsets that overflowed, pytorch/FBGEMM#5880).
    """
    check_count(num_dense_output_rows, "num_dense_output_rows")
    source = _source(values, indices, input_offsets, output_offsets, num_dense_output_rows)
    return gather(values, source)


def jagged_index_select_2d_forward_v2(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_dense_output_rows: int | None = None,
) -> Tensor:
    """`jagged_index_select_2d_forward`; without a size the host waits for the device.

    No rows to take are legal (fbgemm's composite kernel, which this replaces, fails on them).
    """
    if num_dense_output_rows is None:
        num_dense_output_rows = int(output_offsets[-1]) if output_offsets.numel() else 0
    return jagged_index_select_2d_forward(values, indices, input_offsets, output_offsets, num_dense_output_rows)


def jagged_index_add_2d_forward(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_dense_input_rows: int,
    num_output_rows: int,
) -> Tensor:
    """The transpose of `jagged_index_select_2d_forward`: rows of `values` added to rows `indices` of zeros.

    Args:
        values: [T, D].
        indices: [R] int32 or int64, the row of the result that each row of `values` is added to.
        input_offsets: [R], where each row of `values` ends.
        output_offsets: [B], where each row of the result ends.
        num_dense_input_rows: number of values, T.
        num_output_rows: number of values of the result.

    Returns:
        [num_output_rows, D].

    Raises:
        ValueError: for other shapes or dtypes, or a negative size.
    """
    check_count(num_dense_input_rows, "num_dense_input_rows")
    check_count(num_output_rows, "num_output_rows")
    target = _source(values, indices, output_offsets, input_offsets, values.size(0))
    outside = (target < 0) | (target >= num_output_rows)
    target.masked_fill_(outside, num_output_rows)  # a spare row, cut off below
    sums = values.new_zeros(num_output_rows + 1, values.size(1)).index_add_(0, target, values)
    return sums[:num_output_rows]


def _source(values: Tensor, indices: Tensor, ends: Tensor, selected_ends: Tensor, total: int) -> Tensor:
    """For each of `total` selected values its place among all values; offsets have no leading zero."""
    if values.dim() != 2:
        raise ValueError(f"values must be [T, D], got shape {tuple(values.shape)}")
    check_indices(indices, "indices")
    check_indices(ends, "offsets")
    check_indices(selected_ends, "offsets of the selected rows")
    if selected_ends.numel() != indices.numel():
        raise ValueError(f"offsets of the selected rows must be {indices.numel()}, got {selected_ends.numel()}")
    if indices.numel() == 0:
        return torch.zeros(total, dtype=torch.int64, device=values.device)
    zero = torch.zeros(1, dtype=torch.int64, device=values.device)
    starts = torch.cat([zero, ends.to(torch.int64)])[:-1]
    selected = torch.cat([zero, selected_ends.to(torch.int64)])
    shift = gather(starts, indices.to(torch.int64)) - selected[:-1]
    return torch.arange(total, device=values.device) + gather(shift, segment_ids(selected, total))


def keyed_jagged_index_select_dim1(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    weights: Tensor | None = None,
    selected_lengths_sum: int | None = None,
) -> list[Tensor]:
    """Samples `indices` of every feature of a keyed jagged tensor.

    Args:
        values: [N], of T features with `batch_size` samples each.
        lengths: [T * batch_size] int32 or int64.
        offsets: [T * batch_size + 1], of `lengths`.
        indices: [R] int32 or int64, the samples to take; R = 0 is legal (fbgemm crashes, pytorch/FBGEMM#1554).
        batch_size: samples per feature.
        weights: [N], taken like the values.
        selected_lengths_sum: number of output values; without it the host waits for the device.

    Returns:
        [values [M], lengths [T * R]], and weights [M] where given. Differentiable in values and weights.

    Raises:
        ValueError: for shapes that contradict each other, or a negative size.
    """
    for name, tensor in {"values": values, "lengths": lengths, "indices": indices}.items():
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
    check_indices(lengths, "lengths")
    check_indices(indices, "indices")
    check_offsets_shape(offsets, "offsets", segments=lengths.numel())
    check_count(batch_size, "batch_size")
    if lengths.numel() and (batch_size == 0 or lengths.numel() % batch_size):
        raise ValueError(f"lengths must be whole batches of {batch_size}, got {lengths.numel()} elements")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"weights must be {tuple(values.shape)} like values, got {tuple(weights.shape)}")
    features = lengths.numel() // batch_size if batch_size else 0
    chosen = indices.to(torch.int64).clamp(0, max(batch_size - 1, 0))
    rows = (torch.arange(features, device=lengths.device).unsqueeze(1) * batch_size + chosen).view(-1)
    taken = gather(lengths, rows)
    source = copied_from(
        gather(offsets, rows), taken, size_or_sync(selected_lengths_sum, taken, "selected_lengths_sum")
    )
    outputs = [gather(values, source), taken]
    return outputs if weights is None else [*outputs, gather(weights, source)]


def jagged_slice_forward(
    x_values: Tensor,
    x_lengths: Tensor,
    src_start: Tensor,
    output_lengths: Tensor,
    tgt_start: Tensor,
    num_output_rows: int,
    slice_length: int,
    fill_zeros: bool,
) -> Tensor:
    """Up to `slice_length` values of each row, copied from position `src_start` to `tgt_start` of a row of the result.

    Args:
        x_values: [T].
        x_lengths: [B] int32 or int64.
        src_start: [B], where the copied part begins in each row.
        output_lengths: [B], how long the rows of the result are.
        tgt_start: [B], where it begins there.
        num_output_rows: number of values of the result.
        slice_length: values copied per row, at most.
        fill_zeros: the rest shall be zero. It always is here; fbgemm leaves it uninitialised when this is False.

    Returns:
        [num_output_rows].

    Raises:
        ValueError: for other shapes, or a negative size.
    """
    if x_values.dim() != 1:
        raise ValueError(f"x_values must have one dimension, got shape {tuple(x_values.shape)}")
    for name, tensor in {"src_start": src_start, "output_lengths": output_lengths, "tgt_start": tgt_start}.items():
        if tensor.shape != x_lengths.shape or x_lengths.dim() != 1:
            raise ValueError(f"{name} must be [B] like x_lengths {tuple(x_lengths.shape)}, got {tuple(tensor.shape)}")
    check_count(num_output_rows, "num_output_rows")
    if x_lengths.numel() == 0:
        return x_values.new_zeros(num_output_rows)
    bounds = complete_offsets(output_lengths)
    row = segment_ids(bounds, num_output_rows)
    place = torch.arange(num_output_rows, device=x_values.device) - gather(bounds, row)
    step = place - gather(tgt_start, row)
    taken = gather(src_start, row) + step
    copied = (step >= 0) & (step < slice_length) & (place < gather(output_lengths, row))
    copied &= (taken >= 0) & (taken < gather(x_lengths, row))
    return gather(x_values, gather(complete_offsets(x_lengths), row) + taken).masked_fill_(~copied, 0)


def jagged_slice(x_values: Tensor, x_lengths: Tensor, start: Tensor, slice_length: int) -> tuple[Tensor, Tensor]:
    """Up to `slice_length` values of each row from position `start` on; the host waits for the device.

    Reached in inference mode only, where fbgemm has no kernel for any device.

    Returns:
        (values, lengths [B]).
    """
    lengths = (x_lengths - start).clamp_max(abs(slice_length))
    size = size_or_sync(None, lengths, "the number of values")
    front = torch.zeros_like(x_lengths)
    return jagged_slice_forward(x_values, x_lengths, start, lengths, front, size, slice_length, False), lengths


_2D = "Tensor values, Tensor indices, Tensor input_offsets, Tensor output_offsets, "

KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(
        schema=f"fbgemm::jagged_index_select_2d_forward({_2D}int num_dense_output_rows) -> Tensor",
        function=jagged_index_select_2d_forward,
    ),
    NpuKernel(
        schema=f"fbgemm::jagged_index_select_2d_forward_v2({_2D}int? num_dense_output_rows=None) -> Tensor",
        function=jagged_index_select_2d_forward_v2,
    ),
    NpuKernel(
        schema=f"fbgemm::jagged_index_add_2d_forward({_2D}int num_dense_input_rows, int num_output_rows) -> Tensor",
        function=jagged_index_add_2d_forward,
    ),
    *with_autograd(
        "fbgemm::keyed_jagged_index_select_dim1(Tensor values, Tensor lengths, Tensor offsets, Tensor indices,"
        " SymInt batch_size, Tensor? weights=None, SymInt? selected_lengths_sum=None) -> Tensor[]",
        keyed_jagged_index_select_dim1,
    ),
    NpuKernel(
        schema="fbgemm::jagged_slice_forward(Tensor x_values, Tensor x_lengths, Tensor src_start,"
        " Tensor output_lengths, Tensor tgt_start, int num_output_rows, int slice_length, bool fill_zeros) -> Tensor",
        function=jagged_slice_forward,
    ),
    NpuKernel(
        schema="fbgemm::jagged_slice(Tensor x_values, Tensor x_lengths, Tensor start, int slice_length)"
        " -> (Tensor, Tensor)",
        function=jagged_slice,
    ),
)
