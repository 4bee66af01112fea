"""A plan that is carried out on an NPU is checked first, by every rank alike and before any collective.

TorchRec finds the same faults late, on some ranks only (the others then wait), or not at all: a table that is to lie in
host memory would be taken into the NPU's without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.streams import device_module
from turbogr_plugin.sharding.adaptations.device_kernels import NPU_KERNELS, refusal

_BAGS = "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection.__init__"
_SEQUENCES = "torchrec.distributed.embedding:ShardedEmbeddingCollection.__init__"


def check_plan(plan: Mapping[str, Any], env: Any, device: torch.device) -> None:
    """Checks the sharding of one module's tables for this rank's NPU.

    Args:
        plan: TorchRec's ParameterSharding by table.
        env: TorchRec's ShardingEnv or ShardingEnv2D.
        device: of this rank; without an index it is the current one.

    Raises:
        ValueError: a kernel that NPUs do not have, shards for another kind of device, a rank that is not in the group,
            shards for another NPU than this rank uses.
    """
    if env.process_group is None:
        return  # inference on one host: its placements are not those of ranks
    world_size = getattr(env, "global_world_size", env.world_size)
    rank = getattr(env, "global_rank", env.rank)
    npus = device_module(device)
    index = npus.current_device() if device.index is None else device.index
    for table, sharding in plan.items():
        if sharding.compute_kernel not in NPU_KERNELS:
            raise refusal(table, [sharding.compute_kernel])
        shards = getattr(sharding.sharding_spec, "shards", None) or []
        for shard in shards:
            where = f"table {table!r}: the plan puts a shard at {shard.placement}"
            if shard.placement.rank() >= world_size:
                raise ValueError(f"{where}, there are {world_size} ranks: plan with Topology(world_size={world_size})")
            placed = shard.placement.device()
            if placed.type != "npu":
                raise ValueError(f"{where}, the module is sharded on npu: plan with Topology(compute_device='npu')")
            if shard.placement.rank() == rank and placed.index != index:
                raise ValueError(
                    f"{where}, rank {rank} uses npu:{index} of the {npus.device_count()} that it sees: give each "
                    f"rank the device of its local rank, and the planner as local_world_size the ranks of one host"
                )


def _check_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, Any],
        env: Any,
        fused_params: Any = None,
        device: torch.device | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if device is not None and device.type == "npu":
            check_plan(table_name_to_parameter_sharding, env, device)
        original(self, module, table_name_to_parameter_sharding, env, fused_params, device, *args, **kwargs)

    return init


_WHY = "plans with kernels, devices or ranks that are not there fail late, on some ranks only, or run as something else"
_UNTIL = "TorchRec checks a plan against the device that it is carried out on"

ADAPTATIONS = (
    Adaptation(
        target=_BAGS,
        replace=_check_first,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/batched_embedding_kernel.py:3741",
        delete_when=_UNTIL,
        written_for={_BAGS: "83207533e5c9d726"},
    ),
    Adaptation(
        target=_SEQUENCES,
        replace=_check_first,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/batched_embedding_kernel.py:2542",
        delete_when=_UNTIL,
        written_for={_SEQUENCES: "f9d7c13bcdcf2b8c"},
    ),
)
