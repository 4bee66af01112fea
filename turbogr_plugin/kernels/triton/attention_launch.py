"""One attention call made ready for its kernels: what HSTU and FuXi hand to every kernel alike.

Letters: T tokens, B rows, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import AttentionCall
from turbogr_plugin.kernels.triton import attention_layout as layout
from turbogr_plugin.kernels.triton.targets import Target, current_target, dot_precision
from turbogr_plugin.kernels.triton.tiles import Pass, Tile, attention_tile, cuda_options

# A table gradient has one slot of sums per program. On CUDA two programs share a multiprocessor.
_TABLE_PROGRAMS_PER_CORE = 2

# What kernels take for a full tail of 0: no id reaches last + 2^30, so that not even targets are in the tail.
_NO_TAIL = -(1 << 30)


class Launch:
    """A call with at least one token, its layout on the device, and the target it is compiled for."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.target: Target = current_target(call.q.device)
        self.tokens, self.heads, self.dim = call.q.shape
        self.value_dim = call.v.shape[2]
        self.q, self.k, self.v = (last_dim_dense(x) for x in (call.q, call.k, call.v))
        self.rows = layout.row_table(call)
        self.unused = call.q.new_zeros(1, dtype=torch.float32)
        self.times = self.unused if call.timestamps is None else layout.split_times(call)
        self._position_tiles: dict[Tile, Tensor] = {}

    @property
    def largest_dim(self) -> int:
        """The larger of the padded query/key and value dims."""
        return max(layout.padded_dim(self.dim), layout.padded_dim(self.value_dim))

    def tile(self, kernel: Pass) -> Tile:
        """The tile shape of a kernel."""
        return attention_tile(kernel, self.target, self.q.dtype, self.largest_dim)

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler, by name."""
        return cuda_options(self.largest_dim) if not self.target.ascend else {}

    def grid(self, pieces: int) -> tuple[int]:
        """Programs for so many pieces of work: one each on CUDA, one per core on Ascend, where starting one is dear."""
        return (min(pieces, self.target.cores) if self.target.ascend else pieces,)

    def table_grid(self, pieces: int) -> tuple[int]:
        """Programs of a table gradient: a fixed number, for each has a slot of its own."""
        per_core = 1 if self.target.ascend else _TABLE_PROGRAMS_PER_CORE
        return (min(pieces, self.target.cores * per_core),)

    def arguments(self, tile: Tile, work: layout.Work) -> dict[str, Any]:
        """What every attention kernel takes, by name."""
        call = self.call
        q, k, v = self.q, self.k, self.v
        borders, position = call.time_borders, self._positions(tile)
        buckets = 0 if call.time_bias is None else call.time_bias.shape[-1]
        return {
            "Q": q,
            "K": k,
            "V": v,
            "Rows": self.rows,
            "Items": work.items,
            "ItemCount": work.size,
            "Times": self.times,
            "Borders": self.unused if borders is None or buckets < 2 else borders.contiguous(),
            "TimeTable": self.unused if call.time_bias is None else call.time_bias.contiguous(),
            "PositionTable": self.unused if position is None else position,
            "alpha": call.alpha,
            "window": call.window or 0,
            "full_tail": call.full_tail or _NO_TAIL,
            "tokens": self.tokens,
            "heads": self.heads,
            "q_token": q.stride(0),
            "q_head": q.stride(1),
            "k_token": k.stride(0),
            "k_head": k.stride(1),
            "v_token": v.stride(0),
            "v_head": v.stride(1),
            "time_head": per_head_stride(call.time_bias),
            "position_head": per_head_stride(position),
            "D": self.dim,
            "E": self.value_dim,
            "BD": layout.padded_dim(self.dim),
            "BE": layout.padded_dim(self.value_dim),
            "BUCKETS": buckets,
            "BUCKET_LANES": layout.padded_dim(buckets),
            "POSITIONS": 0 if call.position_bias is None else call.position_bias.shape[-1],
            "CAUSAL": call.causal,
            "TARGETS": call.num_targets is not None,
            "CONTEXT": call.num_contextual is not None,
            "WINDOW": call.window is not None,
            "TILED": self.target.tiled_positions,
            "PRECISION": dot_precision(q.dtype, self.target),
        }

    def _positions(self, tile: Tile) -> Tensor | None:
        table = self.call.position_bias
        if table is None or not self.target.tiled_positions:
            return None if table is None else table.contiguous()
        if tile not in self._position_tiles:
            tiles = layout.position_tiles(table, *tile)
            self._position_tiles[tile] = tiles[0] if table.dim() == 1 else tiles
        return self._position_tiles[tile]


def last_dim_dense(x: Tensor) -> Tensor:
    """x, copied where its last dim does not lie in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def per_head_stride(table: Tensor | None) -> int:
    """Entries from one head's table to the next one's; 0 where the heads share it."""
    return 0 if table is None else table.stride(0) if is_per_head(table) else 0


def is_per_head(table: Tensor) -> bool:
    """Whether a table [N] or [H, N], or its tiles [count, rows, columns] or [H, ...], is one per head."""
    return table.dim() in (2, 4)


def summed_like(table: Tensor, sums: Tensor) -> Tensor:
    """Sums [programs, groups, N] over the programs, and over the heads where they share the table; in its dtype."""
    by_group = sums.sum(0)
    return (by_group if table.dim() == 2 else by_group.sum(0)).to(table.dtype)
