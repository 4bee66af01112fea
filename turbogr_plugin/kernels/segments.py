"""Index arithmetic over segments, on the device: which segment a position is in, where its source lies.

Every kernel of the `fbgemm_*.py` modules turns its question into one gather: for each output position the position it
is copied from, computed with the functions here. None of them waits for the device, and none needs float64. Indices
are int64 even where lengths are int32, so that sums past 2^31 do not wrap (pytorch/FBGEMM#5994, #6081).

Offsets and sizes that contradict each other show only in values, and reading values would wait for the device. So
indices are clamped before they are used: contradicting input gives defined, meaningless values, never a read or
write outside a tensor.

Left out: `repeat_interleave` with an output size, the usual way from lengths to rows. What it does with a size that
is not the sum of the lengths is not specified.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def complete_offsets(lengths: Tensor) -> Tensor:
    """Offsets [S + 1] int64, starting with 0, of segments of `lengths` (any shape with S elements, int32 or int64)."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths.reshape(-1), 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def segment_ids(offsets: Tensor, total: int) -> Tensor:
    """The segment of each of the positions 0 ... total - 1: [total] int64. See `segments_of`."""
    return segments_of(offsets, torch.arange(total, device=offsets.device))


def segments_of(offsets: Tensor, positions: Tensor) -> Tensor:
    """The segment of each position: int64, of the shape of `positions`.

    Args:
        offsets: [S + 1] int64, not decreasing. Positions before the first or behind the last segment get the nearest;
            with S = 0 all get 0.
        positions: int64.
    """
    segments = offsets.numel() - 1
    if segments <= 0:
        return torch.zeros_like(positions)
    return search(offsets[1:], positions).clamp_(max=segments - 1)


def search(sorted_values: Tensor, queries: Tensor) -> Tensor:
    """How many of `sorted_values` [S] int64 are at most each query: int64, of the shape of `queries` (int64)."""
    return torch.searchsorted(sorted_values.contiguous(), queries, right=True)


def search_in_groups(values: Tensor, begins: Tensor, ends: Tensor, queries: Tensor, longest: int) -> Tensor:
    """For each query, how many values of its own sorted group are at most as large: [N] int64.

    A binary search of all queries at once, `longest.bit_length()` gathers deep.

    Args:
        values: [K] int64, K >= 1, the groups one behind the other, each sorted.
        begins: [N] int64, where the query's group begins in `values`.
        ends: [N] int64, where it ends.
        queries: [N] int64.
        longest: the size of the longest group.
    """
    low, high = begins, ends
    for _ in range(longest.bit_length()):
        middle = (low + high) // 2
        below = gather(values, middle) <= queries
        searching = low < high
        low = torch.where(searching & below, middle + 1, low)
        high = torch.where(searching & ~below, middle, high)
    return low - begins


def gather(values: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of `values` [T, ...]: shape of `index` + [...]. Indices are clamped; without rows, zeros."""
    if values.size(0) == 0:
        return values.new_zeros(*index.shape, *values.shape[1:])
    rows = values.index_select(0, index.reshape(-1).clamp(0, values.size(0) - 1))
    return rows.view(*index.shape, *values.shape[1:])


def copied_from(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """For each output position the input position it is copied from, segment after segment: [total] int64.

    Args:
        starts: [S], where each segment begins in the input.
        lengths: [S], how long it is. Positions behind their sum go on from the last segment.
        total: the sum of `lengths`, as the caller knows it.
    """
    if starts.numel() == 0:
        return torch.zeros(total, dtype=torch.int64, device=starts.device)
    offsets = complete_offsets(lengths)
    shift = starts.to(torch.int64) - offsets[:-1]
    return torch.arange(total, device=starts.device) + gather(shift, segment_ids(offsets, total))


def as_unsigned(indices: Tensor) -> Tensor:
    """Raw ids read as unsigned numbers, as fbgemm reads them: int64.

    int32 ids become 0 ... 2^32 - 1. int64 ids stay as they are: a negative one stands for itself plus 2^64, and
    `unsigned_divmod` knows that.
    """
    if indices.dtype == torch.int32:
        return indices.to(torch.int64) & 0xFFFFFFFF
    return indices


def as_signed(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Unsigned numbers (see `as_unsigned`) back in the bits of `dtype`. Casts of chips may saturate: wrapped first."""
    if dtype == torch.int32:
        return (((indices + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)
    return indices


def unsigned_divmod(numbers: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of 64-bit unsigned numbers, in int64 arithmetic.

    Args:
        numbers: [N] int64, a negative one stands for itself plus 2^64.
        divisor: [N] or [], int64, 1 ... 2^62.

    Returns:
        (quotient, remainder), int64; a quotient past 2^63 keeps its bits.
    """
    half = (numbers >> 1) & ((1 << 63) - 1)  # a logical shift: floor(number / 2)
    quotient = (half // divisor) * 2
    remainder = numbers - quotient * divisor  # 0 ... 2 * divisor, the products wrap alike
    over = remainder >= divisor
    return quotient + over.to(torch.int64), torch.where(over, remainder - divisor, remainder)


def numbers_on(device: torch.device, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers of the host as a tensor [N] on a device, copied from pinned memory without waiting."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def check_indices(tensor: Tensor, name: str, *, dim: int | None = 1) -> None:
    """Raises ValueError unless `tensor` is int32 or int64 and has `dim` dimensions (None: any)."""
    if tensor.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if dim is not None and tensor.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimension(s), got shape {tuple(tensor.shape)}")


def check_offsets_shape(offsets: Tensor, name: str, *, segments: int | None = None) -> None:
    """Raises ValueError unless `offsets` is [S + 1], S >= 0, int32 or int64; with `segments`, S must be that."""
    check_indices(offsets, name)
    if offsets.numel() < 1:
        raise ValueError(f"{name} must have at least one element, got none")
    if segments is not None and offsets.numel() != segments + 1:
        raise ValueError(f"{name} must have {segments} + 1 elements, got {offsets.numel()}")


def check_count(count: int, name: str) -> None:
    """Raises ValueError for a negative number of elements."""
    if count < 0:
        raise ValueError(f"{name} must not be negative, got {count}")


def size_or_sync(
    given: int | None, lengths: Tensor, name: str, *, rows: Tensor | None = None, values: int | None = None
) -> int:
    """The number of output values: `given`, or the sum of `lengths`, for which the host waits for the device.

    The same wait shows the lengths of the input, which are checked then.

    Args:
        given: the size as the caller knows it; then nothing is read.
        lengths: of the output, int32 or int64.
        name: of the size, in messages.
        rows: lengths of the input, where they are others.
        values: how many values the input has.

    Raises:
        ValueError: if the size or a length is negative, or the input has fewer values than its lengths say.
    """
    if given is not None:
        check_count(given, name)
        return given
    rows = lengths if rows is None else rows
    total = rows.sum(dtype=torch.int64)
    least = rows.min().to(torch.int64) if rows.numel() else total
    size, summed, smallest = torch.stack([lengths.sum(dtype=torch.int64), total, least]).tolist()
    if smallest < 0:
        raise ValueError(f"lengths must not be negative, got {smallest}")
    if values is not None and summed > values:
        raise ValueError(f"lengths add up to {summed}, but there are {values} values")
    return int(size)
