"""Joining, splitting and picking parts of jagged tensors: the plumbing between a model's layers and its loss.

Plain PyTorch on every device, differentiable by torch. Each function is one gather whose indices are computed on the
device: nothing waits for it, and the number of values of a result is taken from the shapes or given by the caller. What
contradicts the values of `offsets` is an error on CPU; elsewhere, where looking would mean to wait, and in a compiled
graph it gives meaningless values, never a read outside a tensor.

Left out: padding and its inverse (fbgemm's jagged_to_padded_dense), which no model of this package needs.

Letters: T tokens, B rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_mask import check_mask, check_mask_values
from turbogr_plugin.kernels.offsets import check_offsets, has_readable_values
from turbogr_plugin.kernels.relative_bias import bucket_numbers, check_borders, time_borders
from turbogr_plugin.kernels.segments import complete_offsets, copied_from, gather, segment_ids

_INTEGERS = (torch.int32, torch.int64)


def concat_2d_jagged(left: Tensor, right: Tensor, left_offsets: Tensor, right_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row the values of `left` and behind them those of `right`.

    Args:
        left: [T1, ...].
        right: [T2, ...], like `left` but for its length.
        left_offsets: [B + 1] int32 or int64.
        right_offsets: [B + 1], of the dtype of `left_offsets`.

    Returns:
        values [T1 + T2, ...] and offsets [B + 1].

    Raises:
        ValueError: tensors that do not fit together, or offsets that do not describe them.
    """
    _check_pair(left_offsets, right_offsets)
    check_offsets(left_offsets, left.size(0), name="left_offsets")
    check_offsets(right_offsets, right.size(0), name="right_offsets")
    if left.shape[1:] != right.shape[1:] or left.dtype != right.dtype:
        raise ValueError(
            f"left and right must be alike but for their length, got {left.dtype} {tuple(left.shape)} and "
            f"{right.dtype} {tuple(right.shape)}"
        )
    from_left, place = _places(left_offsets, right_offsets, left.size(0) + right.size(0))
    source = torch.where(from_left, place, place + left.size(0))
    return _rows_at(torch.cat([left, right]), source), left_offsets + right_offsets


def split_2d_jagged(
    values: Tensor, left_offsets: Tensor, right_offsets: Tensor, *, left_total: int
) -> tuple[Tensor, Tensor]:
    """The inverse of `concat_2d_jagged`: the first values of each row, and the rest of each row.

    Args:
        values: [T1 + T2, ...].
        left_offsets: [B + 1] int32 or int64, layout of the first part.
        right_offsets: [B + 1], layout of the second.
        left_total: T1, which is `left_offsets[-1]`.

    Returns:
        [T1, ...] and [T2, ...].

    Raises:
        ValueError: offsets that do not describe `values`, or a `left_total` that is not between 0 and T1 + T2.
    """
    total = values.size(0)
    if not 0 <= left_total <= total:
        raise ValueError(f"left_total must be between 0 and the number of values {total}, got {left_total}")
    _check_pair(left_offsets, right_offsets)
    check_offsets(left_offsets, left_total, name="left_offsets")
    check_offsets(right_offsets, total - left_total, name="right_offsets")
    starts = left_offsets + right_offsets
    left = copied_from(starts[:-1], left_offsets.diff(), left_total)
    right = copied_from(starts[:-1] + left_offsets.diff(), right_offsets.diff(), total - left_total)
    return _rows_at(values, left), _rows_at(values, right)


def jagged_dense_broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """`values` with each row's own vector added to all its tokens: values[t] + dense[row of t].

    Args:
        values: [T, ...].
        offsets: [B + 1] int32 or int64.
        dense: [B, ...], like `values` but for its length.

    Returns:
        [T, ...].

    Raises:
        ValueError: shapes that do not fit together, or offsets that do not describe `values`.
    """
    check_offsets(offsets, values.size(0))
    rows = offsets.numel() - 1
    if dense.shape != (rows, *values.shape[1:]):
        raise ValueError(f"dense must be [B, ...] = {(rows, *values.shape[1:])}, got {tuple(dense.shape)}")
    return values + _rows_at(dense, segment_ids(offsets.long(), values.size(0)))


def last_tokens(values: Tensor, offsets: Tensor) -> Tensor:
    """The last value of each row; a row without values gets zeros.

    Args:
        values: [T, ...].
        offsets: [B + 1] int32 or int64.

    Returns:
        [B, ...].

    Raises:
        ValueError: offsets that do not describe `values`.
    """
    check_offsets(offsets, values.size(0))
    empty = offsets.diff() == 0
    last = _rows_at(values, offsets[1:].long() - 1)
    return last.masked_fill(empty.view(-1, *[1] * (values.dim() - 1)), 0)


def target_tokens(values: Tensor, offsets: Tensor, num_targets: Tensor, *, total: int) -> tuple[Tensor, Tensor]:
    """The targets of each row, which stand at its end (see attention_mask.py).

    Args:
        values: [T, ...].
        offsets: [B + 1] int32 or int64.
        num_targets: [B] int32 or int64, between 0 and the row's length.
        total: N, the sum of `num_targets`.

    Returns:
        values [N, ...] and offsets [B + 1] int64.

    Raises:
        ValueError: arguments that do not fit together.
    """
    check_offsets(offsets, values.size(0))
    check_mask(offsets, num_targets, None, None, 0)
    check_mask_values(offsets, num_targets, None)
    target_offsets = complete_offsets(num_targets)
    if has_readable_values(target_offsets) and int(target_offsets[-1]) != total:
        raise ValueError(f"total must be the sum of num_targets {int(target_offsets[-1])}, got {total}")
    return _rows_at(values, copied_from(offsets[1:] - num_targets, num_targets, total)), target_offsets


def age_buckets(
    timestamps: Tensor,
    offsets: Tensor,
    num_buckets: int,
    *,
    request_times: Tensor | None = None,
    time_buckets: Tensor | None = None,
) -> Tensor:
    """For each token the bucket of its age: of the time between it and the request (for timestamp embeddings).

    Args:
        timestamps: [T] int32 or int64.
        offsets: [B + 1] int32 or int64.
        num_buckets: N, at least 1.
        request_times: [B] int32 or int64; None: the time of each row's last token.
        time_buckets: [N - 1] float32, ascending borders; None: those that HSTU published (see relative_bias).

    Returns:
        [T] int64, from 0 to N - 1.

    Raises:
        ValueError: arguments that do not fit together.
    """
    if timestamps.dim() != 1 or timestamps.dtype not in _INTEGERS:
        raise ValueError(f"timestamps must be int32 or int64 [T], got {timestamps.dtype} {tuple(timestamps.shape)}")
    total, rows = timestamps.size(0), offsets.numel() - 1
    check_offsets(offsets, total)
    if num_buckets < 1:
        raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
    if request_times is not None and (request_times.shape != (rows,) or request_times.dtype not in _INTEGERS):
        raise ValueError(
            f"request_times must be int32 or int64 [B] with B = {rows}, got {request_times.dtype} "
            f"{tuple(request_times.shape)}"
        )
    borders = time_borders(num_buckets, timestamps.device) if time_buckets is None else time_buckets
    if borders.shape != (num_buckets - 1,) or borders.dtype != torch.float32:
        raise ValueError(
            f"time_buckets must be {num_buckets} - 1 borders in float32, got {borders.dtype} of shape "
            f"{tuple(borders.shape)}"
        )
    check_borders(borders)
    if request_times is None:
        request_times = last_tokens(timestamps, offsets)
    at = gather(request_times.long(), segment_ids(offsets.long(), total))
    return bucket_numbers(at - timestamps.long(), borders)


def _rows_at(values: Tensor, index: Tensor) -> Tensor:
    """Rows of `values`, indices clamped; part of the graph even where there are none.

    A data-parallel parameter before an empty batch waits for its gradient of zeros.
    """
    if values.size(0) == 0:
        return values.new_zeros(index.numel(), *values.shape[1:]) + values.sum() * 0
    return gather(values, index)


def _check_pair(left_offsets: Tensor, right_offsets: Tensor) -> None:
    if left_offsets.shape != right_offsets.shape or left_offsets.dtype != right_offsets.dtype:
        raise ValueError(
            f"left_offsets and right_offsets must be alike, got {left_offsets.dtype} {tuple(left_offsets.shape)} and "
            f"{right_offsets.dtype} {tuple(right_offsets.shape)}"
        )


def _places(left_offsets: Tensor, right_offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of each value of the joined rows: whether it comes from the left part, and its place there or in the right."""
    left, right = left_offsets.long(), right_offsets.long()
    rows = segment_ids(left + right, total)
    place = torch.arange(total, device=left.device) - gather(left + right, rows)
    behind = place - gather(left.diff(), rows)
    return behind < 0, torch.where(behind < 0, place + gather(left, rows), behind + gather(right, rows))
