"""From jagged values to a padded tensor and back, with any number of jagged dimensions.

Both directions are one gather and one masked fill. The forward gather is as large as the padded result; the backward
one only as large as the values. A row longer than the padded tensor has room for is cut, in both directions.

Offsets that decrease, or end behind the values, show only in values, which nobody waits for here: cells then show
some value of the tensor or the padding, and values that no row owns get zeros.

Letters: T values, B rows, L room per row, D columns, k jagged dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels.segments import check_count, check_offsets_shape, gather, segment_ids


def to_padded(values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float) -> Tensor:
    """Padded tensor [B, L_1, ..., L_k] or [B, L_1, ..., L_k, D] of values [T] or [T, D].

    Raises:
        ValueError: for values of more dimensions, no or malformed offsets, other than one length per offsets, negative
            lengths, or a padding that the dtype cannot hold.
    """
    if values.dim() not in (1, 2):
        raise ValueError(f"values must be [T] or [T, D], got shape {tuple(values.shape)}")
    check_layout(offsets, max_lengths)
    shape = (offsets[0].numel() - 1, *max_lengths)
    padding = _padding(padding_value, values.dtype)
    if values.numel() == 0 or 0 in shape:
        return values.new_full((*shape, *values.shape[1:]), padding)
    index, present = values_of_cells(offsets, max_lengths)
    padded = gather(values, index)
    return padded.masked_fill_(~(present if values.dim() == 1 else present.unsqueeze(-1)), padding)


def to_jagged(padded: Tensor, offsets: Sequence[Tensor], total: int) -> Tensor:
    """Values [T] or [T, D] of a padded tensor [B, L_1, ..., L_k] or [B, L_1, ..., L_k, D]; zeros where it has no cell.

    Raises:
        ValueError: for no or malformed offsets, a tensor of other dimensions or rows than they describe, or a negative
            total.
    """
    inner = padded.dim() - 1 - len(offsets)
    if not offsets or inner not in (0, 1):
        raise ValueError(f"{len(offsets)} offsets do not describe a padded tensor of shape {tuple(padded.shape)}")
    room = padded.shape[1 : 1 + len(offsets)]
    check_layout(offsets, room)
    check_rows(padded, offsets, "a padded tensor")
    check_total(total, padded.size(-1) if inner else 1, padded.element_size())
    columns = padded.shape[1 + len(offsets) :]
    if padded.numel() == 0 or total == 0:
        return padded.new_zeros(total, *columns)
    cell, present = cells_of_values(offsets, room, total)
    values = gather(padded.reshape(-1, *columns), cell)
    return values.masked_fill_(~(present.unsqueeze(-1) if inner else present), 0)


def check_layout(offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> None:
    """Raises ValueError unless there is a length >= 0 for each offsets, and each offsets is [rows + 1]."""
    if not offsets:
        raise ValueError("offsets must name at least one jagged dimension, got none")
    if len(max_lengths) != len(offsets):
        raise ValueError(f"max_lengths must have one length per offsets, got {len(max_lengths)} for {len(offsets)}")
    for dimension, (level, longest) in enumerate(zip(offsets, max_lengths, strict=True)):
        check_offsets_shape(level, f"offsets[{dimension}]")
        check_count(longest, f"max_lengths[{dimension}]")


def check_rows(padded: Tensor, offsets: Sequence[Tensor], name: str) -> None:
    """Raises ValueError unless `padded` has one row per row of the first offsets."""
    rows = offsets[0].numel() - 1
    if padded.size(0) != rows:
        raise ValueError(f"{name} must have {rows} rows as offsets[0] has, got shape {tuple(padded.shape)}")


def check_total(total: int, columns: int, element_size: int) -> None:
    """Raises ValueError for a number of values that is negative, or whose bytes int64 cannot count (#5891)."""
    check_count(total, "total_L")
    if total * max(columns, 1) * element_size >= 1 << 63:
        raise ValueError(f"total_L = {total} values of {columns} columns are more than a tensor can hold")


class ToPadded(torch.autograd.Function):
    """`to_padded` with its gradient, for kernels that run above autograd."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        values: Tensor,
        max_lengths: Sequence[int],
        padding_value: float,
        *offsets: Tensor,
    ) -> Tensor:
        """See `to_padded`."""
        ctx.save_for_backward(*offsets)
        ctx.total = values.size(0)  # type: ignore[attr-defined]
        return to_padded(values, offsets, max_lengths, padding_value)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the padded cells, read at the values."""
        offsets: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        total: int = ctx.total  # type: ignore[attr-defined]
        return to_jagged(grad, offsets, total), None, None, *(None for _ in offsets)


def values_of_cells(offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For each cell the value it shows, and whether it shows one: both [B, L_1, ..., L_k]."""
    node = torch.arange(offsets[0].numel() - 1, device=offsets[0].device)
    present: Tensor | None = None
    for level, longest in zip(offsets, max_lengths, strict=True):
        bounds = level.to(torch.int64)
        begin, end = gather(bounds, node), gather(bounds, node + 1)
        place = torch.arange(longest, device=node.device)
        within = place < (end - begin).unsqueeze(-1)
        present = within if present is None else within & present.unsqueeze(-1)
        node = (begin.unsqueeze(-1) + place).masked_fill_(~present, 0)
    assert present is not None
    return node, present


def cells_of_values(offsets: Sequence[Tensor], room: Sequence[int], total: int) -> tuple[Tensor, Tensor]:
    """For each value the flat cell that shows it, and whether one does: both [total]."""
    counts = [*(level.numel() - 1 for level in offsets[1:]), total]
    cell = torch.arange(offsets[0].numel() - 1, device=offsets[0].device)
    present: Tensor | None = None
    for level, longest, count in zip(offsets, room, counts, strict=True):
        bounds = level.to(torch.int64)
        parent = segment_ids(bounds, count)
        node = torch.arange(count, device=cell.device)
        place = node - gather(bounds, parent)
        within = (place >= 0) & (place < longest) & (node < bounds[-1:])
        present = within if present is None else within & gather(present, parent)
        cell = gather(cell, parent) * longest + place.clamp(0, longest - 1)
    assert present is not None
    return cell, present


def _padding(value: float, dtype: torch.dtype) -> float | int:
    """The padding as a number of `dtype`; integers cut its fraction, as a C++ cast does."""
    if dtype.is_floating_point:
        return value
    try:
        return bool(value) if dtype == torch.bool else int(value)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"padding_value must be a number that {dtype} can hold, got {value}") from error
