"""Which collectives the sparse side of a model uses, and whether a thread of its own may issue them.

Collectives of one process group meet in the order in which each rank issues them. Two threads that issue them on one
group have no order. So the sparse lane is a thread only if the dense part (DistributedDataParallel, the caller's own
collectives on the default group) uses other groups than the tables.

Left out: groups that a model uses by itself inside of its forward pass, which nobody can see from here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingEnv2D

from turbogr_plugin.backend.collectives import timeout_of
from turbogr_plugin.pipeline.step_agreement import StepAgreement
from turbogr_plugin.sharding.jagged_lookup import table_modules

logger = logging.getLogger(__name__)

OWN_GROUP = (
    "give the sparse side its own process group: DistributedModelParallel(..., env=ShardingEnv.from_process_group("
    "dist.new_group()), data_parallel_wrapper=<one that wraps on dist.group.WORLD>), or use HierarchicalModelParallel, "
    "which makes its own"
)


def sparse_groups(modules: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """Process groups of sharded modules, data-parallel tables included."""
    found = []
    for module in modules:
        for child in module.modules():
            env = getattr(child, "_env", None)
            # With groups of ranks `process_group` is that of all ranks, which the tables do not use.
            found.append(env.sharding_pg if isinstance(env, ShardingEnv2D) else getattr(env, "process_group", None))
            for lookup in getattr(child, "_lookups", ()):
                found += [each.process_group for each in lookup.modules() if isinstance(each, DistributedDataParallel)]
    return list({group.group_name: group for group in found if group is not None}.values())


def dense_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Process groups of the dense part, the default one included."""
    found = [dist.group.WORLD] if dist.is_available() and dist.is_initialized() else []
    found += [each.process_group for each in model.modules() if isinstance(each, DistributedDataParallel)]
    return list({group.group_name: group for group in found if group is not None}.values())


def why_inline(model: nn.Module, modules: list[nn.Module], not_pipelined: list[str]) -> str | None:
    """Why the sparse side must not have a thread of its own; None: it may."""
    sparse, dense = sparse_groups(modules), dense_groups(model)
    if isinstance(model, DMPCollection) and getattr(model, "_exchange", None) is None:
        # It averages the replicas on their group, which is the default one where a group has one rank.
        sparse += [child._env.replica_pg for child in modules if isinstance(child._env, ShardingEnv2D)]
    if not_pipelined and any(group.size() > 1 for group in (*sparse, *dense)):
        return f"modules {', '.join(not_pipelined)} are looked up inside of the forward pass"
    if {group.group_name for group in sparse if group.size() > 1} & {group.group_name for group in dense}:
        return "the sparse side shares a process group with the dense part"
    return None


def warn_inline(reason: str) -> None:
    """Once per pipeline."""
    logger.warning(
        "TrainPipelineFineGrained runs its sparse stages in the caller's thread, with the same results and less "
        "overlap: %s. To overlap them, %s.",
        reason,
        OWN_GROUP,
    )


def shares_parameters(optimizer: Any, module: nn.Module) -> bool:
    """Whether an optimizer of the dense part updates parameters of a sharded module (data-parallel tables)."""
    own = {id(value) for value in module.parameters() if not getattr(value, "_in_backward_optimizers", None)}
    return any(id(value) in own for group in getattr(optimizer, "param_groups", ()) for value in group["params"])


def cannot_be_stale(optimizer: Any, module: nn.Module) -> bool:
    """Whether a sharded module has values that autograd must find at its backward pass as they were at its lookup.

    Tables with a dense gradient (data-parallel ones, the compute kernel "dense") and parameters beside the tables are
    part of the dense side in this: it is never stale.
    """
    dense = any(isinstance(tables, DenseTableBatchedEmbeddingBagsCodegen) for tables in table_modules(module))
    return dense or shares_parameters(optimizer, module)


def warn_exact(names: Iterable[str]) -> None:
    """For modules that are looked up exactly although stale ones were asked for."""
    logger.warning(
        "TrainPipelineFineGrained looks up modules %s with staleness 0: some of their tables have a dense gradient "
        "(data-parallel sharding, the compute kernel 'dense') or are updated by the dense optimizer. Put those tables "
        "into a collection of their own, and the others can be stale.",
        ", ".join(sorted(names)),
    )


def agreement_of(model: nn.Module, modules: Iterable[nn.Module], inline: bool) -> StepAgreement | None:
    """The agreement of all ranks that train the model, on a group that the sparse lane may use; collective.

    None: there is one rank.
    """
    dense = dense_groups(model)
    if not dense or dense[-1].size() == 1:
        return None
    # The data-parallel group of the dense part is that of all ranks; without a dense part, the default one.
    everyone = dist.get_process_group_ranks(dense[-1])
    candidates = [*sparse_groups(modules), *(dense if inline else [])]
    for group in candidates:
        if dist.get_process_group_ranks(group) == everyone and "cpu" in dist.get_backend_config(group):
            return StepAgreement(group, torch.device("cpu"))
    made = dist.new_group(everyone, timeout=timeout_of(dense[-1]), backend="gloo", use_local_synchronization=True)
    return StepAgreement(made, torch.device("cpu"))


def default_store() -> Any:
    """The store of the default process group; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()


def rank() -> int:
    """Of this process in the world."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
