"""A sharding plan for groups of ranks: TorchRec's ShardingPlan of one group, with what makes it one of several.

    plan.save("plan.json")
    plan = HierarchicalShardingPlan.load("plan.json")
    model = HierarchicalModelParallel(module, plan=plan, ...)

The ranks in the plan are those of the first group, 0 to group_size - 1; group g has them at g * group_size. The file is
JSON: another number of ranks, another model or a plan for another device is refused by the model's own checks, while
what the file itself gets wrong is refused here.

Left out: tables in host memory behind a cache, whose parameters have no stable form; saving such a plan is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import DataType

from turbogr_plugin.sharding.hierarchical_cost import Sync
from turbogr_plugin.sharding.plan_report import PlanReport

_FILE_KIND = "turbogr plan 1"
_SYNCS = ("exact", "average")


@dataclass
class HierarchicalShardingPlan(ShardingPlan):
    """TorchRec's plan of one group, and how many ranks share it."""

    group_size: int = 1
    """Ranks that hold every table once; consecutive ranks form a group."""
    world_size: int = 1
    """All ranks; `world_size // group_size` groups hold replicas."""
    sync: Sync = "exact"
    """"exact": gradients are summed over the groups before the update. "average": weights are averaged after it."""
    node_group_size: int | None = None
    """Ranks of a group on one host, where tables are sharded by host (table-row-wise, grid); else None."""
    ranks_per_host: int | None = None
    """Of the topology that it was made for: hosts with fewer are refused; None: not checked."""
    report: PlanReport | None = field(default=None, compare=False)
    """How the planner came to it; None for a plan from a file without one."""

    def __post_init__(self) -> None:
        for name in ("group_size", "world_size"):
            value = getattr(self, name)
            if not _whole(value):
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if self.world_size % self.group_size:
            raise ValueError(f"group_size must divide world_size {self.world_size}, got {self.group_size}")
        node = self.node_group_size
        if node is not None and not (_whole(node) and self.group_size % node == 0):
            raise ValueError(f"node_group_size must divide group_size {self.group_size}, got {self.node_group_size!r}")
        if self.ranks_per_host is not None and not _whole(self.ranks_per_host):
            raise ValueError(f"ranks_per_host must be a whole number >= 1, got {self.ranks_per_host!r}")
        if self.sync not in _SYNCS:
            raise ValueError(f"sync must be one of {', '.join(_SYNCS)}, got {self.sync!r}")

    @property
    def groups(self) -> int:
        """How many groups hold a replica of every table."""
        return self.world_size // self.group_size

    def __str__(self) -> str:
        head = (
            f"{self.world_size} ranks in {self.groups} group(s) of {self.group_size}, "
            f"{'one replica of each table' if self.groups == 1 else f'sync {self.sync}'}"
        )
        report = "" if self.report is None else f"\n\n{self.report}"
        return f"{head}\n\n{ShardingPlan.__str__(self)}{report}"

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Raises:
            ValueError: a table with cache or key-value parameters.
        """
        tables = {
            module: {table: _as_json(table, sharding) for table, sharding in shardings.items()}
            for module, shardings in cast("Mapping[str, EmbeddingModuleShardingPlan]", self.plan).items()
        }
        values = {
            "kind": _FILE_KIND,
            "world_size": self.world_size,
            "group_size": self.group_size,
            "sync": self.sync,
            "node_group_size": self.node_group_size,
            "ranks_per_host": self.ranks_per_host,
            "modules": tables,
            "report": None if self.report is None else self.report.as_json(),
        }
        Path(path).write_text(json.dumps(values, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> HierarchicalShardingPlan:
        """Reads what `save` has written.

        Raises:
            ValueError: not such a file, or one that contradicts itself; the message names the file and the place.
        """
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such file")
        try:
            values = json.loads(Path(path).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if not isinstance(values, dict) or values.get("kind") != _FILE_KIND:
            raise ValueError(f"{path}: kind must be {_FILE_KIND!r}: not a saved plan")
        try:
            modules = {
                module: EmbeddingModuleShardingPlan(
                    {table: _from_json(sharding, values["group_size"]) for table, sharding in tables.items()}
                )
                for module, tables in values["modules"].items()
            }
            report = values.get("report")
            return cls(
                plan=cast("Any", modules),
                group_size=values["group_size"],
                world_size=values["world_size"],
                sync=values["sync"],
                node_group_size=values["node_group_size"],
                ranks_per_host=values.get("ranks_per_host"),
                report=None if report is None else PlanReport.from_json(report),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: a field is missing or of the wrong kind: {error!r}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _as_json(table: str, sharding: ParameterSharding) -> dict[str, Any]:
    for name in ("cache_params", "key_value_params"):
        if getattr(sharding, name) is not None:
            raise ValueError(f"table {table!r} has {name}, which a plan file cannot hold")
    shards = getattr(sharding.sharding_spec, "shards", None)
    return {
        "sharding_type": sharding.sharding_type,
        "compute_kernel": sharding.compute_kernel,
        "ranks": sharding.ranks,
        "shards": None
        if shards is None
        else [[*shard.shard_sizes, *shard.shard_offsets, str(shard.placement)] for shard in shards],
        "enforce_hbm": sharding.enforce_hbm,
        "stochastic_rounding": sharding.stochastic_rounding,
        "bounds_check_mode": None if sharding.bounds_check_mode is None else sharding.bounds_check_mode.name,
        "output_dtype": None if sharding.output_dtype is None else sharding.output_dtype.name,
    }


def _check_shards(shards: list[list[Any]], placements: list[int], ranks: Any) -> None:
    """Shards fill one rectangle and lie where the table's `ranks` say, both of which TorchRec takes for granted."""
    # Plans made by hand may name a rank once that holds several shards.
    same = ranks == placements if len(ranks or ()) == len(placements) else set(ranks or ()) == set(placements)
    if not same:
        raise ValueError(f"ranks must be those of the shards, {placements}, got {ranks}")
    rows, columns = (max(shard[at] + shard[2 + at] for shard in shards) for at in (0, 1))
    if sum(shard[0] * shard[1] for shard in shards) != rows * columns:
        raise ValueError(f"shards must fill a table of {rows} rows and {columns} columns, got {shards}")


def _from_json(values: dict[str, Any], group_size: int) -> ParameterSharding:
    kinds = [kind.value for kind in ShardingType]
    if values["sharding_type"] not in kinds:
        raise ValueError(f"sharding_type must be one of {', '.join(kinds)}, got {values['sharding_type']!r}")
    shards = values["shards"]
    metadata = None
    if shards is not None:
        metadata = [ShardMetadata(shard_sizes=s[:2], shard_offsets=s[2:4], placement=s[4]) for s in shards]
        for shard in metadata:
            rank = shard.placement.rank() if shard.placement is not None else None
            if rank is None or not 0 <= rank < group_size:
                raise ValueError(f"a shard lies at {shard.placement}, a group has ranks 0 to {group_size - 1}")
        _check_shards(shards, [shard.placement.rank() for shard in metadata], values["ranks"])
    bounds, dtype = values["bounds_check_mode"], values["output_dtype"]
    return ParameterSharding(
        sharding_type=values["sharding_type"],
        compute_kernel=values["compute_kernel"],
        ranks=values["ranks"],
        sharding_spec=None if metadata is None else EnumerableShardingSpec(metadata),
        enforce_hbm=values["enforce_hbm"],
        stochastic_rounding=values["stochastic_rounding"],
        bounds_check_mode=None if bounds is None else BoundsCheckMode[bounds],
        output_dtype=None if dtype is None else DataType[dtype],
    )
