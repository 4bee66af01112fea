"""Tile shapes of the kernels: a table per SoC and dtype, because nothing is tuned at run time.

On Ascend a shape is in the table if bishengir schedules it, with every mask and bias, without running out of on-chip
memory, also not on a retry with less overlap; `make ascend` holds every entry to that. Of the shapes that fit, squares
of 64 are taken (128 x 64 overflows the unified buffer once both biases are there), and squares of 32 where more tiles
are alive: dim 256, and the gradients of tables. Which shape is the fastest has not been measured, on no device.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from turbogr_plugin.kernels.triton.targets import ASCEND_SOCS, Target

Pass = Literal[
    "forward",
    "query_gradient",
    "key_value_gradient",
    "table_gradient",
    "fuxi_forward",
    "fuxi_key_value_gradient",
    "fuxi_table_gradient",
]


class Tile(NamedTuple):
    """Queries and keys of a tile. A table gradient's tile is square."""

    queries: int
    keys: int


DIMS = (64, 128, 256)
"""Dims that the tables tell apart; others take the next larger one."""

_SMALL, _LARGE = Tile(32, 32), Tile(64, 64)
_WIDE = Tile(64, 32)

# Tiles for dims up to 64, 128 and 256: the larger of the padded query/key and value dims counts.
_FLOAT32: dict[Pass, tuple[Tile, Tile, Tile]] = {
    "forward": (_LARGE, _LARGE, _SMALL),
    "query_gradient": (_LARGE, _LARGE, _SMALL),
    "key_value_gradient": (_LARGE, _LARGE, _SMALL),
    "table_gradient": (_SMALL, _SMALL, _SMALL),
    "fuxi_forward": (_LARGE, _LARGE, _SMALL),
    "fuxi_key_value_gradient": (_LARGE, _LARGE, _SMALL),
    "fuxi_table_gradient": (_SMALL, _SMALL, _SMALL),
}
_FLOAT16 = _FLOAT32
_192_KIB = {torch.float32: _FLOAT32, torch.float16: _FLOAT16, torch.bfloat16: _FLOAT16}
# All that are known have 192 KiB of unified buffer per vector core, or more; what those with more could take is not
# known without one.
_ASCEND = {"Ascend910B": _192_KIB, "Ascend910_93": _192_KIB, "Ascend950": _192_KIB}
assert set(_ASCEND) == set(ASCEND_SOCS)

# CUDA: 64 x 64 scores in float32 are 32 registers of each of 128 threads.
_CUDA = {16: _LARGE, 32: _WIDE}


def cuda_options(dim: int) -> dict[str, int]:
    """Warps and pipeline stages of an attention kernel on CUDA.

    With every mask and bias, dim 128 and bfloat16 on sm_90, four warps spill 1.0 to 1.7 kB of registers per thread,
    eight warps 36 to 56 bytes (ptxas of Triton 3.7.1).
    """
    return {"num_warps": 8 if dim >= 128 else 4, "num_stages": 2}


def ascend_tiles(kernel: Pass, dtype: torch.dtype, soc: str) -> list[tuple[Tile, int]]:
    """All entries of a kernel's table on an Ascend SoC ("Ascend910B3"), each with its dim."""
    tables = next(tables for known, tables in _ASCEND.items() if soc.startswith(known))
    return list(zip(tables[dtype][kernel], DIMS, strict=True))


def attention_tile(kernel: Pass, target: Target, dtype: torch.dtype, dim: int) -> Tile:
    """The tile of an attention kernel.

    Args:
        kernel: which pass.
        target: what it is compiled for.
        dtype: of q, k and v.
        dim: the larger of the padded query/key and value dims, at most 256.
    """
    if target.ascend:
        return next(tile for tile, limit in ascend_tiles(kernel, dtype, target.soc) if dim <= limit)
    tile = _CUDA[torch.finfo(dtype).bits] if dim <= 128 else _SMALL
    return Tile(tile.keys, tile.keys) if kernel.endswith("table_gradient") else tile


# Elements of a tile of gated_norm: eight float32 tiles of them, double-buffered, fill an Ascend core's unified buffer.
_NORM_ELEMENTS_ASCEND = 2048
_NORM_ELEMENTS_CUDA = 4096
_WIDEST_NORM = {"npu": _NORM_ELEMENTS_ASCEND, "cuda": 16384}


def widest_norm(device_type: str) -> int:
    """Elements of the widest padded group that one tile of gated_norm can hold."""
    return _WIDEST_NORM[device_type]


def norm_rows(target: Target, width: int) -> int:
    """Tokens of a tile of gated_norm whose padded group is `width` wide."""
    elements = _NORM_ELEMENTS_ASCEND if target.ascend else _NORM_ELEMENTS_CUDA
    return max(1, elements // width)


def ascend_norm_tiles() -> list[tuple[int, int]]:
    """(tokens, width) of tiles on Ascend: a narrow head, a model of 512, the widest."""
    return [(_NORM_ELEMENTS_ASCEND // width, width) for width in (32, 64, 512, _NORM_ELEMENTS_ASCEND)]
