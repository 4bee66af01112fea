"""Initial values of sharded tables that do not depend on how they are sharded.

TorchRec initialises each shard on its rank, so that another plan or number of ranks starts from other weights. Here
each element is a function of (seed, table, row, column): any shard of any plan holds the same values.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from turbogr_plugin.kernels.keyed_random import Purpose, keyed_words
from turbogr_plugin.sharding.local_shards import is_sharded, local_shards, whole_shape

_CHUNK_ROWS = 1 << 14


def keyed_normal_rows(table: str, rows: Tensor, dim: int, *, seed: int, std: float) -> Tensor:
    """Normal values of some rows of a table.

    Args:
        table: name; its CRC-32 keys the generator together with the seed.
        rows: [n] int64 row numbers.
        dim: columns of the whole table.
        seed: in [0, 2^32).
        std: standard deviation.

    Returns:
        [n, dim] float32, by the Box-Muller transform of two 32-bit words each.
    """
    blocks = torch.arange(-(-dim // 4), device=rows.device)
    words = keyed_words(
        Purpose.TABLE_INIT,
        seed=seed,
        step=zlib.crc32(table.encode()),
        samples=rows[:, None],
        lanes=0,
        blocks=blocks,
    )
    uniform = (words.to(torch.float64) + 0.5) / 2**32
    radius, angle = (-2 * uniform[0::2].log()).sqrt(), 2 * math.pi * uniform[1::2]
    normal = torch.cat([radius * angle.cos(), radius * angle.sin()]) * std
    return normal.permute(1, 2, 0).flatten(1)[:, :dim].float()


@torch.no_grad()
def init_sharded_tables(model: nn.Module, tables: dict[str, str], *, seed: int, std: float) -> None:
    """Fills the local shards of tables with keyed normal values.

    Args:
        model: a DistributedModelParallel, or a module around one.
        tables: state-dict name of each table's weight to the table's name.
        seed: of the run.
        std: standard deviation.
    """
    state = model.state_dict()
    for name, table in tables.items():
        weight = state[name]
        assert is_sharded(weight)
        dim = whole_shape(weight)[1]
        for first_row, first_column, shard in local_shards(weight):
            rows, columns = shard.shape
            for start in range(0, rows, _CHUNK_ROWS):
                end = min(start + _CHUNK_ROWS, rows)
                # On the host: float64, which NPUs lack, and logarithms that are the same for every device.
                rows_here = torch.arange(first_row + start, first_row + end)
                values = keyed_normal_rows(table, rows_here, dim, seed=seed, std=std)
                shard[start:end].copy_(values[:, first_column : first_column + columns])
