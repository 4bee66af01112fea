"""HierarchicalShardingPlanner: TorchRec's planner, which also chooses how many ranks share the tables.

    planner = HierarchicalShardingPlanner(topology=npu_topology("atlas-800t-a2", nodes=4), batch_statistics=statistics)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)       # prints, and holds, why

N ranks form groups of consecutive ranks; each group holds all tables, sharded inside it, so that all-to-all stays
inside a group while gradients of touched rows are summed over the groups (arXiv 2605.13433, section 4.2.1). For every
size of groups that the topology allows, tables are sharded as well as the search can (option_search.py) under the
memory of tables, optimizer state, rows in flight and what the storage reservation sets aside. The size with the
shortest predicted step wins, but a smaller group must shorten it by `minimum_gain`: replicas cost memory.

TorchRec's own search (its proposers, partitioner and estimators) runs instead, once per size, where the caller gives
one of them or tables must lie in host memory; its plans are compared by the same costs.

Left out: carrying the plan out (HierarchicalModelParallel does), and different sizes of groups for different tables.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner.planners import (
    EmbeddingShardingPlanner,
    to_sharding_plan,
    validate_modules_inclusion_in_sharding_plan,
    validate_rank_assignment,
)
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanDebugStats,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingType

from turbogr_plugin.backend.collectives import check_ranks_per_host
from turbogr_plugin.sharding.access_histogram import Floats
from turbogr_plugin.sharding.batch_statistics import BatchStatistics, constraints_with_lengths
from turbogr_plugin.sharding.group_candidates import GroupCandidate, of_plan, searched, unplanned
from turbogr_plugin.sharding.group_choice import choose, refusal
from turbogr_plugin.sharding.hierarchical_cost import CostSettings, GroupShape, Sync
from turbogr_plugin.sharding.hierarchical_plan import HierarchicalShardingPlan
from turbogr_plugin.sharding.plan_notes import planning_notes
from turbogr_plugin.sharding.plan_report import PlanReport
from turbogr_plugin.sharding.step_prediction import Speeds
from turbogr_plugin.sharding.table_options import (
    ListedTable,
    UnevenBucketsError,
    dense_parameter_bytes,
    in_host_memory,
    list_tables,
    remapped,
)
from turbogr_plugin.sharding.topologies import (
    check_group_size,
    group_sizes,
    group_topology,
    memory_of,
    with_less_memory,
)

_WIRES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Model:
    """What is planned, the same for every size of groups."""

    module: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    constraints: dict[str, ParameterConstraints]
    """With the lengths of the statistics."""
    tables: list[ListedTable]
    on_host: list[str]
    """Tables that may lie in host memory only."""
    remapped: list[str]
    """Tables of managed collision."""
    left: Floats
    """[all ranks] bytes that the reservation leaves."""


class HierarchicalShardingPlanner(EmbeddingShardingPlanner):
    """Plans groups of ranks and the tables inside them.

    Args:
        topology: of all ranks, TorchRec's or one of sharding/topologies.py; None as in TorchRec.
        batch_size: samples per rank.
        group_size: ranks that hold every table once, or "auto".
        sync: "exact" sums gradients over the groups before the update; "average" averages weights after it.
        sync_interval: steps between averages.
        batch_statistics: lookups and popularity; without them as the constraints say, and uniform.
        optimizer: of the tables, where it is neither applied to the parameters nor in the sharders' fused_params.
        wire_dtype: of gradients between groups: float32, bfloat16 or float16.
        dense_seconds: of forward and backward of the dense part for one batch, for predictions.
        activation_bytes: memory that the dense part needs besides its parameters, which the reservation counts.
        pipeline_contexts: batches whose ids the train pipeline holds at once.
        staleness: of the pipeline; 1 keeps the looked-up rows of two batches.
        overlap: share of the tables' communication that the pipeline runs beside the dense part, 0 to 1.
        minimum_gain: share of the step by which smaller groups must shorten it to be chosen.
        enumerator, storage_reservation, proposer, partitioner, performance_model, stats, constraints, debug, callbacks,
            timeout_seconds, plan_loader: as in EmbeddingShardingPlanner. `enumerator`, `performance_model` and
            `plan_loader` are bound to the topology of one group and need a `group_size`.

    Raises:
        ValueError: for a value that is not allowed; the message names it.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        group_size: int | Literal["auto"] = "auto",
        sync: Sync = "exact",
        sync_interval: int = 1,
        batch_statistics: BatchStatistics | None = None,
        optimizer: Any = None,
        wire_dtype: torch.dtype = torch.float32,
        dense_seconds: float = 0.0,
        activation_bytes: int = 0,
        pipeline_contexts: int = 3,
        staleness: int = 0,
        overlap: float = 0.0,
        minimum_gain: float = 0.05,
    ) -> None:
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        bound = {"enumerator": enumerator, "performance_model": performance_model, "plan_loader": plan_loader}
        for name, value in bound.items():
            if value is not None and group_size == "auto":
                raise ValueError(f"{name} is made for the topology of one group: give group_size a number, not 'auto'")
        if group_size != "auto":
            check_group_size(self._topology, group_size)
        allowed: list[tuple[str, Any, bool, str]] = [
            ("batch_size", batch_size, batch_size is None or _whole(batch_size, 1), "a whole number >= 1"),
            ("sync", sync, sync in ("exact", "average"), "'exact' or 'average'"),
            ("sync_interval", sync_interval, _whole(sync_interval, 1), "a whole number >= 1"),
            ("wire_dtype", wire_dtype, wire_dtype in _WIRES, ", ".join(map(str, _WIRES))),
            ("dense_seconds", dense_seconds, 0 <= dense_seconds < math.inf, "a number >= 0"),
            ("activation_bytes", activation_bytes, 0 <= activation_bytes < math.inf, "a number >= 0"),
            ("pipeline_contexts", pipeline_contexts, _whole(pipeline_contexts, 1), "a whole number >= 1"),
            ("staleness", staleness, _whole(staleness, 0), "a whole number >= 0"),
            ("overlap", overlap, 0 <= overlap <= 1, "0 to 1"),
            ("minimum_gain", minimum_gain, 0 <= minimum_gain < 1, "from 0 up to but not 1"),
        ]
        for name, value, good, wanted in allowed:
            if not good:
                raise ValueError(f"{name} must be {wanted}, got {value!r}")
        self._group_size = group_size
        self._settings = CostSettings(
            sync=sync,
            sync_interval=sync_interval,
            wire_bytes=float(wire_dtype.itemsize),
            contexts=pipeline_contexts,
            lookups_in_flight=1 + staleness,
        )
        self._statistics = batch_statistics or BatchStatistics()
        self._table_optimizer = optimizer
        self._dense_seconds, self._overlap, self._minimum_gain = dense_seconds, overlap, minimum_gain
        self._activation_bytes = activation_bytes
        self._own_search = all(each is None for each in (proposer, partitioner, *bound.values()))
        self._given = {
            "enumerator": enumerator,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "plan_loader": plan_loader,
        }

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> HierarchicalShardingPlan:
        """Plans on rank 0 and gives every rank the plan, or the reason why there is none.

        Args:
            module: the model; tables may be on the meta device.
            sharders: TorchRec's; None is TorchRec's default.
            pg: of all ranks; None is the default group.

        Raises:
            ValueError: a topology for another number of ranks or with more ranks per host than there are, or bad input
                of `plan`, on every rank.
            PlannerError: nothing fits, on every rank.
        """
        if pg is None:
            if not dist.is_initialized():
                raise ValueError("pg must be given or torch.distributed be initialized; plan() needs neither")
            pg = cast("dist.ProcessGroup", dist.group.WORLD)
        if pg.size() != self._topology.world_size:
            raise ValueError(f"topology has {self._topology.world_size} ranks, the process group has {pg.size()}")
        check_ranks_per_host(self._topology.local_world_size, pg)
        plan, error = invoke_on_rank_and_broadcast_result(
            pg, 0, self._plan_or_error, module, get_default_sharders() if sharders is None else sharders
        )
        if error is not None:
            raise error
        return cast("HierarchicalShardingPlan", plan)

    def _plan_or_error(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> tuple[HierarchicalShardingPlan | None, Exception | None]:
        """An exception on rank 0 alone would leave the others waiting for its broadcast."""
        try:
            return self.plan(module, sharders), None
        except Exception as error:
            return None, error.with_traceback(None)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> HierarchicalShardingPlan:
        """Plans for the topology, without communication.

        Args:
            module: the model.
            sharders: TorchRec's.

        Raises:
            ValueError: tables without rows, popularity of another table, groups for tables of managed collision.
            PlannerError: nothing fits: per rank what is missing, and the smallest group that fits.
        """
        start = time.perf_counter()
        constraints = constraints_with_lengths(module, sharders, self._constraints, self._statistics, self._batch_size)
        tables = list_tables(
            module,
            sharders,
            self._topology,
            batch_size=self._batch_size,
            constraints=constraints,
            statistics=self._statistics,
            optimizer=self._table_optimizer,
        )
        world = self._topology.world_size
        if not tables:
            return HierarchicalShardingPlan(
                plan={},
                group_size=world,
                world_size=world,
                sync=self._settings.sync,
                ranks_per_host=self._topology.local_world_size,
            )
        left = self._capacity(self._topology, copy.copy(self._storage_reservation), module, sharders, constraints)
        model = _Model(module, sharders, constraints, tables, in_host_memory(tables), remapped(tables), left)
        possible = [world] if model.remapped else group_sizes(self._topology)
        sizes = possible if self._group_size == "auto" else [self._group_size]
        if not set(sizes) <= set(possible):
            raise ValueError(
                f"group_size must be all {world} ranks for tables of managed collision ({', '.join(model.remapped)}), "
                f"got {self._group_size}: each group would give the same ids rows of its own"
            )
        candidates = [self._candidate(size, model) for size in sizes]
        self._num_proposals = sum(candidate.report.proposals for candidate in candidates)
        self._num_plans = sum(candidate.report.fits for candidate in candidates)
        best, judged = choose(candidates, self._minimum_gain)
        notes = planning_notes(
            tables,
            self._topology,
            statistics=self._statistics,
            dense_seconds=self._dense_seconds,
            own_search=self._own_search,
            on_host=model.on_host,
            remapped=model.remapped,
        )
        report = PlanReport(candidates=judged, notes=notes, seconds=time.perf_counter() - start)
        if best is None:
            others = [self._candidate(size, model) for size in possible if size not in sizes]
            raise PlannerError(
                error_type=PlannerErrorType.INSUFFICIENT_STORAGE,
                message=refusal(candidates, others, report),
            )
        return self._finished(best, report, model, start)

    def _candidate(self, size: int, model: _Model) -> GroupCandidate:
        """One size of groups, by our search or by TorchRec's."""
        group = group_topology(self._topology, size)
        # A rank of the group has what the fullest of its peers has left.
        capacity = model.left.reshape(-1, size).min(0)
        speeds = Speeds.of(
            self._topology,
            GroupShape.of(self._topology, size),
            dense_seconds=self._dense_seconds,
            dense_bytes=dense_parameter_bytes(model.module, model.tables),
            overlap=self._overlap,
        )

        def ours() -> GroupCandidate:
            return searched(
                model.tables, self._topology, group, capacity, self._settings, speeds, model.constraints or None
            )

        if self._own_search and not model.on_host:
            try:
                return ours()
            except UnevenBucketsError as error:
                return unplanned(error, None, group, capacity, speeds)
        stock = EmbeddingShardingPlanner(
            topology=with_less_memory(group, self._activation_bytes),
            batch_size=self._batch_size,
            storage_reservation=copy.copy(self._storage_reservation),
            stats=[],
            constraints=model.constraints or None,
            debug=self._debug,
            timeout_seconds=self._timeout_seconds,
            **self._given,
        )
        try:
            stock.plan(model.module, model.sharders)
        except PlannerError as error:
            return unplanned(error, None if model.on_host else ours(), group, capacity, speeds)
        found = cast("list[ShardingOption]", stock._best_plan)
        return of_plan(found, model.tables, group, capacity, self._settings, speeds, stock._num_proposals)

    def _capacity(
        self,
        topology: Topology,
        reservation: StorageReservation,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints],
    ) -> Floats:
        """[ranks] bytes that the reservation leaves for tables."""
        try:
            left = reservation.reserve(
                topology=with_less_memory(topology, self._activation_bytes),
                batch_size=self._batch_size,
                module=module,
                sharders=sharders,
                constraints=constraints or None,
            )
        except PlannerError:  # the dense part alone exceeds it
            return np.zeros(topology.world_size)
        return np.array([max(0, memory_of(topology, device.storage)) for device in left.devices], dtype=np.float64)

    def _finished(
        self,
        best: GroupCandidate,
        report: PlanReport,
        model: _Model,
        start: float,
    ) -> HierarchicalShardingPlan:
        """The plan of the chosen size, after callbacks, statistics and TorchRec's checks."""
        options = best.options()
        for callback in self._callbacks:
            options = callback(options)
        self._best_plan = options
        group = best.group
        plan = to_sharding_plan(options, group)
        reservation = copy.copy(self._storage_reservation)
        # The statistics print what it has set aside.
        self._capacity(group, reservation, model.module, model.sharders, model.constraints)
        for stats in self._stats:
            stats.log(
                sharding_plan=plan,
                topology=group,
                batch_size=self._batch_size,
                storage_reservation=reservation,
                num_proposals=self._num_proposals,
                num_plans=self._num_plans,
                run_time=time.perf_counter() - start,
                best_plan=options,
                constraints=model.constraints or None,
                enumerator=self._enumerator,
                sharders=model.sharders,
                debug=self._debug,
                debug_stats=PlanDebugStats(planner_type=type(self).__name__, timeout_seconds=self._timeout_seconds),
            )
        validate_modules_inclusion_in_sharding_plan(plan, model.module, model.sharders)
        validate_rank_assignment(plan, group)
        by_host = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
        return HierarchicalShardingPlan(
            plan=plan.plan,
            group_size=group.world_size,
            world_size=self._topology.world_size,
            sync=self._settings.sync,
            node_group_size=group.local_world_size if any(o.sharding_type in by_host for o in options) else None,
            ranks_per_host=self._topology.local_world_size,
            report=report,
        )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
