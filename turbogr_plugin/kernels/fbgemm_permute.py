"""fbgemm's permutations of sparse features, for `npu`: lengths and the runs of values that belong to them.

A feature's values are one run, whatever its batch size, so that a permutation of T features copies T runs. Permutations
may be int32 or int64 (fbgemm's CPU kernels take int32 only, pytorch/FBGEMM#6029), need not be contiguous (#4593), and
may leave out or repeat features.

Operators that have no size argument, or get None for it, wait for the device to learn the size of their result; so do
fbgemm's CUDA kernels. They then refuse lengths that are negative or add up to more than there are values.

Content that contradicts itself: entries of a permutation outside the features are clamped; a size larger than the sum
of the lengths gives defined values at the end.

Left out: permute_2D_sparse_preallocated_out (only fbgemm's own inference code passes buffers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel
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


def permute_2D_sparse_data(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features in another order.

    Args:
        permute: [P] int32 or int64, the feature that comes at each place.
        lengths: [T, B] int32 or int64.
        values: [N, ...].
        weights: [N, ...], moved with the values.
        permuted_lengths_sum: number of output values; without it the host waits for the device.

    Returns:
        (lengths [P, B], values [M, ...], weights [M, ...] or None).

    Raises:
        ValueError: for arguments whose shapes or dtypes contradict each other, or a negative sum; without the sum also
            for lengths that are negative or longer than the values.
    """
    check_indices(lengths, "lengths", dim=2)
    features, batch = lengths.shape
    _check(permute, values, weights, features)
    chosen = permute.to(torch.int64)
    permuted_lengths = gather(lengths, chosen)
    # per feature, and not per (feature, sample): the search for a position's run is over T entries instead of T * B
    runs = complete_offsets(lengths.sum(1, dtype=torch.int64) if batch else lengths.new_zeros(features))
    return permuted_lengths, *_copy_runs(runs, chosen, lengths, values, weights, permuted_lengths_sum)


def permute_2D_sparse_data_input1D(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    stride: int,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`permute_2D_sparse_data` of flat lengths [T * stride]; the permuted lengths are flat too.

    Raises:
        ValueError: as there, and for lengths that are no whole number of rows of `stride`.
    """
    check_indices(lengths, "lengths")
    check_count(stride, "stride")
    if lengths.numel() and (stride == 0 or lengths.numel() % stride):
        raise ValueError(f"lengths must be a whole number of rows of stride = {stride}, got {lengths.numel()} elements")
    if stride == 0:  # how many features there are is lost with their lengths
        empty = None if weights is None else weights.new_empty(0, *weights.shape[1:])
        return lengths.new_empty(0), values.new_empty(0, *values.shape[1:]), empty
    rows = lengths.view(-1, stride) if lengths.is_contiguous() else lengths.reshape(-1, stride)
    permuted, out_values, out_weights = permute_2D_sparse_data(permute, rows, values, weights, permuted_lengths_sum)
    return permuted.view(-1), out_values, out_weights


def permute_1D_sparse_data(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs of values in another order, for batch sizes that differ by feature.

    Args:
        permute: [P] int32 or int64, the run that comes at each place.
        lengths: [L] int32 or int64, of the runs.
        values: [N, ...].
        weights: [N, ...], moved with the values.
        permuted_lengths_sum: number of output values; without it the host waits for the device.

    Returns:
        (lengths [P], values [M, ...], weights [M, ...] or None).

    Raises:
        ValueError: for arguments whose shapes or dtypes contradict each other, or a negative sum; without the sum also
            for lengths that are negative or longer than the values.
    """
    check_indices(lengths, "lengths", dim=None)
    flat = lengths.reshape(-1)
    _check(permute, values, weights, flat.numel())
    chosen = permute.to(torch.int64)
    runs = complete_offsets(flat)
    return gather(flat, chosen), *_copy_runs(runs, chosen, flat, values, weights, permuted_lengths_sum)


def permute_sparse_features(
    permute: Tensor, lengths: Tensor, indices: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`permute_2D_sparse_data` without a size: the host waits for the device."""
    return permute_2D_sparse_data(permute, lengths, indices, weights)


def permute_sequence_embeddings(permute: Tensor, lengths: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [N, ...] of features in another order: (lengths [P, B], embeddings [M, ...]); the host waits."""
    permuted_lengths, permuted, _ = permute_2D_sparse_data(permute, lengths, embeddings)
    return permuted_lengths, permuted


def expand_into_jagged_permute(
    permute: Tensor, input_offset: Tensor, output_offset: Tensor, output_size: int
) -> Tensor:
    """A permutation of runs as a permutation of their elements.

    Args:
        permute: [P] int32 or int64, the run that comes at each place.
        input_offset: [P + 1], where the runs begin before.
        output_offset: [P + 1], where they begin behind.
        output_size: number of elements, `output_offset[-1]`.

    Returns:
        [output_size], for each place the element that comes there, in the dtype of `input_offset`. Without runs it
        must be, and is, empty (fbgemm refuses that; a rank without features has it).

    Raises:
        ValueError: for offsets that are not one longer than the permutation, or a negative size.
    """
    check_indices(permute, "permute")
    check_offsets_shape(input_offset, "input_offset", segments=permute.numel())
    check_offsets_shape(output_offset, "output_offset", segments=permute.numel())
    check_count(output_size, "output_size")
    if permute.numel() == 0:
        if output_size:
            raise ValueError(f"output_size must be 0 for a permutation of no runs, got {output_size}")
        return input_offset.new_empty(0)
    before, behind = input_offset.to(torch.int64), output_offset.to(torch.int64)
    shift = gather(before[:-1], permute.to(torch.int64)) - behind[:-1]
    places = torch.arange(output_size, device=permute.device)
    return (places + gather(shift, segment_ids(behind, output_size))).to(input_offset.dtype)


def invert_permute(permute: Tensor) -> Tensor:
    """The permutation that undoes `permute` [P] (int32 or int64, P >= 0), in its dtype.

    Raises:
        ValueError: for another dtype.
    """
    check_indices(permute, "permute", dim=None)
    flat = permute.reshape(-1).to(torch.int64)
    places = torch.arange(flat.numel(), dtype=permute.dtype, device=permute.device)
    inverse = torch.zeros_like(places)
    if flat.numel():
        inverse.scatter_(0, flat.clamp(0, flat.numel() - 1), places)
    return inverse.view(permute.shape)


def _check(permute: Tensor, values: Tensor, weights: Tensor | None, runs: int) -> None:
    check_indices(permute, "permute", dim=None)
    if permute.numel() and not runs:
        raise ValueError(f"permute must be empty, since lengths are, got {permute.numel()} elements")
    if values.dim() < 1:
        raise ValueError("values must have at least one dimension, got a scalar")
    if weights is not None and (weights.dim() < 1 or weights.size(0) != values.size(0)):
        raise ValueError(f"weights must have {values.size(0)} rows like values, got shape {tuple(weights.shape)}")


def _copy_runs(
    offsets: Tensor, chosen: Tensor, rows: Tensor, values: Tensor, weights: Tensor | None, total: int | None
) -> tuple[Tensor, Tensor | None]:
    """The runs `chosen` of values and weights, one behind the other.

    Args:
        offsets: [R + 1] int64, of all runs.
        chosen: the runs to copy, int64.
        rows: the lengths as they were given.
        values: [N, ...].
        weights: [N, ...] or None.
        total: number of output values; without it the host waits for the device, and sees whether `rows` make sense.
    """
    chosen = chosen.reshape(-1)
    lengths, starts = gather(offsets.diff(), chosen), gather(offsets[:-1], chosen)
    size = size_or_sync(total, lengths, "permuted_lengths_sum", rows=rows, values=values.size(0))
    source = copied_from(starts, lengths, size)
    return gather(values, source), None if weights is None else gather(weights, source)


_DATA = "Tensor permute, Tensor lengths, Tensor values, "
_SUM = "Tensor? weights=None, SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)"

KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(schema=f"fbgemm::permute_2D_sparse_data({_DATA}{_SUM}", function=permute_2D_sparse_data),
    NpuKernel(schema=f"fbgemm::permute_sparse_data({_DATA}{_SUM}", function=permute_2D_sparse_data),
    NpuKernel(
        schema=f"fbgemm::permute_2D_sparse_data_input1D({_DATA}SymInt stride, {_SUM}",
        function=permute_2D_sparse_data_input1D,
    ),
    NpuKernel(schema=f"fbgemm::permute_1D_sparse_data({_DATA}{_SUM}", function=permute_1D_sparse_data),
    NpuKernel(
        schema="fbgemm::permute_sparse_features(Tensor permute, Tensor lengths, Tensor indices, Tensor? weights=None)"
        " -> (Tensor, Tensor, Tensor?)",
        function=permute_sparse_features,
    ),
    NpuKernel(
        schema="fbgemm::permute_sequence_embeddings(Tensor permute, Tensor lengths, Tensor embeddings)"
        " -> (Tensor, Tensor)",
        function=permute_sequence_embeddings,
    ),
    NpuKernel(
        schema="fbgemm::expand_into_jagged_permute(Tensor permute, Tensor input_offset, Tensor output_offset,"
        " SymInt output_size) -> Tensor",
        function=expand_into_jagged_permute,
    ),
    NpuKernel(schema="fbgemm::invert_permute(Tensor permute) -> Tensor", function=invert_permute),
)
