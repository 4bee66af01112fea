"""One size of groups, worked out: the assignment, its memory, its bytes and its predicted step.

Two ways lead to an assignment: the search over options (option_search.py), or a plan that TorchRec's own search has
found, which is costed here by the same formulas, so that sizes can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

from turbogr_plugin.sharding.access_histogram import Floats
from turbogr_plugin.sharding.hierarchical_cost import CostSettings, GroupShape, Load, received_bytes, shard_loads
from turbogr_plugin.sharding.link_bandwidths import MILLISECONDS
from turbogr_plugin.sharding.option_search import Assignment, search
from turbogr_plugin.sharding.plan_report import Candidate
from turbogr_plugin.sharding.step_prediction import Speeds
from turbogr_plugin.sharding.table_options import ListedTable, TableOption, bucket_counter, table_options
from turbogr_plugin.sharding.topologies import memory_of


@dataclass(frozen=True, eq=False)
class GroupCandidate:
    """A size of groups with its assignment; None where nothing fits."""

    report: Candidate
    assignment: Assignment | None
    group: Topology
    speeds: Speeds

    def options(self) -> list[ShardingOption]:
        """TorchRec's options with the shards of this assignment: sizes, ranks, storage and milliseconds."""
        assert self.assignment is not None
        weights = self.speeds.seconds_per_byte() * MILLISECONDS
        on_host = self.group.compute_device == "cpu"
        return [
            _with_shards(option, ranks, weights, self.group.world_size, on_host)
            for option, ranks in zip(self.assignment.chosen, self.assignment.ranks, strict=True)
        ]


def searched(
    tables: Sequence[ListedTable],
    topology: Topology,
    group: Topology,
    capacity: Floats,
    settings: CostSettings,
    speeds: Speeds,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> GroupCandidate:
    """The best assignment that the search finds.

    Args:
        tables: of the model.
        topology: of all ranks.
        group: of one group.
        capacity: [ranks of a group] bytes for tables and what goes with them.
        settings: of the costs.
        speeds: of the topology, for this size.
        constraints: TorchRec's.
    """
    buckets = bucket_counter(group)
    options = [table_options(table, topology, group, settings, constraints, buckets) for table in tables]
    everywhere = sum(
        received_bytes(choices[0].load, settings) for choices in options if choices[0].type not in _REPLICATED
    )
    found = search(options, capacity, speeds, everywhere=everywhere)
    missing = found.missing if found.missing is not None else np.zeros(0)
    worst = int(np.argmax(found.needed - capacity)) if found.needed.size else 0
    report = Candidate(
        group_size=group.world_size,
        groups=speeds.shape.groups,
        memory_needed=round(float(found.needed[worst])),
        memory_allowed=round(float(capacity[worst])),
        missing={rank: round(float(value)) for rank, value in enumerate(missing) if value > 0},
        prediction=found.prediction,
        proposals=found.proposals,
    )
    return GroupCandidate(_with_bytes(report, found.assignment), found.assignment, group, speeds)


def of_plan(
    best_plan: Sequence[ShardingOption],
    tables: Sequence[ListedTable],
    group: Topology,
    capacity: Floats,
    settings: CostSettings,
    speeds: Speeds,
    proposals: int,
) -> GroupCandidate:
    """The costs of a plan of TorchRec's search; its memory is what TorchRec estimates.

    Args:
        best_plan: TorchRec's options with shards that have ranks and storage.
        tables: of the model.
        group: of one group.
        capacity: [ranks of a group] bytes, for the report.
        settings: of the costs.
        speeds: of the topology, for this size.
        proposals: how many TorchRec has tried.
    """
    loads_of = {
        (option.fqn, option.sharding_type): load
        for table in tables
        for option, load in zip(table.options, table.loads, strict=True)
    }
    shape: GroupShape = speeds.shape
    chosen, ranks = [], []
    total = np.zeros((group.world_size, len(Load)))
    for option in best_plan:
        load = loads_of[option.fqn, option.sharding_type]
        sizes = np.array([shard.size for shard in option.shards])
        offsets = np.array([shard.offset for shard in option.shards])
        places = np.array([shard.rank for shard in option.shards])
        replicated = option.sharding_type in _REPLICATED
        if replicated:
            sizes, offsets = sizes[:1], offsets[:1]
        loads, algorithm = shard_loads(load, option.sharding_type, sizes, offsets, shape, settings)
        loads[:, Load.MEMORY] = [memory_of(group, shard.storage) for shard in option.shards[: len(sizes)]]
        if replicated:
            total += loads[0]
            places = np.array([-1])
        else:
            np.add.at(total, places, loads)
        chosen.append(TableOption(option, load, sizes, offsets, loads, shape.block, algorithm))
        ranks.append(places)
    assignment = Assignment(chosen, ranks, total)
    worst = int(np.argmax(total[:, Load.MEMORY] - capacity))
    report = Candidate(
        group_size=group.world_size,
        groups=shape.groups,
        memory_needed=round(float(total[worst, Load.MEMORY])),
        memory_allowed=round(float(capacity[worst])),
        prediction=speeds.predict(total, kinds=assignment.kinds),
        proposals=proposals,
    )
    return GroupCandidate(_with_bytes(report, assignment), assignment, group, speeds)


def unplanned(
    error: Exception, leanest: GroupCandidate | None, group: Topology, capacity: Floats, speeds: Speeds
) -> GroupCandidate:
    """A size for which there is no plan for another reason than memory by our count.

    Args:
        error: of TorchRec's planner, which says how much all ranks together lack, not which rank; or why a table
            cannot be cut for this size.
        leanest: what our search finds, for the bytes by rank; None where tables must lie in host memory.
        group: of one group.
        capacity: [ranks of a group] bytes, for the report.
        speeds: of the topology, for this size.
    """
    reason = " ".join(str(error).split("Possible solutions")[0].split())
    known = leanest.report if leanest is not None else None
    report = Candidate(
        group_size=group.world_size,
        groups=speeds.shape.groups,
        memory_needed=known.memory_needed if known else 0,
        memory_allowed=known.memory_allowed if known else round(float(capacity.min())),
        missing=known.missing if known else {},
        verdict=f"TorchRec's search: {reason}" if isinstance(error, PlannerError) else reason,
    )
    return GroupCandidate(report, None, group, speeds)


_REPLICATED = (ShardingType.DATA_PARALLEL.value,)


def _with_bytes(report: Candidate, assignment: Assignment | None) -> Candidate:
    if assignment is None:
        return report
    peak, mean = assignment.loads.max(0), assignment.loads.mean(0)
    return replace(
        report,
        all_to_all_bytes=float(peak[Load.A2A_INTRA] + peak[Load.A2A_INTER]),
        exchange_bytes=float(peak[Load.EXCHANGE_INTRA] + peak[Load.EXCHANGE_INTER]),
        between_domains_bytes=float(mean[Load.A2A_INTER] + mean[Load.EXCHANGE_INTER]),
        algorithms=dict(Counter(option.algorithm for option in assignment.chosen if option.algorithm != "none")),
        types=dict(Counter(option.type for option in assignment.chosen)),
    )


def _with_shards(
    option: TableOption, ranks: np.ndarray[tuple[int], np.dtype[np.int64]], weights: Floats, world: int, on_host: bool
) -> ShardingOption:
    """TorchRec's option with shards as its statistics and plans want them."""
    source = option.option
    sizes, offsets, loads, places = option.sizes.tolist(), option.offsets.tolist(), option.loads, ranks.tolist()
    if option.type in _REPLICATED:
        sizes, offsets, places = sizes * world, offsets * world, list(range(world))
        loads = np.repeat(loads, world, axis=0)
    milliseconds = loads * weights
    compute = milliseconds[:, Load.LOOKUP].tolist()
    sent = milliseconds[:, [Load.A2A_INTRA, Load.A2A_INTER]].sum(1).tolist()
    summed = milliseconds[:, [Load.EXCHANGE_INTRA, Load.EXCHANGE_INTER, Load.REDUCE]].sum(1).tolist()
    memory = loads[:, Load.MEMORY].round().astype(np.int64).tolist()
    shards = [
        Shard(
            size=size,
            offset=offset,
            storage=Storage(hbm=0 if on_host else held, ddr=held if on_host else 0),
            # Forward and backward move the same rows; the sum over the groups belongs to the backward.
            perf=Perf(fwd_compute=read / 2, bwd_compute=read / 2, fwd_comms=a2a / 2, bwd_comms=a2a / 2 + exchanged),
            rank=rank,
        )
        for size, offset, held, read, a2a, exchanged, rank in zip(
            sizes, offsets, memory, compute, sent, summed, places, strict=True
        )
    ]
    found = ShardingOption.__new__(type(source))
    found.__dict__.update(source.__dict__)
    found.shards = shards
    return found
