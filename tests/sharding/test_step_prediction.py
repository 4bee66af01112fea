"""Seconds from bytes: the parts of a predicted step against the messages of which they consist."""

from __future__ import annotations

import numpy as np
import pytest

from turbogr_plugin.sharding.hierarchical_cost import GroupShape, Load
from turbogr_plugin.sharding.link_bandwidths import LinkBandwidths, LinkSpeeds
from turbogr_plugin.sharding.step_prediction import Speeds

INTRA = LinkSpeeds(all_to_all=8e9, all_reduce=4e9, exchange=2e9, latency=1e-5)
INTER = LinkSpeeds(all_to_all=5e8, all_reduce=3e8, exchange=1e8, latency=2e-4)
SHAPES = [GroupShape(8, 4, 4), GroupShape(8, 2, 4), GroupShape(8, 8, 4), GroupShape(6, 3, 3), GroupShape(4, 2, 4)]


def _speeds(shape: GroupShape, *, links: LinkBandwidths | None = None, dense_bytes: float = 0.0) -> Speeds:
    return Speeds(shape, links or LinkBandwidths(INTRA, INTER), 1e10, dense_bytes=dense_bytes)


def _loads(shape: GroupShape, **bytes_of: list[float]) -> np.ndarray:
    loads = np.zeros((shape.group, len(Load)))
    for name, values in bytes_of.items():
        loads[:, Load[name]] = values
    return loads


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_all_reduce_sends_a_part_per_local_rank_between_domains(shape: GroupShape) -> None:
    size = 4.8e6
    local, domains = shape.domain, shape.world // shape.domain
    inside = between = 0.0
    for _ in range(local - 1):  # reduce-scatter around the ring of a domain, then all-gather
        inside += 2 * size / local
    for _ in range(domains - 1):  # each rank sums its part with its peers of the other domains, around their ring
        between += 2 * (size / local) / domains
    wanted = inside / INTRA.all_reduce + between / INTER.all_reduce
    assert _speeds(shape).all_reduce(size) == pytest.approx(wanted)
    reduced = _loads(shape, REDUCE=[1e6] * shape.group)
    assert _speeds(shape, dense_bytes=3.8e6).predict(reduced, kinds=1).all_reduce == pytest.approx(wanted)


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_exchange_sends_counts_ids_and_rows_to_every_peer(shape: GroupShape, kinds: int) -> None:
    latency = 0.0
    for peer in range(shape.group, shape.world, shape.group):  # of rank 0
        for _message in ("counts", "ids", "rows"):
            latency += INTRA.latency if peer < shape.domain else INTER.latency
    predicted = _speeds(shape).predict(_loads(shape), kinds=kinds)
    assert predicted.exchange == pytest.approx(kinds * latency)


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_all_to_all_sends_lengths_ids_rows_and_gradients_to_every_rank_of_the_group(
    shape: GroupShape, kinds: int
) -> None:
    latency = 0.0
    for other in range(1, shape.group):  # of rank 0
        for _message in ("lengths", "ids", "rows", "gradients"):
            latency += INTRA.latency if other < shape.domain else INTER.latency
    assert _speeds(shape).predict(_loads(shape), kinds=kinds).all_to_all == pytest.approx(kinds * latency)


@pytest.mark.parametrize("kinds", [1, 2])
def test_rows_and_their_gradients_have_the_speed_of_messages_of_their_size(kinds: int) -> None:
    points = ((1e4, 4e8), (1e5, 2e8), (1e6, 1e8))
    inter = LinkSpeeds(all_to_all=1e8, all_reduce=1.0, exchange=1.0, all_to_all_by_size=points)
    shape = GroupShape(4, 4, 2)
    loads = _loads(shape, A2A_INTER=[kinds * 2e5] * 4)  # 1e5 bytes in each of the calls
    found = _speeds(shape, links=LinkBandwidths(LinkSpeeds.same(1e9), inter)).predict(loads, kinds=kinds)
    assert found.all_to_all == pytest.approx(kinds * 2e5 / 2e8)
    inside = _loads(shape, A2A_INTRA=[kinds * 2e5] * 4)
    found = _speeds(shape, links=LinkBandwidths(inter, LinkSpeeds.same(1e9))).predict(inside, kinds=kinds)
    assert found.all_to_all == pytest.approx(kinds * 2e5 / 2e8)


def test_replicas_alone_have_no_all_to_all() -> None:
    shape = GroupShape(4, 4, 2)
    with np.errstate(all="raise"):
        found = _speeds(shape).predict(_loads(shape, REDUCE=[1e6] * 4), kinds=0)
    assert found.all_to_all == 0


def test_the_slowest_rank_and_the_slower_link_decide() -> None:
    shape = GroupShape(4, 2, 2)
    free = LinkBandwidths(LinkSpeeds.same(1e9), LinkSpeeds.same(1e8))
    loads = _loads(
        shape,
        LOOKUP=[1e8, 3e8],
        A2A_INTRA=[5e6, 1e6],
        A2A_INTER=[2e5, 4e5],
        EXCHANGE_INTRA=[1e6, 1e6],
        EXCHANGE_INTER=[3e6, 2e6],
    )
    found = _speeds(shape, links=free).predict(loads, kinds=2)
    assert found.lookup == pytest.approx(3e8 / 1e10)
    assert found.all_to_all == pytest.approx(5e6 / 1e9)
    assert found.exchange == pytest.approx(3e6 / 1e8)
    assert found.step == pytest.approx(found.lookup + found.all_to_all + found.exchange)
