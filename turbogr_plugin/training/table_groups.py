"""The plan of a run whose ranks form groups: by size, or as the planner finds it from links and the store."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.distributed.types import ModuleSharder

from turbogr_plugin.backend.collectives import ranks_of_hosts
from turbogr_plugin.backend.rank_exchange import RankExchange, caught
from turbogr_plugin.data.batch import ITEM, NEGATIVE
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.models.retrieval import ITEM_TABLE
from turbogr_plugin.sharding.access_histogram import AccessHistogram
from turbogr_plugin.sharding.batch_statistics import BatchStatistics
from turbogr_plugin.sharding.constraints import sequence_table_constraints
from turbogr_plugin.sharding.hierarchical_plan import HierarchicalShardingPlan
from turbogr_plugin.sharding.hierarchical_planner import HierarchicalShardingPlanner
from turbogr_plugin.sharding.topologies import topology_from_file
from turbogr_plugin.training.config import RunConfig


def plan_groups(
    config: RunConfig,
    store: InteractionStore,
    task: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> HierarchicalShardingPlan:
    """The plan; a collective.

    Args:
        config: with `groups.size` other than 0.
        store: of the run, whose popularity and lengths the planner takes.
        task: with its tables on meta.
        sharders: of the tables.
        group: of all ranks.
        device: of this rank.

    Raises:
        InputError: on every rank: a size that the ranks do not allow, links of other hosts, tables that do not fit.
    """
    # Hosts may have different numbers of ranks: a group is a part of the smallest or made of hosts of its size.
    local = min(ranks_of_hosts(group))
    made: list[HierarchicalShardingPlanner] = []

    def make() -> None:
        try:
            made.append(_planner(config, store, group, device, local))
        except ValueError as error:
            raise InputError(f"groups: {error}") from error

    # The file may be there for some ranks only, and a rank that has none must not leave the others waiting.
    RankExchange(device, group).agree(caught(make), doing="reading groups")
    try:
        return made[0].collective_plan(task, sharders, group)
    except (ValueError, PlannerError) as error:
        raise InputError(f"groups: {error}") from error


def _planner(
    config: RunConfig, store: InteractionStore, group: dist.ProcessGroup, device: torch.device, local: int
) -> HierarchicalShardingPlanner:
    groups = config.groups
    if groups.topology:
        topology = topology_from_file(groups.topology)
    else:
        topology = Topology(group.size(), device.type, local_world_size=local)
    if topology.compute_device != device.type:
        raise ValueError(f"{groups.topology} is of {topology.compute_device}, the run of {device.type}")
    return HierarchicalShardingPlanner(
        topology=topology,
        batch_size=max(1, config.training.global_batch_size // group.size()),
        constraints=sequence_table_constraints([ITEM_TABLE]),
        group_size=groups.size,
        wire_dtype=groups.wire_dtype,
        # Only rank 0 plans, and only a choice needs them.
        batch_statistics=item_statistics(config, store) if groups.size == "auto" and group.rank() == 0 else None,
    )


def item_statistics(config: RunConfig, store: InteractionStore) -> BatchStatistics:
    """Lookups of the item table: items as often as the store has them, negatives evenly over all."""
    length = float(np.minimum(np.diff(store.offsets), config.model.dimensions().max_length).mean())
    negatives = float(config.negatives.count) * (length if config.negatives.sharing == "none" else 1.0)
    shares = np.bincount(store.item_ids, minlength=store.num_items) / store.num_interactions
    return BatchStatistics(
        lengths={ITEM: length, NEGATIVE: negatives},
        access={ITEM_TABLE: AccessHistogram.from_counts(length * shares + negatives / store.num_items)},
    )
