"""The ways in which each table may be sharded, with their loads, for one size of groups.

TorchRec's enumerator lists them once (tables, sharders and constraints decide), for a single rank: for 1,024 ranks it
would build and copy half a million shard objects per sharding type and size. What depends on the size of a group is the
cut into shards, which is a formula, and the loads of the shards (hierarchical_cost.py), which are arrays.

Left out: tables in host memory behind a cache (unified memory, SSD). Where a table may lie nowhere else, TorchRec's own
search plans all of them (hierarchical_planner.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import get_num_poolings
from torchrec.distributed.planner.types import ParameterConstraints, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.planner.utils import build_sharder_data_map, extract_comm_data_type_size, sharder_name
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from turbogr_plugin.sharding.access_histogram import AccessHistogram, Floats
from turbogr_plugin.sharding.batch_statistics import BatchStatistics
from turbogr_plugin.sharding.hierarchical_cost import Algorithm, CostSettings, GroupShape, TableLoad, shard_loads
from turbogr_plugin.sharding.optimizer_state import state_bytes
from turbogr_plugin.sharding.topologies import group_topology

Cut = NDArray[np.int64]

#: A rank of an even cut must answer so many times the mean of lookups before others are tried, and how much equal
#: numbers of rows count in these: at most twice and four times the mean rows on a rank.
_UNEVEN, _ROW_SHARES = 1.1, (0.5, 0.25)

_IN_DEVICE_MEMORY = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)


class _NoEstimate(ShardEstimator):
    """Leaves shards without storage and time: the costs here stand in their place."""

    def __init__(self) -> None:
        pass

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        """Nothing."""


class UnevenBucketsError(ValueError):
    """A table of managed collision has a number of buckets that this size of groups does not divide."""


@dataclass(frozen=True, eq=False)
class TableOption:
    """One way to shard one table over a group."""

    option: ShardingOption
    """TorchRec's, with the shards of a single rank."""
    load: TableLoad
    sizes: Cut
    """[shards, 2] rows and columns of each shard."""
    offsets: Cut
    """[shards, 2] its first row and column."""
    loads: Floats
    """[shards, len(Load)] of each shard."""
    block: int
    """Ranks of a group on one host."""
    algorithm: Algorithm
    """How gradients are summed over the groups."""

    @property
    def type(self) -> str:
        """TorchRec's sharding type."""
        return str(self.option.sharding_type)


@dataclass(frozen=True)
class ListedTable:
    """What TorchRec's enumerator gives for one table, and what is asked of it."""

    fqn: str
    options: list[ShardingOption]
    loads: list[TableLoad]
    """One per option: the width of the wire depends on the sharding type."""


def list_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    topology: Topology,
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: BatchStatistics,
    optimizer: Any,
) -> list[ListedTable]:
    """The tables of a model and what may be done with each.

    Args:
        module: the model.
        sharders: TorchRec's.
        topology: of all ranks; only its device type counts.
        batch_size: samples per rank.
        constraints: TorchRec's, by table.
        statistics: popularity; lengths come from the constraints (`constraints_with_lengths`).
        optimizer: of the tables, as for `state_bytes`; None is what is found at the parameters and sharders.

    Raises:
        ValueError: a table without rows or columns, or whose popularity is that of another number of rows.
    """
    given = dict(constraints or {})
    enumerator = EmbeddingEnumerator(
        topology=group_topology(topology, 1),
        batch_size=batch_size,
        constraints=given or None,
        estimator=_NoEstimate(),
        use_exact_enumerate_order=True,
    )
    _check_tables(module, sharders)
    data = build_sharder_data_map({sharder_name(sharder.module_type): sharder for sharder in sharders})
    by_table: dict[str, list[ShardingOption]] = {}
    for option in enumerator.enumerate(module, list(sharders)):
        by_table.setdefault(option.fqn, []).append(option)
    listed = []
    for fqn, options in by_table.items():
        loads = [_table_load(option, data, given, statistics, optimizer) for option in options]
        listed.append(ListedTable(fqn, options, loads))
    return listed


def in_host_memory(tables: Sequence[ListedTable]) -> list[str]:
    """The tables that may not lie in the memory of the device, of which these costs know nothing."""
    return [table.fqn for table in tables if not any(_usable(option, "") for option in table.options)]


def remapped(tables: Sequence[ListedTable]) -> list[str]:
    """The tables of managed collision, whose ids get rows as they come: differently in every group."""
    return [
        table.fqn for table in tables if isinstance(table.options[0].module[1], BaseManagedCollisionEmbeddingCollection)
    ]


def table_options(
    table: ListedTable,
    topology: Topology,
    group: Topology,
    settings: CostSettings,
    constraints: Mapping[str, ParameterConstraints] | None,
    buckets: EmbeddingEnumerator | None = None,
) -> list[TableOption]:
    """All options of a table for groups of a size.

    Args:
        table: of `list_tables`.
        topology: of all ranks.
        group: of one group, `group_topology(topology, size)`.
        settings: of the costs.
        constraints: TorchRec's, by table.
        buckets: `bucket_counter(group)`, which many tables share; None makes one.

    Raises:
        UnevenBucketsError: the table's buckets are not whole on these ranks.
    """
    buckets = buckets or bucket_counter(group)
    shape = GroupShape.of(topology, group.world_size)
    found = []
    for option, load in zip(table.options, table.loads, strict=True):
        if not _usable(option, topology.compute_device):
            continue
        constraint = (constraints or {}).get(option.name)
        for sizes, offsets in [_cut(option, group, constraint, buckets), *_balanced_cuts(option, load, group)]:
            loads, algorithm = shard_loads(load, option.sharding_type, sizes, offsets, shape, settings)
            found.append(TableOption(option, load, sizes, offsets, loads, shape.block, algorithm))
    # fbgemm's tables on CPU end the process where a shard has no rows, and elsewhere such a shard is a rank wasted.
    return [option for option in found if option.sizes.all()] or found


def _cut(
    option: ShardingOption, group: Topology, constraint: ParameterConstraints | None, buckets: EmbeddingEnumerator
) -> tuple[Cut, Cut]:
    """Sizes and offsets of an option's shards, as TorchRec cuts a table; a replica is one shard here."""
    rows, columns = option.tensor.shape
    if option.sharding_type == ShardingType.DATA_PARALLEL.value:
        return np.array([[rows, columns]]), np.zeros((1, 2), dtype=np.int64)
    memories = buckets._device_memory_sizes
    try:
        parts = buckets._get_num_buckets(option.name, option.module[1])
    except ValueError as error:
        raise UnevenBucketsError(str(error)) from None
    if option.sharding_type == ShardingType.ROW_WISE.value and memories is None and parts is None:
        # TorchRec's own takes 0.5 ms for 1,024 ranks, and runs 500 tables x 11 sizes of groups.
        edges = np.minimum(np.arange(group.world_size + 1) * -(-rows // group.world_size), rows)
        sizes, offsets = np.diff(edges), edges[:-1]
        return np.stack([sizes, np.full_like(sizes, columns)], 1), np.stack([offsets, np.zeros_like(offsets)], 1)
    found = calculate_shard_sizes_and_offsets(
        tensor=option.tensor,
        world_size=group.world_size,
        local_world_size=group.local_world_size,  # what a host-wise collective spans, also where a pod is faster
        sharding_type=option.sharding_type,
        col_wise_shard_dim=constraint.min_partition if constraint else None,
        device_memory_sizes=memories,
        num_buckets=parts,
    )
    return np.array(found[0]), np.array(found[1])


def _balanced_cuts(option: ShardingOption, load: TableLoad, group: Topology) -> list[tuple[Cut, Cut]]:
    """Row-wise cuts that spread the lookups of hot rows, where rows are known and an even cut does not spread them.

    The lookup of such tables needs adaptations/uneven_row_ranges.py, which knows plain collections only.
    """
    ranks = group.world_size
    plain = type(option.module[1]) in (EmbeddingCollection, EmbeddingBagCollection)
    known = load.access.by_row and load.rows >= ranks > 1
    if not (plain and known and option.sharding_type == ShardingType.ROW_WISE.value):
        return []
    even = np.minimum(np.arange(ranks + 1) * -(-load.rows // ranks), load.rows)
    if load.access.lookup_shares(even).max() * ranks < _UNEVEN:
        return []
    cuts = [load.access.balanced_boundaries(ranks, share) for share in _ROW_SHARES]
    columns = np.full(ranks, load.dim)
    return [(np.stack([np.diff(cut), columns], 1), np.stack([cut[:-1], 0 * columns], 1)) for cut in cuts]


def bucket_counter(group: Topology) -> EmbeddingEnumerator:
    """What knows into how many buckets a table of managed collision must be cut for a group."""
    return EmbeddingEnumerator(topology=group, batch_size=1, estimator=_NoEstimate())


def _usable(option: ShardingOption, device: str) -> bool:
    if option.compute_kernel not in _IN_DEVICE_MEMORY:
        return False
    parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
    if parallel != (option.compute_kernel == EmbeddingComputeKernel.DENSE.value):
        return False  # TorchRec refuses dense tables elsewhere; a replica with a fused optimizer would not be reduced
    # fbgemm's dense lookup pools sequences on CPU by mistake (torchrec 1.8.0, batched_embedding_kernel.py:2890).
    return not (parallel and device == "cpu" and not option.is_pooled)


def _check_tables(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for path, child in module.named_modules():
        sharder = by_type.get(type(child))
        if sharder is None:
            continue
        for name, parameter in sharder.shardable_parameters(child).items():
            if parameter.dim() != 2 or 0 in parameter.shape:
                raise ValueError(
                    f"table {name!r} of {path or 'the model'} has shape {tuple(parameter.shape)}: a table to shard "
                    "needs at least one row and one column"
                )


def _table_load(
    option: ShardingOption,
    sharder_data: Mapping[str, Any],
    constraints: dict[str, ParameterConstraints],
    statistics: BatchStatistics,
    optimizer: Any,
) -> TableLoad:
    constraint = constraints.get(option.name)
    rows, dim = option.tensor.shape
    lengths = list(option.input_lengths)
    batches = (constraint.batch_sizes if constraint else None) or [option.batch_size] * len(lengths)
    poolings = get_num_poolings(constraints, option)
    bags = sum(poolings[place] * batch for place, batch in enumerate(batches))
    lookups = sum(length * poolings[place] * batches[place] for place, length in enumerate(lengths))
    access = statistics.access.get(option.name)
    if access is not None and access.rows != rows:
        raise ValueError(f"access[{option.name!r}] has {access.rows} rows, the table has {rows}")
    data = sharder_data[option.module_type_key]
    forward, backward, forward_reduced, backward_reduced = extract_comm_data_type_size(option, data)
    if option.is_pooled and option.sharding_type in _REDUCED:
        forward, backward = forward_reduced, backward_reduced
    per_row, per_element = state_bytes(option.tensor, data.fused_params, optimizer)
    return TableLoad(
        name=option.name,
        rows=rows,
        dim=dim,
        lookups=lookups,
        outputs=bags if option.is_pooled else lookups,
        pooled=option.is_pooled,
        access=AccessHistogram.uniform(rows) if access is None else access,
        element_bytes=option.tensor.element_size(),
        row_state_bytes=per_row,
        element_state_bytes=per_element,
        forward_bytes=forward,
        backward_bytes=backward,
    )


_REDUCED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


def dense_parameter_bytes(module: nn.Module, tables: Sequence[ListedTable]) -> int:
    """Bytes of the gradients that all ranks reduce: every parameter that is no table."""
    of_tables = {id(table.options[0].tensor) for table in tables}
    parameters: Sequence[torch.Tensor] = [each for each in module.parameters() if id(each) not in of_tables]
    return sum(each.numel() * each.element_size() for each in parameters)
