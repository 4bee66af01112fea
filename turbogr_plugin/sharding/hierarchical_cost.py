"""What one table costs each rank: bytes read, bytes sent inside the group, bytes exchanged between groups, memory.

N ranks form H groups of I. A group holds every table once; a rank's shard is held again by its peers, the ranks at the
same place in the other groups. A step looks up T ids of a table per rank, and per shard (share s of all lookups):

    arriving lookups        n = I T s
    all-to-all, sequences   n (8 + d (f + b)) bytes, to the other ranks of the group
    all-to-all, pooled      8 n + I B d (f + b), B bags per rank
    exchange, exact         U rows of the group, V of all groups (access_histogram.py), r = d w + 4 bytes a row (8 of
                            a shard of more than 2^31 rows):
                            all-gather        (H - 1) U r
                            reduce-scatter    (H - 1)/H (U + V) d w by slices of ids, then all-gather of the union,
                                              and ids to all: (H - 1) U (r - d w)
                            dense             2 (H - 1)/H rows d w
    exchange, average       2 (H - 1)/H (rows d + state) bytes every n steps

with d columns, f, b bytes per element of the all-to-all forward and backward, w of the exchange. Per rank and step
plain row-wise sharding moves 2 T (H - 1)/H rows between hosts and groups of a host (H - 1) u T by all-gather, so the
ratio is u H / 2 at equal widths (u: unique share): groups save bytes only where ids repeat or the wire is narrower.

Bytes of a collective are those of the rank that sends most: it is where all others wait. Left out: the host's work per
call, and caches (tables in host memory keep TorchRec's own estimate).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ShardingType

from turbogr_plugin.sharding.access_histogram import AccessHistogram, Floats
from turbogr_plugin.sharding.exchange_wire import id_dtype

Algorithm = Literal["none", "all_gather", "reduce_scatter", "dense", "average"]
Sync = Literal["exact", "average"]

_ID_BYTES = 8
_GRADIENT_BYTES = 4


class Load(IntEnum):
    """Columns of the loads of a rank or shard, all in bytes per step but memory, which is bytes."""

    LOOKUP = 0
    A2A_INTRA = 1
    A2A_INTER = 2
    EXCHANGE_INTRA = 3
    EXCHANGE_INTER = 4
    REDUCE = 5
    MEMORY = 6


@dataclass(frozen=True)
class GroupShape:
    """How ranks, fast domains and groups lie over each other."""

    world: int
    """N: all ranks."""
    group: int
    """I: ranks of a group, consecutive."""
    domain: int
    """Ranks of a fast domain (a host or a pod), of all ranks."""
    host: int | None = None
    """Ranks of a host; None where that is the fast domain."""

    @classmethod
    def of(cls, topology: Topology, group_size: int) -> GroupShape:
        """The shape of groups of `group_size` on the topology of all ranks."""
        domain = min(topology.intra_group_size, topology.world_size)
        return cls(topology.world_size, group_size, domain, min(topology.local_world_size, domain))

    @property
    def groups(self) -> int:
        """H."""
        return self.world // self.group

    @property
    def local(self) -> int:
        """Ranks of a group inside one domain."""
        return min(self.domain, self.group)

    @property
    def block(self) -> int:
        """Ranks of a group on one host, over which tables are sharded that lie on hosts."""
        return min(self.host or self.domain, self.group)

    @property
    def near_peers(self) -> float:
        """Of a rank's H - 1 peers, the share inside its domain."""
        return 0.0 if self.groups == 1 else (max(1, self.domain // self.group) - 1) / (self.groups - 1)


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """What is asked of one table, per rank and step."""

    name: str
    rows: int
    dim: int
    lookups: float
    """Ids."""
    outputs: float
    """Rows that come back: one per id of a sequence, one per bag of a pooled table."""
    pooled: bool
    access: AccessHistogram
    element_bytes: float = 4.0
    """Of a weight."""
    row_state_bytes: float = 0.0
    """Optimizer state of a row, whatever its columns (row-wise Adagrad: 4)."""
    element_state_bytes: float = 0.0
    """Optimizer state of an element (Adagrad: 4, Adam: 8)."""
    forward_bytes: float = 4.0
    """Of an element in the forward all-to-all."""
    backward_bytes: float = 4.0
    """Of an element in the backward all-to-all."""


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """What the costs depend on besides tables and topology."""

    sync: Sync = "exact"
    sync_interval: int = 1
    """Steps between averages; exact groups exchange in every step."""
    wire_bytes: float = 4.0
    """Of an element in the exchange between groups."""
    contexts: int = 3
    """Batches whose ids a pipeline holds at once."""
    lookups_in_flight: int = 1
    """Batches whose looked-up rows it holds at once: 1 + staleness."""


@dataclass(frozen=True)
class Exchange:
    """The cheapest way to sum the gradients of a table's shards over the groups."""

    algorithm: Algorithm
    sent: Floats
    """[shards] bytes that a rank sends per step."""
    held: Floats
    """[shards] bytes of rows that a rank holds meanwhile."""


def cheapest_exchange(
    *,
    groups: int,
    own_rows: Floats,
    all_rows: Floats,
    rows: Floats,
    columns: Floats,
    state_bytes: Floats,
    settings: CostSettings,
) -> Exchange:
    """The exchange of a table with the fewest bytes over all its shards; every argument but two is [shards].

    Args:
        groups: H.
        own_rows: U, different rows that the group touches in a step.
        all_rows: V, that all groups touch.
        rows: of the shards.
        columns: of the shards.
        state_bytes: optimizer state, which averaging sends too.
        settings: sync mode and width of the wire.
    """
    if groups == 1:
        return Exchange("none", np.zeros_like(rows), np.zeros_like(rows))
    wide = columns * settings.wire_bytes
    of_id = id_dtype(int(rows.max())).itemsize
    row = wide + of_id
    if settings.sync == "average":
        whole = rows * wide + state_bytes
        return Exchange("average", 2 * (groups - 1) / groups * whole / settings.sync_interval, whole)
    ways = (
        Exchange("all_gather", (groups - 1) * own_rows * row, groups * own_rows * row),
        Exchange(
            "reduce_scatter",
            (groups - 1) * own_rows * of_id + (groups - 1) / groups * (own_rows + all_rows) * wide,
            groups * own_rows * of_id + (own_rows + all_rows) * wide,
        ),
        Exchange("dense", 2 * (groups - 1) / groups * rows * wide, rows * wide),
    )
    return min(ways, key=lambda way: float(way.sent.sum()))


def shard_loads(
    table: TableLoad,
    sharding_type: str,
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    shape: GroupShape,
    settings: CostSettings,
) -> tuple[Floats, Algorithm]:
    """The loads of every shard of one table.

    Args:
        table: what is asked of it.
        sharding_type: a value of TorchRec's ShardingType.
        sizes: [shards, 2] rows and columns of each.
        offsets: [shards, 2] first row and column of each.
        shape: groups and domains.
        settings: sync mode, wire, pipeline.

    Returns:
        [shards, len(Load)], and how gradients are summed over the groups.
    """
    held = sizes.astype(np.float64)
    rows, columns, first = held[:, 0], held[:, 1], offsets[:, 0]
    loads = np.zeros((len(sizes), len(Load)))
    state = rows * (table.row_state_bytes + columns * table.element_state_bytes)
    weights = rows * columns * table.element_bytes
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        reduced = rows * columns * _GRADIENT_BYTES
        loads[:, Load.LOOKUP] = table.lookups * columns * (table.element_bytes + 2 * _GRADIENT_BYTES) + 3 * weights
        loads[:, Load.REDUCE] = reduced
        loads[:, Load.MEMORY] = weights + state + reduced + _in_flight(table, settings)
        return loads, "none"

    group, local, groups = shape.group, shape.local, shape.groups
    by_rows = sharding_type in _BY_ROWS
    asked = group * table.lookups
    if by_rows:
        share, own = _by_row_range(table, first, rows, asked)
        union = _by_row_range(table, first, rows, groups * asked)[1] if groups > 1 else own
    else:
        share = np.ones(len(sizes))
        own = np.full(len(sizes), table.access.unique(asked))
        union = np.full(len(sizes), table.access.unique(groups * asked)) if groups > 1 else own

    arriving = asked * share
    returned = group * table.outputs if table.pooled else arriving
    updated = union if settings.sync == "exact" else own
    read = arriving * columns * table.element_bytes + 2 * returned * columns * _GRADIENT_BYTES
    written = 2 * updated * (columns * (table.element_bytes + table.element_state_bytes) + table.row_state_bytes)
    loads[:, Load.LOOKUP] = read + written

    widths = table.forward_bytes + table.backward_bytes
    near, far = (local - 1) / group, (group - local) / group
    if table.pooled and sharding_type in _INSIDE_A_HOST:
        # Partial sums are reduced inside the host first; each rank then sends its part of the bags to the other hosts.
        block = shape.block
        bags = table.outputs * columns * widths
        rows_near = ((block - 1) / block * group + local / block - 1) * bags
        rows_far = (group - local) / block * bags
    else:
        rows_near, rows_far = (part * returned * columns * widths for part in (near, far))
    loads[:, Load.A2A_INTRA] = near * arriving * _ID_BYTES + rows_near
    loads[:, Load.A2A_INTER] = far * arriving * _ID_BYTES + rows_far

    exchange = cheapest_exchange(
        groups=groups,
        own_rows=own,
        all_rows=union,
        rows=rows,
        columns=columns,
        state_bytes=state,
        settings=settings,
    )
    loads[:, Load.EXCHANGE_INTRA] = shape.near_peers * exchange.sent
    loads[:, Load.EXCHANGE_INTER] = (1 - shape.near_peers) * exchange.sent
    # The rows of all groups are read once more to be summed.
    loads[:, Load.LOOKUP] += exchange.held / (settings.sync_interval if settings.sync == "average" else 1)

    in_flight = settings.lookups_in_flight * returned * columns * _GRADIENT_BYTES
    ids = settings.contexts * arriving * _ID_BYTES
    loads[:, Load.MEMORY] = weights + state + ids + in_flight + exchange.held
    return loads, exchange.algorithm


def received_bytes(table: TableLoad, settings: CostSettings) -> float:
    """Memory that each rank needs for its own ids and rows of a table, however that is sharded."""
    return _in_flight(table, settings)


def _in_flight(table: TableLoad, settings: CostSettings) -> float:
    rows = settings.lookups_in_flight * table.outputs * table.dim * _GRADIENT_BYTES
    return settings.contexts * table.lookups * _ID_BYTES + rows


_BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
_INSIDE_A_HOST = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


def _by_row_range(table: TableLoad, first: NDArray[np.int64], rows: Floats, asked: float) -> tuple[Floats, Floats]:
    """Share of the lookups, and different rows, of each shard's range of rows; ranges repeat where columns differ."""
    starts, inverse = np.unique(first, return_inverse=True)
    boundaries = np.append(starts, table.rows)
    share = table.access.lookup_shares(boundaries)[inverse]
    unique = table.access.unique_by_range(boundaries, asked)[inverse]
    return np.where(rows > 0, share, 0.0), np.where(rows > 0, unique, 0.0)
