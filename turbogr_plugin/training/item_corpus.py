"""The item table as evaluation sees it: the rows that this rank holds, scored chunk by chunk.

A table sharded by rows (row_wise, table_row_wise) or as a whole (table_wise, data_parallel) already holds complete item
vectors somewhere. They are scored where they lie; only queries and counts travel. Tables cut by columns hold no
complete vector anywhere and are refused.

Shapes: Q queries, C items of a chunk, I items of the corpus, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from turbogr_plugin.backend.rank_exchange import RankExchange, caught
from turbogr_plugin.errors import InputError
from turbogr_plugin.models.retrieval import l2_normalize
from turbogr_plugin.sharding.local_shards import is_cut_by_columns, is_sharded, local_shards, whole_shape

#: Items per chunk: 64 MB of fp32 scores at 1,024 queries.
DEFAULT_CHUNK_ITEMS = 16_384


class ItemShard(NamedTuple):
    """Consecutive rows of the item table.

    Attributes:
        first_row: dense item index of row 0.
        rows: [n, D] float, a view of the live weights; n may be 0.
    """

    first_row: int
    rows: Tensor


def local_item_rows(
    entry: object,
    num_items: int,
    *,
    process_group: dist.ProcessGroup | None = None,
    replica: int = 0,
    replicas: int = 1,
) -> list[ItemShard]:
    """The rows of the item table that this rank scores, as views, from an entry of a model's `state_dict()`.

    A collective of the group where the entry is a DTensor.

    Args:
        entry: TorchRec's ShardedTensor or DTensor (row_wise, table_row_wise, table_wise) or a plain Tensor that every
            rank holds whole (data_parallel, or an unsharded model); of the latter each rank takes its even share of the
            rows.
        num_items: number of items I; the table must have exactly as many rows.
        process_group: the group that shares the evaluation; None is the default group.
        replica: which of the replicas of a sharded table this rank holds, and
        replicas: how many there are (groups of ranks); each takes its even share of the rows of a shard.

    Returns:
        Shards in ascending order of rows; an empty list on a rank that holds none.

    Raises:
        InputError: the table has another number of rows, or is sharded by columns. Raised on every rank.
        TypeError: `entry` is of another type.
    """
    if not isinstance(entry, Tensor) or (isinstance(entry, DTensor) and not is_sharded(entry)):
        raise TypeError(
            f"the item table's state is a {type(entry).__name__}; a ShardedTensor or DTensor of TorchRec's or a plain "
            "Tensor is expected"
        )
    size = list(whole_shape(entry))
    if len(size) != 2 or size[0] != num_items:
        raise InputError(
            f"the item table has shape {size}, the corpus has {num_items} items: the model belongs to another store; "
            f"evaluate it on the store it was trained on"
        )
    if is_sharded(entry):
        error = None
        if is_cut_by_columns(entry):
            error = InputError(
                "the item table is sharded by columns (column_wise, table_column_wise or grid_shard), so no rank holds "
                "whole item vectors to score; allowed sharding types for it are row_wise, table_row_wise, table_wise "
                "and data_parallel: constrain the planner to one of them"
            )
        if isinstance(entry, DTensor):
            exchange = RankExchange(torch.device(entry.device_mesh.device_type), process_group)
            exchange.agree(error, doing="looking at the item table")
        elif error is not None:
            raise error
        shards = []
        for first_row, _, rows in local_shards(entry):
            first, last = (rows.size(0) * number // replicas for number in (replica, replica + 1))
            shards.append(ItemShard(first_row + first, rows[first:last]))
        return shards
    exchange = RankExchange(entry.device, process_group)
    first, last = (num_items * r // exchange.world_size for r in (exchange.rank, exchange.rank + 1))
    return [ItemShard(first, entry.detach()[first:last])]


class ItemCorpus:
    """All items of the corpus over all ranks of a group, scored in chunks; building it is a collective.

    The shards are views: a corpus built once follows the weights as they train, except where a table is cached
    (UVM caching), whose rows are up to date only after a new `state_dict()`.

    Args:
        shards: what this rank holds, as `local_item_rows` returns it; may be empty.
        num_items: I. The shards of all ranks cover 0 ... I - 1 exactly once.
        device: where queries, shards and exchanged tensors live.
        normalize: score against L2-normalised rows, as the model does in training.
        chunk_items: C, rows scored at once. Peak memory is about Q * C * 8 bytes (a block of scores and its masks),
            Q being the queries of a step over all ranks.
        process_group: None is the default group.

    Raises:
        InputError: `chunk_items` or `num_items` is below 1.
        ValueError: rows missing or held twice, or different dims. Both are raised on every rank.
    """

    def __init__(
        self,
        shards: Sequence[ItemShard],
        *,
        num_items: int,
        device: torch.device,
        normalize: bool = False,
        chunk_items: int = DEFAULT_CHUNK_ITEMS,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.num_items = num_items
        self.device = device
        self.exchange = RankExchange(device, process_group)
        self._shards = sorted((shard for shard in shards if shard.rows.size(0)), key=lambda shard: shard.first_row)
        self._normalize = normalize
        self._chunk_items = chunk_items
        error = caught(self._check_local)
        dim = self._shards[0].rows.size(1) if self._shards and error is None else -1
        table = self.exchange.agree(error, len(self._shards), dim, doing="opening the item table")
        spans = torch.tensor(
            [[shard.first_row, shard.first_row + shard.rows.size(0)] for shard in self._shards],
            dtype=torch.int64,
            device=device,
        ).view(-1, 2)
        gathered = self.exchange.gather_rows(spans, [count for count, _ in table])
        self._check_coverage(torch.cat(gathered).tolist(), {dim for _, dim in table if dim >= 0})
        #: D, the same on all ranks, those without shards included.
        self.dim: int = max(dim for _, dim in table)

    def chunks(self) -> Iterator[ItemShard]:
        """This rank's rows in pieces of at most `chunk_items`, by ascending item index."""
        for first_row, rows in self._shards:
            for begin in range(0, rows.size(0), self._chunk_items):
                yield ItemShard(first_row + begin, rows[begin : begin + self._chunk_items])

    def score(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Scores [Q, C] in fp32 of `queries` [Q, D] fp32 against the `rows` [C, D] of one chunk.

        The same arguments give the same bits; another chunking or another Q may round differently in the last bit.
        """
        # A caller's autocast would score in bf16, where thousands of items tie.
        with torch.autocast(self.device.type, enabled=False):
            items = rows.float()
            if self._normalize:
                items = l2_normalize(items)
            return queries @ items.T

    def _check_local(self) -> None:
        for name, value in (("chunk_items", self._chunk_items), ("num_items", self.num_items)):
            if value < 1:
                raise InputError(f"{name} is {value}; at least 1 is needed")
        for first_row, rows in self._shards:
            if rows.dim() != 2 or not rows.is_floating_point() or rows.device.type != self.device.type:
                raise ValueError(
                    f"item rows from {first_row} on are {rows.dtype} {list(rows.shape)} on {rows.device}; "
                    f"float [n, D] on {self.device} is expected"
                )

    def _check_coverage(self, spans: list[list[int]], dims: set[int]) -> None:
        expected = 0
        for begin, end in sorted(spans):
            if begin != expected:
                what = "held by no rank" if begin > expected else "held twice"
                raise ValueError(f"item rows {min(begin, expected)} ... {max(begin, expected) - 1} are {what}")
            expected = end
        if expected != self.num_items:
            raise ValueError(f"item rows end at {expected}; the corpus has {self.num_items} items")
        if len(dims) != 1:
            raise ValueError(f"item rows of all ranks have dims {sorted(dims)}; one embedding dim is expected")
