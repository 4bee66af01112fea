"""What the tests of planning run on several ranks; see tests/npu/ranks.py."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner.types import Topology

from tests.npu.ranks import forget_groups
from tests.sharding.planned import SHARDERS, Tables, planner, shardings
from turbogr_plugin.backend.collectives import check_ranks_per_host
from turbogr_plugin.errors import InputError
from turbogr_plugin.sharding import (
    HierarchicalModelParallel,
    HierarchicalShardingPlan,
    cpu_topology,
    link_measurement,
    npu_topology,
)
from turbogr_plugin.sharding.groups_config import GroupsConfig
from turbogr_plugin.sharding.link_measurement import measure_links
from turbogr_plugin.training import table_groups
from turbogr_plugin.training.config import DataConfig, RunConfig

_CPU = torch.device("cpu")


def _topology(ranks: int, memory_bytes: int = 1 << 30) -> Any:
    return cpu_topology(ranks_per_node=2, nodes=ranks // 2, memory_bytes=memory_bytes, intra=1e9, inter=1e7)


def collective_plan() -> Any:
    """What the plan of four ranks holds on each of them."""
    plan = planner(_topology(4), group_size=2).collective_plan(Tables({"s": (100, 8)}), SHARDERS, dist.group.WORLD)
    assert plan.report is not None
    sharding = shardings(plan)["s"]
    return [plan.group_size, plan.world_size, plan.sync, sharding.sharding_type, sharding.ranks, str(plan)]


def refusals() -> list[str]:
    """Messages on this rank: nothing fits, tables that are wrong, a topology of another size."""
    messages = []
    module = Tables({"s": (100_000, 64)})
    for make in (
        lambda: planner(_topology(4, 1 << 20)).collective_plan(module, SHARDERS),
        lambda: planner(_topology(4), optimizer="MAGIC").collective_plan(module, SHARDERS),
        lambda: planner(_topology(8)).collective_plan(module, SHARDERS),
    ):
        try:
            make()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def hosts_with_fewer_ranks(path: str) -> list[str]:
    """Messages on this rank where the launcher tells of hosts other than the topology's."""
    one_host = cpu_topology(ranks_per_node=4, nodes=1, memory_bytes=1 << 30, intra=1e9, inter=1e7)
    uneven = Topology(4, "cpu", local_world_size=3)  # the last host has one
    messages = []
    for topology, hosts in (
        (one_host, [2, 2, 2, 2]),
        (one_host, [4, 4, 3, 3]),
        (_topology(4), [2, 2, 1, 1]),
        (_topology(4), [4, 4, 4, 4]),
        (uneven, [3, 3, 3, 1]),
        (uneven, [2, 2, 2, 2]),
    ):
        size = 1 if topology is uneven else 2
        for number, make in enumerate((planner(topology, group_size=size).collective_plan, _from_file(path, topology))):
            before = os.environ["LOCAL_WORLD_SIZE"]
            os.environ["LOCAL_WORLD_SIZE"] = str(hosts[dist.get_rank()])
            try:
                make(Tables({"s": (100, 8)}), SHARDERS, dist.group.WORLD)
                messages.append(f"{number} is made")
            except ValueError as error:
                messages.append(f"{number}: {error}")
            finally:
                os.environ["LOCAL_WORLD_SIZE"] = before
    for planned in ([2, 2, 2, 4], [2, None, 2, 2]):
        try:
            check_ranks_per_host(planned[dist.get_rank()], cast("Any", dist.group.WORLD))
            messages.append("made")
        except ValueError as error:
            messages.append(f"{error}")
    forget_groups()
    return messages


def links_of_some_ranks(path: str) -> str:
    """What `turbogr train` says where only the first ranks find the file of the links."""
    config = RunConfig(
        output="run",
        data=DataConfig(store="store"),
        groups=GroupsConfig(size="auto", topology=path if dist.get_rank() < 2 else f"{path}.none"),
    )
    unused: Any = None
    try:
        with patch.object(table_groups, "item_statistics", return_value=None):
            table_groups.plan_groups(config, unused, unused, [], cast("Any", dist.group.WORLD), _CPU)
    except InputError as error:
        return str(error)
    return "planned"


def _from_file(path: str, topology: Any) -> Any:
    """Makes the model of a saved plan."""

    def make(module: Any, sharders: Any, group: Any) -> Any:
        file = f"{path}/{topology.local_world_size}-{dist.get_rank()}.json"
        size = 1 if topology.local_world_size == 3 else 2
        planner(topology, group_size=size).plan(module, sharders).save(file)
        plan = HierarchicalShardingPlan.load(file)
        return HierarchicalModelParallel(module, device=_CPU, plan=plan, sharders=sharders)

    return make


def stock_models() -> list[str]:
    """What TorchRec's models say on this rank to plans with groups, and to one without."""
    messages = []

    def tried(make: Any) -> None:
        try:
            made = make()
            messages.append(f"{type(made).__name__} is made")
        except ValueError as error:
            messages.append(str(error))

    def plan(**arguments: Any) -> Any:
        return planner(_topology(4), **arguments).plan(Tables({"s": (100, 8)}), SHARDERS)

    def collection(sharding_group_size: int, **arguments: Any) -> Any:
        return DMPCollection(
            Tables({"s": (100, 8)}),
            device=_CPU,
            plan=plan(**arguments),
            world_size=4,
            sharding_group_size=sharding_group_size,
            global_pg=dist.group.WORLD,
            sharders=SHARDERS,
        )

    tried(lambda: DistributedModelParallel(Tables({"s": (100, 8)}), device=_CPU, plan=plan(group_size=2)))
    tried(lambda: DistributedModelParallel(Tables({"s": (100, 8)}), device=_CPU, plan=plan(group_size=4)))
    tried(lambda: collection(2, group_size=2))
    tried(lambda: collection(4, group_size=2, sync="average"))
    tried(lambda: collection(2, group_size=2, sync="average"))
    forget_groups()
    return messages


def carried_out(device_type: str) -> list[str]:
    """Trains a step of a planned model of sequences and bags; the sharding types of its tables."""
    device = _CPU
    if device_type == "npu":
        torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
    figures: dict[str, Any] = {"memory_bytes": 1 << 30}
    topology = (
        npu_topology("atlas-800t-a2", nodes=2, devices_per_node=2, **figures) if device_type == "npu" else _topology(4)
    )
    sequences, bags = {"s0": (100, 8), "s1": (5_000, 8)}, {"b0": (50, 8), "b1": (4_000, 8)}
    plan = planner(topology, group_size=4).collective_plan(Tables(sequences, bags), SHARDERS, dist.group.WORLD)
    model = DistributedModelParallel(Tables(sequences, bags), device=device, plan=plan, sharders=SHARDERS)

    def features(names: list[str]) -> KeyedJaggedTensor:
        lengths = torch.arange(3 * len(names)) % 3
        values = torch.arange(int(lengths.sum())) * 7 % 50
        return KeyedJaggedTensor(keys=[f"f_{name}" for name in names], values=values, lengths=lengths).to(device)

    of_sequences = model.module.sequences(features(list(sequences)))
    of_bags = model.module.bags(features(list(bags)))
    loss = sum(jagged.values().square().sum() for jagged in of_sequences.values()) + of_bags.values().square().sum()
    loss.backward()
    assert torch.isfinite(loss).item()
    types = sorted(sharding.sharding_type for sharding in shardings(plan).values())
    forget_groups()
    return types


#: [rank][repeat] seconds; the first repeat is not counted.
CLOCK = [[9.0, *((7 * turn * (rank + 3)) % 11 + 1.0 for turn in range(9))] for rank in range(4)]


def clocked() -> tuple[float, float, float]:
    """Seconds and spread of an action that takes as long as CLOCK says, and the least of a figure over ranks."""
    now, turns = [0.0], iter(CLOCK[dist.get_rank()])

    def act() -> None:
        now[0] += next(turns)

    kept, link_measurement.time = link_measurement.time, SimpleNamespace(perf_counter=lambda: now[0])
    try:
        seconds, spread = link_measurement._repeat(act, _CPU, 9)
    finally:
        link_measurement.time = kept
    return seconds, spread, link_measurement._agreed(10.0 + dist.get_rank(), _CPU)


def measured_alone() -> list[list[Any]]:
    """What is timed between four hosts of one rank."""
    found = measure_links(_CPU, ranks_per_node=1, megabytes=0.2, repeats=1, memory_bytes=1 << 30)
    return [[timing.level, timing.traffic, timing.ranks, timing.bytes_sent] for timing in found.timings]


def measured(path: str) -> Any:
    """The links of four ranks as two hosts; rank 0 writes them."""
    found = measure_links(_CPU, ranks_per_node=2, megabytes=0.2, repeats=2, memory_bytes=1 << 30)
    if dist.get_rank() == 0:
        found.save(Path(path))
    return [[timing.level, timing.traffic, timing.ranks, timing.bytes_sent] for timing in found.timings], found.lines()
