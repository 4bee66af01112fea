"""The search against every assignment there is, and what it does with hot tables and full ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

from tests.sharding.planned import SHARDERS, Tables, planner, shardings
from turbogr_plugin.sharding import AccessHistogram, BatchStatistics, npu_topology
from turbogr_plugin.sharding.hierarchical_cost import CostSettings, GroupShape, Load
from turbogr_plugin.sharding.option_search import search
from turbogr_plugin.sharding.step_prediction import Speeds
from turbogr_plugin.sharding.table_options import list_tables, table_options
from turbogr_plugin.sharding.topologies import group_topology


def _listed(lengths: dict[str, float], ranks: int, types: list[str]) -> Any:
    """Options of small tables with mean lengths by table, only some sharding types, and the speeds."""
    topology = npu_topology("atlas-800t-a2", nodes=1, devices_per_node=ranks)
    group = group_topology(topology, ranks)
    statistics = BatchStatistics(lengths={f"f_{name}": length for name, length in lengths.items()})
    tables = list_tables(
        Tables(dict.fromkeys(lengths, (512, 16))),
        SHARDERS,
        topology,
        batch_size=64,
        constraints=None,
        statistics=statistics,
        optimizer=None,
    )
    options = [
        [option for option in table_options(table, topology, group, CostSettings(), None) if option.type in types]
        for table in tables
    ]
    shape = GroupShape.of(topology, ranks)
    return options, Speeds.of(topology, shape, dense_seconds=0.0, dense_bytes=0.0, overlap=0.0)


@pytest.mark.parametrize("seed", range(6))
def test_tables_on_whole_ranks_are_within_a_tenth_of_the_best_assignment(seed: int) -> None:
    ranks, count = 3, 7
    lengths = {f"t{i}": float(value) for i, value in enumerate(np.random.default_rng(seed).uniform(1, 60, count))}
    options, speeds = _listed(lengths, ranks, ["table_wise"])
    best = np.inf
    for places in itertools.product(range(ranks), repeat=count):
        loads = np.zeros((ranks, len(Load)))
        for (option,), rank in zip(options, places, strict=True):
            loads[rank] += option.loads[0]
        best = min(best, speeds.predict(loads, kinds=1).step)
    found = search(options, np.full(ranks, 1e12), speeds)
    assert found.prediction is not None
    assert best * (1 - 1e-9) <= found.prediction.step <= 1.1 * best


def test_the_sum_of_the_shards_is_what_is_reported() -> None:
    options, speeds = _listed({f"t{i}": 5.0 + i for i in range(9)}, 4, ["table_wise", "row_wise", "data_parallel"])
    found = search(options, np.full(4, 1e12), speeds)
    assert found.assignment is not None
    loads = np.zeros((4, len(Load)))
    for option, ranks in zip(found.assignment.chosen, found.assignment.ranks, strict=True):
        for shard, rank in enumerate(ranks):
            loads[slice(None) if rank < 0 else rank] += option.loads[shard]
    assert found.assignment.loads == pytest.approx(loads)
    assert found.prediction == speeds.predict(loads, kinds=found.assignment.kinds)


def test_hot_tables_end_up_on_different_ranks() -> None:
    lengths = {f"hot{i}": 200.0 for i in range(4)} | {f"cold{i}": 1.0 for i in range(20)}
    options, speeds = _listed(lengths, 4, ["table_wise"])
    found = search(options, np.full(4, 1e12), speeds)
    assert found.assignment is not None
    hot = [int(ranks[0]) for option, ranks in zip(found.assignment.chosen, found.assignment.ranks, strict=True)
           if option.load.name.startswith("hot")]  # fmt: skip
    assert sorted(hot) == [0, 1, 2, 3]


def test_no_rank_gets_more_than_it_has_room_for() -> None:
    options, speeds = _listed({f"t{i}": 5.0 for i in range(6)}, 3, ["table_wise"])
    size = float(options[0][0].loads[0, Load.MEMORY])
    found = search(options, np.array([size * 1.01, size * 4.01, size * 1.01]), speeds)
    assert found.assignment is not None
    assert np.bincount(np.concatenate(found.assignment.ranks)).tolist() == [1, 4, 1]
    refused = search(options, np.full(3, size * 1.5), speeds)
    assert refused.assignment is None
    assert refused.missing is not None
    assert refused.missing.tolist() == pytest.approx([0.5 * size] * 3)


def test_tables_whose_heads_are_hot_leave_row_wise_sharding_where_whole_ranks_are_faster() -> None:
    """Eight tables sorted by popularity: row-wise, rank 0 would answer nearly all lookups of all of them."""
    names = [f"t{i}" for i in range(8)]
    counts = np.concatenate([np.full(40, 1e6), np.ones(399_960)])
    module = Tables(dict.fromkeys(names, (400_000, 64)))
    lengths = {f"f_{name}": 100.0 for name in names}
    skewed = BatchStatistics(lengths=lengths, access=dict.fromkeys(names, AccessHistogram.from_counts(counts)))
    topology = npu_topology("atlas-800t-a2", nodes=1)
    hot = planner(topology, group_size=8, batch_statistics=skewed).plan(module, SHARDERS)
    assert {sharding.sharding_type for sharding in shardings(hot).values()} == {"table_wise"}
    assert sorted(rank for sharding in shardings(hot).values() for rank in sharding.ranks) == list(range(8))


@pytest.mark.parametrize("rows", [1, 5, 7, 8, 9])
def test_no_table_is_cut_into_shards_without_rows_where_it_may_be_sharded_otherwise(rows: int) -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1)
    plan = planner(topology).plan(Tables({"few": (rows, 16), "many": (100_000, 16)}), SHARDERS)
    spec = shardings(plan)["few"].sharding_spec
    assert spec is None or all(shard.shard_sizes[0] > 0 for shard in spec.shards)
    only = {"few": ParameterConstraints(sharding_types=["row_wise"])}
    forced = planner(topology, group_size=8, constraints=only).plan(Tables({"few": (rows, 16)}), SHARDERS)
    assert [shard.shard_sizes[0] for shard in shardings(forced)["few"].sharding_spec.shards] == [
        max(0, min(-(-rows // 8), rows - first * -(-rows // 8))) for first in range(8)
    ]


def test_a_hot_head_is_cut_into_ranges_that_answer_about_equally_many_lookups() -> None:
    """One table sorted by popularity, row-wise: an even cut gives rank 0 of 8 nearly all lookups."""
    counts = np.random.default_rng(0).zipf(1.3, 100_000).clip(max=2_000)
    counts = np.sort(counts)[::-1]
    statistics = BatchStatistics(lengths={"f_t": 200.0}, access={"t": AccessHistogram.from_counts(counts)})
    wanted = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    topology = npu_topology("atlas-800t-a2", nodes=1)
    plan = planner(topology, group_size=8, batch_statistics=statistics, constraints=wanted).plan(
        Tables({"t": (100_000, 64)}), SHARDERS
    )
    shards = shardings(plan)["t"].sharding_spec.shards
    starts = [shard.shard_offsets[0] for shard in shards]
    uneven = np.add.reduceat(counts, starts).max() / counts.sum()
    even = counts[:12_500].sum() / counts.sum()
    assert even > 0.6
    assert uneven < 0.26  # at most twice the mean, while no rank has more than four times the mean rows
    assert max(shard.shard_sizes[0] for shard in shards) <= 4 * 12_500
    assert sum(shard.shard_sizes[0] for shard in shards) == 100_000


@pytest.mark.parametrize("rows", [3, 8, 9, 1000, 1024, 1025])
def test_row_wise_tables_are_cut_as_torchrec_cuts_them(rows: int) -> None:
    topology = npu_topology("atlas-800t-a2", nodes=1)
    (table,) = list_tables(
        Tables({"t": (rows, 16)}),
        SHARDERS,
        topology,
        batch_size=1,
        constraints={"t": ParameterConstraints(sharding_types=["row_wise"])},
        statistics=BatchStatistics(),
        optimizer=None,
    )
    for size in (8, 4, 2, 1):
        group = group_topology(topology, size)
        (found,) = [o for o in table_options(table, topology, group, CostSettings(), None) if o.type == "row_wise"]
        sizes, offsets = calculate_shard_sizes_and_offsets(table.options[0].tensor, size, size, "row_wise")
        assert (found.sizes.tolist(), found.offsets.tolist()) == (sizes, offsets)
