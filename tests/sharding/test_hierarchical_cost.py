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


def _messages(ids: list[set[int]], rows: int, dim: int) -> dict[str, float]:
    """Bytes that the busiest of some replicas sends by each way, one message after the other, 4 bytes an element."""
    replicas, row = len(ids), dim * 4
    union = sorted(set().union(*ids))
    sent = {way: [0] * replicas for way in ("all_gather", "reduce_scatter", "dense")}

    def slices(of: list[int]) -> list[set[int]]:
        cuts = [len(of) * number // replicas for number in range(replicas + 1)]
        return [set(of[first:last]) for first, last in itertools.pairwise(cuts)]

    of_union, of_table = slices(union), slices(list(range(rows)))
    for one, other in itertools.permutations(range(replicas), 2):
        sent["all_gather"][one] += len(ids[one]) * 4 + len(ids[one]) * row
        sent["reduce_scatter"][one] += len(ids[one]) * 4  # before it is known who adds which rows
        sent["reduce_scatter"][one] += len(ids[one] & of_union[other]) * row
        sent["reduce_scatter"][one] += len(of_union[one]) * row  # the sums; their ids are known
        sent["dense"][one] += (len(of_table[other]) + len(of_table[one])) * row
    return {way: max(by_rank) for way, by_rank in sent.items()}


#: Rows of the table, ids of each of 8 replicas, and for 8 and 32 columns the way with the fewest bytes. With ids to
#: everybody left out of reduce-scatter it would win in the third case for 8 columns too.
_EIGHT = (
    (100_000, 1_000, 0.0, {8: "all_gather", 32: "all_gather"}),
    (100_000, 1_000, 0.6, {8: "reduce_scatter", 32: "reduce_scatter"}),
    (3_000, 2_000, 0.0, {8: "dense", 32: "reduce_scatter"}),
    (2_000, 1_900, 0.0, {8: "dense", 32: "dense"}),
)


@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize(("rows", "own", "shared", "cheapest"), _EIGHT)
def test_bytes_of_every_exchange_are_those_of_messages_counted_one_by_one(
    rows: int, own: int, shared: float, cheapest: dict[int, str], dim: int
) -> None:
    rng = np.random.default_rng(5)
    common = rng.permutation(rows)
    popular, rest = common[: round(own * shared)], common[round(own * shared) :]
    ids = [{*popular.tolist(), *rng.choice(rest, own - len(popular), replace=False).tolist()} for _ in range(8)]
    if cheapest[dim] == "all_gather":  # nobody has an id of others
        ids = [set(common[own * rank : own * (rank + 1)].tolist()) for rank in range(8)]
    counted = _messages(ids, rows, dim)
    found = cheapest_exchange(
        groups=8,
        own_rows=np.array([float(own)]),
        all_rows=np.array([float(len(set().union(*ids)))]),
        rows=np.array([float(rows)]),
        columns=np.array([float(dim)]),
        state_bytes=np.zeros(1),
        settings=EXACT,
    )
    assert min(counted, key=counted.__getitem__) == found.algorithm == cheapest[dim], counted
    assert found.sent.item() == pytest.approx(counted[found.algorithm], rel=0.03)


def test_local_memory_is_read_by_lookups_and_the_exchange_and_written_by_the_update_of_all_groups_rows() -> None:
    rng = np.random.default_rng(9)
    rows, lookups, group = 2_000, 600, 2
    counts = rng.zipf(1.3, rows).clip(max=200)
    table = _table(counts, lookups, row_state_bytes=4.0)
    own, union, arriving = 0.0, 0.0, 0.0
    for _ in range(50):
        ids = [rng.choice(rows, group * lookups, p=counts / counts.sum()) for _ in range(2)]  # of both groups
        own += len(np.unique(ids[0])) / 50
        union += len(np.unique(np.concatenate(ids))) / 50
        arriving += group * lookups / 50
    assert union > 1.25 * own
    loads, algorithm = shard_loads(table, ROW_WISE, *_even(rows, group), GroupShape(4, group, 2), EXACT)
    assert algorithm == "all_gather"
    row = DIM * 4
    forward = 2 * arriving * row  # read, and written to be sent
    backward = arriving * row  # gradients as they come
    update = 2 * union * (row + 4)  # weights and state, read and written
    exchange = 2 * own * (row + 4)  # rows and ids of both groups, read to be summed
    # Less than any of the parts.
    assert loads[:, Load.LOOKUP].sum() == pytest.approx(forward + backward + update + exchange, rel=0.01)
    held = loads[:, Load.MEMORY].sum() - rows * (row + 4) - arriving * (3 * 8 + row)
    assert held == pytest.approx(exchange, rel=0.01)


def test_rows_of_averages_are_updated_by_their_own_group_and_read_once_per_average() -> None:
    rows, lookups = 1_000, 400
    table = _table(np.ones(rows), lookups)
    settings = CostSettings(sync="average", sync_interval=10)
    loads, _ = shard_loads(table, ROW_WISE, *_even(rows, 2), GroupShape(4, 2, 2), settings)
    own = rows * (1 - (1 - 1 / rows) ** (2 * lookups))
    wanted = 3 * 2 * lookups * DIM * 4 + 2 * own * DIM * 4 + rows * DIM * 4 / 10
    assert loads[:, Load.LOOKUP].sum() == pytest.approx(wanted)
