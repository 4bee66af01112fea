"""HierarchicalModelParallel: tables sharded inside groups of ranks, and updated as if there were no groups.

    plan = HierarchicalShardingPlanner(...).collective_plan(model, sharders, dist.group.WORLD)
    model = HierarchicalModelParallel(model, plan=plan, sharders=sharders, device=device)

N ranks form groups of consecutive ranks; each group holds every table once, so that TorchRec's all-to-all stays inside
a group. TorchRec's DMPCollection lets the groups train apart and averages their weights. Here the gradients of touched
rows are summed over the groups before the update (arXiv 2605.13433, section 4.2.1: hierarchical sparse parallelism), so
that training is what it would be with all ranks in one group: the same sums in another order, no learning rate or
moment scaled. Replicas of a table stay equal to the last bit.

The update of a step is carried out before the next lookup at the latest, and before state_dict, eval() and reads of
parameters through this class. Whoever reads weights past it (a table module of fbgemm) calls `finish()` first.

Left out: different groups for different modules (DMPCollection's submodule_configs), managed collision, features of
different batch sizes, and learned per-sample weights, each refused with sync="exact".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    DMPCollection,
)
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer

from turbogr_plugin.backend.collectives import check_ranks_per_host, group_of_same_ranks, timeout_of
from turbogr_plugin.backend.rank_exchange import RankExchange, caught
from turbogr_plugin.errors import InputError
from turbogr_plugin.sharding.exchange_hooks import GradientExchange
from turbogr_plugin.sharding.exchange_wire import WIRES
from turbogr_plugin.sharding.hierarchical_plan import HierarchicalShardingPlan
from turbogr_plugin.sharding.replica_messages import ReplicaMessages
from turbogr_plugin.sharding.sparse_exchange import WAYS, ExchangeRules, Way
from turbogr_plugin.sharding.table_update import check_tables, zero_rows_stay


class HierarchicalModelParallel(DMPCollection):
    """DistributedModelParallel for plans with groups of ranks.

    Args:
        module: to be sharded.
        env: of all ranks; None is the default process group.
        device: of this rank; None is cpu.
        plan: a HierarchicalShardingPlan, which is left as it is; any other plan (or None, as in
            DistributedModelParallel) has one group.
        sharders: as in DistributedModelParallel.
        init_data_parallel: as in DistributedModelParallel.
        init_parameters: as in DistributedModelParallel.
        data_parallel_wrapper: as in DistributedModelParallel; it wraps over all ranks.
        model_tracker_configs: with one group only.
        wire_dtype: of gradients between groups: float32, bfloat16, or float16 with a power of two per table.
        exchange: "all_gather", "reduce_scatter" or "dense"; None: by the bytes of each lookup.
        sync_interval: with plan.sync "average": `sync` averages in each such call.

    Raises:
        ValueError: a value that is not allowed, a plan for another number of ranks or for hosts with more of them,
            tables without an exact sum.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: Any = None,
        *,
        wire_dtype: torch.dtype = torch.float32,
        exchange: Way | None = None,
        sync_interval: int = 1,
    ) -> None:
        if wire_dtype not in WIRES:
            raise ValueError(f"wire_dtype must be one of {', '.join(map(str, WIRES))}, got {wire_dtype}")
        if exchange is not None and exchange not in WAYS:
            raise ValueError(f"exchange must be one of {', '.join(WAYS)} or None, got {exchange!r}")
        if isinstance(sync_interval, bool) or not isinstance(sync_interval, int) or sync_interval < 1:
            raise ValueError(f"sync_interval must be a whole number >= 1, got {sync_interval!r}")
        device = device or torch.device("cpu")
        group = dist.group.WORLD if env is None else env.process_group
        self._exchange: GradientExchange | None = None
        self._sync_interval, self._syncs = sync_interval, 0
        self._grouped = isinstance(plan, HierarchicalShardingPlan) and plan.groups > 1
        if isinstance(plan, HierarchicalShardingPlan):
            world = dist.get_world_size(group)
            if plan.world_size != world:
                raise ValueError(f"plan is for {plan.world_size} ranks, the process group has {world}")
            assert group is not None
            check_ranks_per_host(plan.ranks_per_host, group)
            # TorchRec writes this rank's group into the plan.
            tables, plan = plan.plan, copy.copy(plan)
            plan.plan = copy.deepcopy(tables)
        if not self._grouped:
            dense = env or ShardingEnv.from_process_group(dist.group.WORLD)
            wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
            DistributedModelParallel.__init__(
                *(self, module, _group_of_tables(dense), device, plan, sharders, init_data_parallel, init_parameters),
                *(_DenseGroup(wrapper, dense), model_tracker_configs),
            )
            return
        assert isinstance(plan, HierarchicalShardingPlan)
        _check_groups(module, plan, env, model_tracker_configs)
        super().__init__(
            module,
            device,
            plan,
            plan.world_size,
            plan.group_size,
            group,
            node_group_size=plan.node_group_size,
            sharders=sharders,
            init_data_parallel=init_data_parallel,
            init_parameters=init_parameters,
            data_parallel_wrapper=data_parallel_wrapper,
            use_inter_host_allreduce=True,  # consecutive ranks form a group
        )
        if plan.sync == "exact":
            assert group is not None
            self._exchange = self._exact_exchange(plan, group, device, ExchangeRules(wire_dtype, exchange))

    def _exact_exchange(
        self, plan: HierarchicalShardingPlan, group: dist.ProcessGroup, device: torch.device, rules: ExchangeRules
    ) -> GradientExchange:
        modules: list[Any] = []

        def collect() -> None:
            modules.extend(_fused_tables(self.module))
            for module in modules:
                check_tables(module)
                if rules.way == "dense" and not zero_rows_stay(module):
                    raise InputError(
                        "exchange='dense' leaves out rows whose gradient is zero, which "
                        f"{module.optimizer.name} or its weight_decay or max_norm would change: use None, 'all_gather' "
                        "or 'reduce_scatter'"
                    )

        # Ranks hold different tables, and one that refuses its own must not leave the others waiting.
        RankExchange(device).agree(caught(collect), doing="looking at its tables")
        messages = ReplicaMessages(_replicas(plan, group), device)
        found = GradientExchange(modules, messages, rules, average=get_gradient_division())
        for child in self.module.modules():
            if hasattr(child, "_lookups"):
                child.register_state_dict_pre_hook(lambda *_: self.finish())
        return found

    def _shard_modules_impl(self, module: nn.Module, path: str = "", module_id_cache: Any = None) -> nn.Module:
        kind = DMPCollection if self._grouped else DistributedModelParallel
        sharded: nn.Module = kind._shard_modules_impl(self, module, path, module_id_cache)
        return sharded

    def _init_optim(self, module: nn.Module) -> CombinedOptimizer:
        return _OptimizerOfUpdatedTables(self._fused_optim_impl(module, [], module_id_cache={}), self.finish)

    def finish(self) -> None:
        """Carries out the updates whose gradients have come; there is nothing to do for most calls."""
        if self._exchange is not None:
            self._exchange.finish()

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Averages weights with sync "average", every `sync_interval` calls; else there is nothing to average.

        TorchRec's pipelines call it after each step, so with sync "exact" it must not wait for the exchange.
        """
        self._syncs += 1
        if self._grouped and self._exchange is None and self._syncs % self._sync_interval == 0:
            super().sync(include_optimizer_state)

    def train(self, mode: bool = True) -> HierarchicalModelParallel:
        """As any module's; evaluation begins with all updates carried out."""
        if not mode:
            self.finish()
        super().train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As DistributedModelParallel's, with all updates carried out."""
        self.finish()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As DistributedModelParallel's; updates that were under way are carried out before."""
        self.finish()
        return super().load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As DistributedModelParallel's, with all updates carried out."""
        self.finish()
        return super().named_parameters(*args, **kwargs)


class _OptimizerOfUpdatedTables(CombinedOptimizer):
    """The tables' optimizer, whose state is read with all updates carried out."""

    def __init__(self, optimizers: list[Any], finish: Callable[[], None]) -> None:
        super().__init__(optimizers)
        self._finish = finish

    @property
    def state(self) -> Mapping[Any, Any]:
        """As CombinedOptimizer's; state_dict and load_state_dict begin with it."""
        self._finish()
        found: Mapping[Any, Any] = super().state
        return found


class _DenseGroup(DataParallelWrapper):
    """Wraps the dense part on another group than the tables'."""

    def __init__(self, wrapper: DataParallelWrapper, env: ShardingEnv) -> None:
        self._wrapper, self._env = wrapper, env

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        self._wrapper.wrap(dmp, self._env, device)


def _group_of_tables(env: ShardingEnv) -> ShardingEnv:
    """The ranks of `env` once more, so that tables and dense part can be reduced from two threads, as groups can."""
    group = env.process_group
    if group is None or group.size() == 1:
        return env
    return ShardingEnv.from_process_group(group_of_same_ranks(group, "tables"))


def _check_groups(
    module: nn.Module, plan: HierarchicalShardingPlan, env: ShardingEnv | None, model_tracker_configs: Any
) -> None:
    if model_tracker_configs is not None:
        raise ValueError("model_tracker_configs needs one group: DMPCollection tracks no ids")
    if env is not None and env.process_group is not dist.group.WORLD:
        raise ValueError("env must be of all ranks (dist.group.WORLD) where the plan has several groups")
    for name, child in module.named_modules():
        if isinstance(child, BaseManagedCollisionEmbeddingCollection) and plan.sync == "exact":
            raise ValueError(
                f"module {name!r}: groups give one id different rows of managed collision; plan with one group, or "
                "with sync='average'"
            )


def _fused_tables(module: nn.Module) -> list[Any]:
    """fbgemm's modules of all tables but data-parallel ones, which DistributedDataParallel keeps equal."""
    found = []
    lookups = [each for child in module.modules() for each in getattr(child, "_lookups", ())]
    for lookup in lookups:
        if isinstance(lookup, DistributedDataParallel):
            continue
        for kernel in lookup.modules():
            if not isinstance(kernel, BaseEmbedding):
                continue
            tables = getattr(kernel, "_emb_module", None)
            if not isinstance(tables, SplitTableBatchedEmbeddingBagsCodegen):
                names = ", ".join(table.name for table in kernel.config.embedding_tables)
                raise InputError(
                    f"tables {names}: {type(kernel).__name__} is not updated in the backward pass; with sync='exact' "
                    "the compute kernel must be 'fused' (or sharding data_parallel)"
                )
            found.append(tables)
    return found


def _replicas(plan: HierarchicalShardingPlan, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of its own for the ranks that hold what this rank holds: one collective of all ranks."""
    columns = [list(range(place, plan.world_size, plan.group_size)) for place in range(plan.group_size)]
    mine, _ = dist.new_subgroups_by_enumeration(columns, timeout=timeout_of(group))
    assert mine is not None
    return mine
