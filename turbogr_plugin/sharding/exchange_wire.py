"""Gradients of rows as one message: a header, then the rows in the dtype of the wire.

    bytes 0-3       int32: the number of the backward pass in which the sender's lookup has got its gradient, from 1 on;
                    0 if these are the zeros of one that has got none
    then            int32 per table: the power of two by which the rows of that table were multiplied (0 in fp32, bf16)
    from HEADER on  rows of each width, in the order of ids

fp16 holds magnitudes from 6e-8 to 65,504, and the gradient of a mean over a global batch lies below that often enough:
each sender scales each table so that its largest element comes to lie in [2^14, 2^15]. A power of two costs no digit.
bf16 has the range of fp32. Sums are made in fp32 after the scale is taken back.

Left out: int8 and fp8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.sharding.touched_rows import TableLayout

WIRES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = 15  # 2^15 = 32,768 leaves a factor of two up to fp16's largest number
_ALIGNMENT = 16


def id_dtype(rows: int) -> torch.dtype:
    """In which ids of a table module with so many rows travel."""
    return torch.int32 if rows <= 2**31 else torch.int64


def header_bytes(layout: TableLayout) -> int:
    """Of a message for tables of this layout: a multiple of 16, so that the rows are aligned."""
    return -(-4 * (1 + len(layout.order)) // _ALIGNMENT) * _ALIGNMENT


def message_bytes(layout: TableLayout, counts: Sequence[int], wire: torch.dtype) -> int:
    """Of the rows of a lookup, `counts` of each table in the layout's order."""
    elements = sum(count * layout.dims[table] for count, table in zip(counts, layout.order, strict=True))
    return header_bytes(layout) + elements * wire.itemsize


def encode(
    layout: TableLayout, counts: Sequence[int], rows: Sequence[Tensor], wire: torch.dtype, *, backward_pass: int = 1
) -> Tensor:
    """Writes a message.

    Args:
        layout: of the tables.
        counts: [T] rows of each table, in the layout's order.
        rows: for each width [rows of that width, D] float32.
        wire: float32, bfloat16 or float16.
        backward_pass: in which the gradient came; 0: the rows are zeros, since the lookup got none.

    Returns:
        [message_bytes] uint8 on the device of the rows.
    """
    device = rows[0].device
    message = torch.empty(message_bytes(layout, counts, wire), dtype=torch.uint8, device=device)
    begin = header_bytes(layout)
    header = message[:begin].view(torch.int32)
    header.zero_()
    header[0] = backward_pass
    exponents = header[1 : 1 + len(layout.order)]
    if wire == torch.float16 and backward_pass:
        exponents.copy_(_exponents(layout, counts, rows))
    for width, block in zip(layout.widths, rows, strict=True):
        end = begin + block.numel() * wire.itemsize
        scaled = block
        if wire == torch.float16 and backward_pass:
            powers = exponents[torch.tensor(width.tables, device=device)].float()
            scaled = block * _by_row(torch.exp2(powers), [counts[place] for place in width.tables])
        message[begin:end].view(wire).view_as(block).copy_(scaled)
        begin = end
    return message


def decode(layout: TableLayout, counts: Sequence[int], message: Tensor, wire: torch.dtype) -> list[Tensor]:
    """Reads the rows of a message, as `encode` was given them: for each width [rows of that width, D] float32."""
    begin = header_bytes(layout)
    exponents = message[:begin].view(torch.int32)[1 : 1 + len(layout.order)]
    found = []
    for width, count in zip(layout.widths, layout.rows_of_width(list(counts)), strict=True):
        end = begin + count * width.dim * wire.itemsize
        rows = message[begin:end].view(wire).view(count, width.dim).float()
        if wire == torch.float16:
            powers = exponents[torch.tensor(width.tables, device=message.device)].float()
            rows = rows * _by_row(torch.exp2(-powers), [counts[place] for place in width.tables])
        found.append(rows)
        begin = end
    return found


def backward_pass(message: Tensor) -> int:
    """In which the sender's lookup has got its gradient; 0: in none. A device is waited for."""
    return int(message[:4].view(torch.int32)[0])


def _exponents(layout: TableLayout, counts: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
    """[T] int32; 0 for tables without a row, all zero or with an element that is not finite."""
    largest: list[Tensor] = []
    places: list[int] = []
    for width, block in zip(layout.widths, rows, strict=True):
        parts = block.split([counts[place] for place in width.tables])
        largest += [part.abs().amax() if part.numel() else block.new_zeros(()) for part in parts]
        places += width.tables
    found = torch.stack(largest)
    assert places == list(range(len(layout.order)))  # widths lie one after the other in the order of tables
    exponents = _LARGEST - torch.frexp(found).exponent
    # 2^126 is the largest power of two whose reciprocal is a normal fp32.
    return torch.where(found.isfinite() & (found > 0), exponents, 0).clamp(-126, 126).to(torch.int32)


def _by_row(values: Tensor, counts: Sequence[int]) -> Tensor:
    """[tables] to [rows, 1]."""
    repeats = torch.tensor(counts, device=values.device)
    return values.repeat_interleave(repeats, output_size=sum(counts))[:, None]
