"""Which option each table takes and which rank each shard, for one size of groups.

Every table has a few options (table_options.py). An option's price is the mean of its seconds over the ranks plus
lambda times its seconds on the rank that it burdens most: lambda = 0 takes what is cheapest in sum, lambda = 1 what is
spread best. A dozen values of lambda give as many proposals; one more per sharding type takes that type wherever it
may stand, and one takes least memory. For each, what has fixed
ranks (row-wise, replicas) is put down first, then shards in falling order of seconds, or of bytes, go each to the rank
with the fewest seconds so far that has room: the longest-processing-time rule, at worst 4/3 of the best. Since a
shard's seconds count its real lookups, hot tables end up apart. The best proposal is then improved table by table.

Deterministic. Left out: optimal assignment (the step has four maxima, an integer programme for thousands of shards).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import ShardingType

from turbogr_plugin.sharding.access_histogram import Floats
from turbogr_plugin.sharding.hierarchical_cost import Load
from turbogr_plugin.sharding.step_prediction import Speeds, StepPrediction
from turbogr_plugin.sharding.table_options import TableOption

_ON_FIXED_RANKS = (ShardingType.ROW_WISE.value, ShardingType.DATA_PARALLEL.value)
_IN_A_DOMAIN = (
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)
#: Tables that the improvement tries to place otherwise, and how often it does.
_TRIED, _ROUNDS = 8, 40


@dataclass(eq=False)
class Assignment:
    """Options and ranks of all tables of one proposal."""

    chosen: list[TableOption]
    ranks: list[NDArray[np.int64]]
    """Of each table: the rank of each shard; -1 stands for all ranks."""
    loads: Floats
    """[ranks, len(Load)] in sum."""

    @property
    def kinds(self) -> int:
        """Pairs of module and sharding type."""
        return len({(option.option.path, option.type) for option in self.chosen if option.type not in _REPLICATED})


@dataclass
class SearchResult:
    """The best assignment that fits, or what is missing."""

    assignment: Assignment | None
    prediction: StepPrediction | None = None
    missing: Floats | None = None
    """[ranks] bytes by which the leanest proposal exceeds each rank's memory, where none fits."""
    proposals: int = 0
    needed: Floats = field(default_factory=lambda: np.zeros(0))
    """[ranks] bytes of the assignment, or of the leanest proposal."""


_REPLICATED = (ShardingType.DATA_PARALLEL.value,)


def search(
    tables: Sequence[Sequence[TableOption]], capacity: Floats, speeds: Speeds, *, everywhere: float = 0.0
) -> SearchResult:
    """The fastest assignment found within memory.

    Args:
        tables: the options of each table; at least one each.
        capacity: [ranks] bytes that each rank has for tables and what goes with them.
        speeds: of the topology.
        everywhere: bytes that each rank needs for its own ids and rows, whatever is chosen.
    """
    ranks, weights = capacity.size, speeds.seconds_per_byte()
    prices = [[_price(option, ranks, weights) for option in options] for options in tables]
    best: tuple[float, Assignment, StepPrediction] | None = None
    leanest: Floats | None = None
    seen: set[tuple[tuple[int, ...], bool]] = set()
    steps = np.concatenate([[0.0], np.geomspace(0.25 / ranks, 1.0, 10)])
    wanted = [
        tuple(int(np.argmin([mean + step * worst for mean, worst, _ in price])) for price in prices) for step in steps
    ]
    wanted += _uniform(tables, prices)
    wanted.append(tuple(int(np.argmin([memory for *_, memory in price])) for price in prices))
    for choice in wanted:
        for by_memory in (False, True):
            if (choice, by_memory) in seen:
                continue
            seen.add((choice, by_memory))
            chosen = [options[index] for options, index in zip(tables, choice, strict=True)]
            found = _place(chosen, capacity, weights, everywhere, by_memory=by_memory, overfull=False)
            if found is None:
                continue
            prediction = speeds.predict(found.loads, kinds=found.kinds)
            if best is None or prediction.step < best[0]:
                best = (prediction.step, found, prediction)
    if best is None:
        chosen = [options[index] for options, index in zip(tables, wanted[-1], strict=True)]
        overfull = _place(chosen, capacity, weights, everywhere, by_memory=True, overfull=True)
        assert overfull is not None
        leanest = overfull.loads[:, Load.MEMORY]
        return SearchResult(None, None, np.maximum(leanest - capacity, 0.0), len(seen), leanest)
    assignment, prediction, tried = _improve(tables, best[1], best[2], capacity, speeds)
    return SearchResult(assignment, prediction, None, len(seen) + tried, assignment.loads[:, Load.MEMORY])


def _uniform(
    tables: Sequence[Sequence[TableOption]], prices: Sequence[Sequence[tuple[float, float, float]]]
) -> list[tuple[int, ...]]:
    """One choice per sharding type: the best spread option of that type, where a table has one, else of any."""

    def best(options: Sequence[TableOption], price: Sequence[tuple[float, float, float]], kind: str) -> int:
        allowed = [index for index, option in enumerate(options) if option.type == kind] or range(len(options))
        return min(allowed, key=lambda index: price[index][0] + price[index][1])

    # Table-wise comes before column-wise, which is the same where a table has one column shard.
    kinds = sorted({option.type for options in tables for option in options}, reverse=True)
    return [tuple(best(options, price, kind) for options, price in zip(tables, prices, strict=True)) for kind in kinds]


def _price(option: TableOption, ranks: int, weights: Floats) -> tuple[float, float, float]:
    """Seconds in the mean over ranks, seconds on the rank that has most, bytes there."""
    seconds = option.loads @ weights
    mean = float(seconds.sum()) / ranks if option.type not in _REPLICATED else float(seconds[0])
    worst = float(option.loads[:, Load.MEMORY].max())
    return mean, float(seconds.max()), worst


class _Ranks:
    """Seconds and free bytes of the ranks while shards are put down."""

    def __init__(self, count: int, capacity: Floats, everywhere: float) -> None:
        self.loads = np.zeros((count, len(Load)))
        self.loads[:, Load.MEMORY] = everywhere
        self.seconds = np.zeros(count)
        self.capacity = capacity

    def add(self, ranks: NDArray[np.int64] | slice, loads: Floats, weights: Floats) -> None:
        self.loads[ranks] += loads
        self.seconds[ranks] += loads @ weights

    def room(self, rank: int, memory: float) -> bool:
        return bool(self.loads[rank, Load.MEMORY] + memory <= self.capacity[rank])


def _place(
    chosen: list[TableOption], capacity: Floats, weights: Floats, everywhere: float, *, by_memory: bool, overfull: bool
) -> Assignment | None:
    """Puts all shards down; None where one finds no room, unless ranks may be overfull."""
    count = capacity.size
    state = _Ranks(count, capacity, everywhere)
    placed: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(chosen)
    free: list[int] = []
    in_domains: list[int] = []
    for index, option in enumerate(chosen):
        if option.type in _ON_FIXED_RANKS:
            if option.type in _REPLICATED:
                placed[index] = np.array([-1])
                state.add(slice(None), option.loads[0], weights)
            else:
                placed[index] = np.arange(len(option.sizes))
                state.add(placed[index], option.loads, weights)
        elif option.type in _IN_A_DOMAIN:
            in_domains.append(index)
        else:
            free.append(index)
    if not overfull and (state.loads[:, Load.MEMORY] > capacity).any():
        return None
    for index in sorted(in_domains, key=lambda each: -_order(chosen[each].loads.sum(0), weights, by_memory)):
        ranks = _domain_ranks(chosen[index], state, weights, overfull)
        if ranks is None:
            return None
        placed[index] = ranks
        for rank, loads in zip(ranks, chosen[index].loads, strict=True):
            state.add(np.array([rank]), loads, weights)
    shards = [(index, shard) for index in free for shard in range(len(chosen[index].sizes))]
    shards.sort(key=lambda each: -_order(chosen[each[0]].loads[each[1]], weights, by_memory))
    for index in free:
        placed[index] = np.zeros(len(chosen[index].sizes), dtype=np.int64)
    heap = [(seconds, rank) for rank, seconds in enumerate(state.seconds.tolist())]
    heapq.heapify(heap)
    for index, shard in shards:
        loads = chosen[index].loads[shard]
        rank = _take(heap, state, float(loads[Load.MEMORY]), overfull)
        if rank is None:
            return None
        placed[index][shard] = rank
        state.add(np.array([rank]), loads, weights)
        heapq.heappush(heap, (float(state.seconds[rank]), rank))
    return Assignment(chosen, placed, state.loads)


def _order(loads: Floats, weights: Floats, by_memory: bool) -> float:
    return float(loads[Load.MEMORY]) if by_memory else float(loads @ weights)


def _take(heap: list[tuple[float, int]], state: _Ranks, memory: float, overfull: bool) -> int | None:
    """The rank with the fewest seconds that has room, taken off the heap; where none has, the one with most room."""
    passed: list[tuple[float, int]] = []
    while heap:
        entry = heapq.heappop(heap)
        if state.room(entry[1], memory):
            for other in passed:
                heapq.heappush(heap, other)
            return entry[1]
        passed.append(entry)
    for other in passed:
        heapq.heappush(heap, other)
    if not overfull:
        return None
    rank = int(np.argmin(state.loads[:, Load.MEMORY] - state.capacity))
    heap[:] = [entry for entry in heap if entry[1] != rank]
    heapq.heapify(heap)
    return rank


def _domain_ranks(option: TableOption, state: _Ranks, weights: Floats, overfull: bool) -> NDArray[np.int64] | None:
    """Ranks of a table that lies on one host (table-row-wise, table-column-wise) or on several (grid)."""
    local = option.block
    domains = state.seconds.size // local
    shards = len(option.sizes)
    blocks = -(-shards // local) if option.type == ShardingType.GRID_SHARD.value else 1
    order = np.argsort(state.seconds.reshape(domains, local).max(1), kind="stable")
    found: list[NDArray[np.int64]] = []
    for block in range(blocks):
        here = option.loads[block * local : (block + 1) * local] if blocks > 1 else option.loads
        for domain in np.roll(order, -block):
            ranks = domain * local + np.arange(len(here)) % local
            extra = np.bincount(ranks, weights=here[:, Load.MEMORY], minlength=state.seconds.size)
            touched = np.unique(ranks)
            fits = (state.loads[touched, Load.MEMORY] + extra[touched] <= state.capacity[touched]).all()
            if fits or overfull:
                found.append(ranks)
                break
        else:
            return None
    return np.concatenate(found)


def _improve(
    tables: Sequence[Sequence[TableOption]],
    start: Assignment,
    prediction: StepPrediction,
    capacity: Floats,
    speeds: Speeds,
) -> tuple[Assignment, StepPrediction, int]:
    """Moves what burdens the slowest rank, while the step gets shorter."""
    best, predicted, tried = start, prediction, 0
    weights = speeds.seconds_per_byte()
    for _ in range(_ROUNDS):
        slowest = int(np.argmax(best.loads @ weights))
        burden = [
            (float(option.loads[ranks == slowest].sum(0) @ weights), index)
            for index, (option, ranks) in enumerate(zip(best.chosen, best.ranks, strict=True))
            if (ranks == slowest).any()
        ]
        better = None
        for _, index in sorted(burden, reverse=True)[:_TRIED]:
            for candidate in _moves(tables[index], best, index, capacity, weights):
                tried += 1
                found = speeds.predict(candidate.loads, kinds=candidate.kinds)
                if found.step < (better[1] if better else predicted).step * (1 - 1e-6):
                    better = (candidate, found)
            if better:
                break
        if better is None:
            break
        best, predicted = better
    return best, predicted, tried


def _moves(
    options: Sequence[TableOption], now: Assignment, index: int, capacity: Floats, weights: Floats
) -> list[Assignment]:
    """What one table could do instead: its shards of the slowest rank on the fastest, or another option there."""
    current, ranks = now.chosen[index], now.ranks[index]
    without = now.loads.copy()
    _add(without, current, ranks, -1.0)
    found = []
    for option in options:
        if option.type in _IN_A_DOMAIN:
            continue
        if option.type in _REPLICATED:
            places = np.array([-1])
        elif option.type in _ON_FIXED_RANKS:
            places = np.arange(len(option.sizes))
        else:
            order = np.argsort(without @ weights, kind="stable")
            places = order[np.arange(len(option.sizes)) % order.size]
        if option is current and np.array_equal(places, ranks):
            continue
        loads = without.copy()
        _add(loads, option, places, 1.0)
        if (loads[:, Load.MEMORY] > capacity).any():
            continue
        chosen, all_ranks = list(now.chosen), list(now.ranks)
        chosen[index], all_ranks[index] = option, places
        found.append(Assignment(chosen, all_ranks, loads))
    return found


def _add(loads: Floats, option: TableOption, ranks: NDArray[np.int64], sign: float) -> None:
    if option.type in _REPLICATED:
        loads += sign * option.loads[0]
    else:
        np.add.at(loads, ranks, sign * option.loads)
