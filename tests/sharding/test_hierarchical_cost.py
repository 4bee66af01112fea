"""Bytes of the cost model against traffic that is counted one lookup at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.types import ShardingType

from turbogr_plugin.sharding.access_histogram import AccessHistogram
from turbogr_plugin.sharding.hierarchical_cost import (
    CostSettings,
    GroupShape,
    Load,
    TableLoad,
    cheapest_exchange,
    shard_loads,
)

DIM, ROW_WISE = 16, ShardingType.ROW_WISE.value
EXACT = CostSettings()


def _table(counts: Any, lookups: int, *, pooled: bool = False, bags: int = 8, **rest: Any) -> TableLoad:
    return TableLoad(
        name="t",
        rows=len(counts),
        dim=DIM,
        lookups=lookups,
        outputs=bags if pooled else lookups,
        pooled=pooled,
        access=AccessHistogram.from_counts(counts),
        **rest,
    )


def _even(rows: int, ranks: int) -> tuple[Any, Any]:
    block = -(-rows // ranks)
    edges = [min(block * rank, rows) for rank in range(ranks + 1)]
    sizes = np.array([[last - first, DIM] for first, last in itertools.pairwise(edges)])
    return sizes, np.array([[first, 0] for first in edges[:-1]])


def _counted(ids: Any, rows: int, shape: GroupShape) -> dict[str, Any]:
    """Bytes of row-wise sequences, message by message.

    Args:
        ids: [world][lookups].
        rows: of the table.
        shape: groups and domains.

    Returns:
        all-to-all bytes by owner rank (inside, between domains), and bytes of the exchange by all-gather by rank.
    """
    block = -(-rows // shape.group)
    a2a = np.zeros((shape.world, 2))
    held: dict[int, set[int]] = defaultdict(set)
    for rank, own in enumerate(ids):
        first = rank // shape.group * shape.group
        for row in own:
            owner = first + int(row) // block
            held[owner].add(int(row))
            if owner != rank:
                a2a[owner, int(owner // shape.domain != rank // shape.domain)] += 8 + 2 * DIM * 4
    gathered = np.zeros((shape.world, 2))
    for rank in range(shape.world):
        for other in range(rank % shape.group, shape.world, shape.group):
            if other != rank:
                far = int(other // shape.domain != rank // shape.domain)
                gathered[rank, far] += len(held[rank]) * (DIM * 4 + 4)
    return {"a2a": a2a, "gathered": gathered}


@pytest.mark.parametrize(
    "shape",
    [GroupShape(8, 8, 4), GroupShape(8, 4, 4), GroupShape(8, 2, 4), GroupShape(8, 4, 2), GroupShape(8, 1, 4)],
    ids=str,
)
def test_bytes_of_row_wise_sequences_are_those_of_messages_counted_one_by_one(shape: GroupShape) -> None:
    rng = np.random.default_rng(7)
    rows, lookups = 4_000, 3_000
    counts = rng.zipf(1.4, rows).clip(max=500)
    ids = [rng.choice(rows, lookups, p=counts / counts.sum()) for _ in range(shape.world)]
    counted = _counted(ids, rows, shape)
    table = _table(counts, lookups)
    loads, algorithm = shard_loads(table, ROW_WISE, *_even(rows, shape.group), shape, EXACT)
    by_group = counted["a2a"].reshape(shape.groups, shape.group, 2).mean(0)
    assert loads[:, [Load.A2A_INTRA, Load.A2A_INTER]].sum(0) == pytest.approx(by_group.sum(0), rel=0.03)
    if shape.groups == 1:
        assert algorithm == "none"
        assert not loads[:, [Load.EXCHANGE_INTRA, Load.EXCHANGE_INTER]].any()
    elif algorithm == "all_gather":
        gathered = counted["gathered"].reshape(shape.groups, shape.group, 2).mean(0)
        assert loads[:, [Load.EXCHANGE_INTRA, Load.EXCHANGE_INTER]].sum(0) == pytest.approx(
            gathered.sum(0), rel=0.03, abs=1
        )


def test_two_groups_move_u_half_of_the_rows_of_plain_sharding_and_ids_on_top() -> None:
    rows, lookups = 2_000, 8_192
    counts = np.random.default_rng(8).zipf(1.2, rows).clip(max=300)
    table = _table(counts, lookups)
    plain, _ = shard_loads(table, ROW_WISE, *_even(rows, 4), GroupShape(4, 4, 2), EXACT)
    grouped, _ = shard_loads(table, ROW_WISE, *_even(rows, 2), GroupShape(4, 2, 2), EXACT)
    unique_share = table.access.unique(2 * lookups) / (2 * lookups)
    ratio = grouped[:, Load.EXCHANGE_INTER].mean() / plain[:, Load.A2A_INTER].mean()
    assert not grouped[:, Load.A2A_INTER].any()
    assert ratio == pytest.approx(unique_share)


def _ways(groups: int, own: float, union: float, rows: float = 1e6, **settings: Any) -> Any:
    one = [np.array([value]) for value in (own, union, rows, float(DIM), 0.0)]
    return cheapest_exchange(
        groups=groups,
        own_rows=one[0],
        all_rows=one[1],
        rows=one[2],
        columns=one[3],
        state_bytes=one[4],
        settings=CostSettings(**settings),
    )


def test_the_exchange_gathers_for_few_groups_scatters_for_many_and_reduces_what_is_dense() -> None:
    row = DIM * 4 + 4
    assert _ways(1, 100, 100).algorithm == "none"
    two = _ways(2, 100, 190)
    assert (two.algorithm, two.sent.item()) == ("all_gather", 100 * row)
    many = _ways(16, 100, 300)
    assert (many.algorithm, many.sent.item()) == (
        "reduce_scatter",
        pytest.approx(15 * 100 * 4 + 15 / 16 * 400 * DIM * 4),
    )
    dense = _ways(16, 100, 110, rows=110)
    assert (dense.algorithm, dense.sent.item()) == ("dense", pytest.approx(2 * 15 / 16 * 110 * DIM * 4))


def test_a_narrow_wire_halves_rows_and_leaves_ids() -> None:
    assert _ways(2, 100, 190, wire_bytes=2.0).sent.item() == 100 * (DIM * 2 + 4)


def test_averages_move_whole_tables_every_so_many_steps() -> None:
    found = _ways(4, 100, 300, rows=1000, sync="average", sync_interval=10)
    assert (found.algorithm, found.sent.item()) == ("average", pytest.approx(2 * 3 / 4 * 1000 * DIM * 4 / 10))


def test_a_hot_range_of_rows_burdens_the_rank_that_holds_it() -> None:
    counts = np.concatenate([np.full(10, 1_000.0), np.ones(990)])
    loads, _ = shard_loads(_table(counts, 500), ROW_WISE, *_even(1_000, 10), GroupShape(10, 10, 10), EXACT)
    assert loads[0, Load.A2A_INTRA] > 50 * loads[5, Load.A2A_INTRA]
    assert loads[0, Load.LOOKUP] > 20 * loads[5, Load.LOOKUP]


def test_pooled_rows_travel_as_partial_sums_of_every_rank() -> None:
    counts = np.ones(1_000)
    shape = GroupShape(4, 4, 2)
    table = _table(counts, 400, pooled=True, bags=10)
    rows, _ = shard_loads(table, ROW_WISE, *_even(1_000, 4), shape, EXACT)
    ids = 100 * 8  # from each rank, a quarter of its lookups
    sums = 10 * DIM * 2 * 4
    assert rows[:, Load.A2A_INTRA].tolist() == pytest.approx([ids + sums] * 4)
    assert rows[:, Load.A2A_INTER].tolist() == pytest.approx([2 * (ids + sums)] * 4)


def test_sums_reduced_on_a_host_leave_it_once() -> None:
    counts = np.ones(1_000)
    table = _table(counts, 400, pooled=True, bags=10)
    kind = ShardingType.TABLE_ROW_WISE.value
    bags = 10 * DIM * 2 * 4
    for domain, near_hosts, far_hosts in ((2, 0, 3), (4, 1, 2), (8, 3, 0)):
        loads, _ = shard_loads(table, kind, *_even(1_000, 2), GroupShape(8, 8, domain, 2), EXACT)
        ids = 8 * 400 * 0.5 * 8 / 8  # half of every rank's lookups, bytes per peer
        assert loads[:, Load.A2A_INTRA].tolist() == pytest.approx([(domain - 1) * ids + (4 + near_hosts) * bags] * 2)
        assert loads[:, Load.A2A_INTER].tolist() == pytest.approx([(8 - domain) * ids + far_hosts * bags] * 2)


def test_memory_counts_weights_state_ids_and_rows_in_flight() -> None:
    counts = np.ones(1_000)
    table = _table(counts, 300, row_state_bytes=4.0)
    settings = CostSettings(contexts=4, lookups_in_flight=2)
    loads, _ = shard_loads(table, ROW_WISE, *_even(1_000, 2), GroupShape(2, 2, 2), settings)
    arriving = 2 * 300 / 2
    wanted = 500 * DIM * 4 + 500 * 4 + 4 * arriving * 8 + 2 * arriving * DIM * 4
    assert loads[:, Load.MEMORY].tolist() == pytest.approx([wanted, wanted])


def test_peers_inside_a_domain_exchange_over_its_links() -> None:
    assert GroupShape(16, 2, 8).near_peers == pytest.approx(3 / 7)
    assert GroupShape(16, 8, 8).near_peers == 0
    assert GroupShape(8, 2, 8).near_peers == 1
