"""DMPCollection (tables sharded in groups of ranks, replicated over the groups) on NPUs and on CPU.

TorchRec asserts CUDA or MTIA and needs neither: the device goes into the mesh and into placements. The assertion stands
at the head of a constructor of 130 lines, so it is answered instead of copied: the constructor runs with the constant
"mtia" replaced by the device's type. Its fingerprint holds that this constant occurs there and nowhere else.

Left out, and refused on both: ShardingStrategy.FULLY_SHARDED and sharded relays, which call torch.cuda by name.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.types import ShardingStrategy

from turbogr_plugin.backend.adaptation import Adaptation

_CLASS = "torchrec.distributed.model_parallel:DMPCollection"

_ADDED = ("cpu", "npu")


def _for_device(constructor: Any, device_type: str) -> Callable[..., None]:
    """`constructor` with its constant "mtia" replaced."""
    code: types.CodeType = constructor.__code__
    constants = tuple(device_type if constant == "mtia" else constant for constant in code.co_consts)
    changed = types.FunctionType(
        code.replace(co_consts=constants),
        constructor.__globals__,
        constructor.__name__,
        constructor.__defaults__,
        constructor.__closure__,
    )
    changed.__kwdefaults__ = constructor.__kwdefaults__
    return changed


def _on_cpu_and_npu(original: Callable[..., None]) -> Callable[..., None]:
    constructors = {device_type: _for_device(original, device_type) for device_type in _ADDED}

    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, module: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        if device.type in _ADDED:
            _check(signature.bind(self, module, device, *args, **kwargs).arguments)
        constructors.get(device.type, original)(self, module, device, *args, **kwargs)

    return init


def _check(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for what cannot be on CPU or NPUs, and for plans that do not fit the groups."""
    device_type, world_size = arguments["device"].type, arguments["world_size"]
    if arguments.get("use_sharded_relay"):
        raise ValueError(f"use_sharded_relay needs CUDA, the device is {device_type}")
    # The arguments and each of submodule_configs have these three under the same names.
    groupings = [types.SimpleNamespace(**arguments), *(arguments.get("submodule_configs") or [])]
    for grouping in groupings:
        size = grouping.sharding_group_size
        if size < 1 or world_size % size:
            raise ValueError(f"sharding_group_size {size} does not divide world_size {world_size}")
        strategy = getattr(grouping, "sharding_strategy", ShardingStrategy.DEFAULT)
        if strategy == ShardingStrategy.FULLY_SHARDED:
            raise ValueError(f"sharding_strategy FULLY_SHARDED needs CUDA, the device is {device_type}: use DEFAULT")
        for tables in grouping.plan.plan.values():
            for table, sharding in tables.items():
                if max(sharding.ranks or [0]) >= size:
                    raise ValueError(
                        f"table {table!r}: the plan names rank {max(sharding.ranks)}, a group has {size}: plan with "
                        f"Topology(world_size={size}), and anew for each DMPCollection, which changes its plan"
                    )


def _without_index_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _remap_sharding_plan(self: Any, plan: Any, *args: Any, **kwargs: Any) -> None:
        original(self, plan, *args, **kwargs)
        if self._device.type == "cpu":
            for tables in plan.plan.values():
                for sharding in tables.values():
                    for shard in getattr(sharding.sharding_spec, "shards", None) or []:
                        shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    return _remap_sharding_plan


def _any_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _cache_sync_tensors(self: Any, contexts: list[Any]) -> None:
        every = [context.modules_to_sync for context in contexts]
        others = [[kernel for kernel, _ in modules if _keeps_other_state(kernel)] for modules in every]
        for context, modules, apart in zip(contexts, every, others, strict=True):
            context.modules_to_sync = [entry for entry in modules if not any(entry[0] is kernel for kernel in apart)]
        try:
            original(self, contexts)
        finally:
            for context, modules in zip(contexts, every, strict=True):
                context.modules_to_sync = modules
        for context, kernels in zip(contexts, others, strict=True):
            weights = defaultdict(list, context.weights_by_dtype)
            states = defaultdict(list, context.optimizer_tensors_by_dtype)
            for kernel in kernels:
                for weight in kernel.split_embedding_weights():
                    weights[weight.dtype].append(weight)
                for state in kernel.get_optimizer_state():
                    for tensor in state.values():
                        states[tensor.dtype].append(tensor)
            context.weights_by_dtype = dict(weights)
            context.optimizer_tensors_by_dtype = dict(states)

    return _cache_sync_tensors


def _keeps_other_state(kernel: Any) -> bool:
    """Whether a table kernel's optimizer keeps no "sum", which is all that TorchRec looks for: Adam, LAMB."""
    if not isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
        return False
    return any("sum" not in state for state in kernel.get_optimizer_state())


ADAPTATIONS = (
    Adaptation(
        target=f"{_CLASS}.__init__",
        replace=_on_cpu_and_npu,
        why="DMPCollection refuses NPUs and CPUs: 'only supports CUDA or MTIA'",
        upstream="torchrec 1.8.0, distributed/model_parallel.py:1141",
        delete_when="TorchRec drops the assertion",
        written_for={f"{_CLASS}.__init__": "f61f51e448257c91"},
    ),
    Adaptation(
        target=f"{_CLASS}._remap_sharding_plan",
        replace=_without_index_on_cpu,
        why="shards on CPU are placed at cpu:0, which torch's check finds different from cpu",
        upstream="torchrec 1.8.0, distributed/model_parallel.py:1747",
        delete_when="TorchRec gives no index to a CPU",
        written_for={f"{_CLASS}._remap_sharding_plan": "358e881d1f662e5e"},
    ),
    Adaptation(
        target=f"{_CLASS}._cache_sync_tensors",
        replace=_any_optimizer,
        why="tables under Adam or LAMB raise KeyError('sum'): their moments are not averaged over the replicas",
        upstream="torchrec 1.8.0, distributed/model_parallel.py:1839",
        delete_when="TorchRec collects every state of an optimizer",
        written_for={f"{_CLASS}._cache_sync_tensors": "85b03f99ad0d8720"},
    ),
)
