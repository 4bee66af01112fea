"""Shapes of the tiles in which rows of tables are copied, summed and updated: how many rows at a time, how wide.

On Ascend every shape is scheduled by `make ascend` for every SoC within the on-chip memory. Which is the fastest has
not been measured, on no device.
"""

from __future__ import annotations

from typing import NamedTuple

from turbogr_plugin.kernels.triton.targets import Target

WIDEST = 4096
"""Columns of the widest table: twice as many overflow an Ascend core's unified buffer when bags are added up."""
WIDEST_ROUNDED = 512
"""The same where rows are rounded stochastically, which takes many integers for each element."""
_NARROWEST = 16  # columns in 64 bytes of float32, and four blocks of random words

# Rows whose copies are under way at a time. Ascend: those of a lookup do not wait for each other, whereas most bags
# and most rows that are updated have one id, beside which every further copy is for nothing. CUDA: a load that is
# masked away costs an instruction, and four of the others hide each other's latency.
_LOOKUP_ROWS = 4
_SUM_ROWS_ASCEND, _SUM_ROWS_CUDA = 1, 4
_ELEMENTS = 1024  # of the rows under way: more do not fit the registers of a warp

# Programs on CUDA: as many as a multiprocessor holds of one warp each, which hides the latency of reading an id first.
_WARPS_PER_CORE = 32


class RowTile(NamedTuple):
    """Rows that are under way at a time, and a power of two of columns that no row exceeds."""

    rows: int
    width: int


def padded_width(width: int) -> int:
    """Columns of the tile for rows of `width` columns."""
    return max(_NARROWEST, 1 << (width - 1).bit_length())


def lookup_tile(width: int) -> RowTile:
    """The tile of a lookup without pooling."""
    padded = padded_width(width)
    return RowTile(max(1, min(_LOOKUP_ROWS, _ELEMENTS // padded)), padded)


def sum_tile(target: Target, width: int) -> RowTile:
    """The tile of sums: of bags, and of gradients."""
    padded = padded_width(width)
    rows = _SUM_ROWS_ASCEND if target.ascend else _SUM_ROWS_CUDA
    return RowTile(max(1, min(rows, _ELEMENTS // padded)), padded)


def ascend_widths() -> tuple[int, ...]:
    """Columns of the tiles that `make ascend` compiles: narrow, as in the paper, a model's, the widest."""
    return (64, 128, 512, WIDEST)


def options(target: Target, width: int) -> dict[str, int]:
    """Options of the compiler, by name: warps on CUDA, one for 256 columns."""
    return {} if target.ascend else {"num_warps": max(1, padded_width(width) // 256)}


def programs(target: Target, width: int) -> int:
    """Programs of a kernel: one per vector core on Ascend, as many as run at a time on CUDA."""
    if target.ascend:
        return target.vector_cores
    return target.cores * _WARPS_PER_CORE // options(target, width)["num_warps"]
