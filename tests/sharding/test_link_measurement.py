"""What is made of measured times, with clocks that a test sets."""

from __future__ import annotations

import statistics

import pytest

from tests.npu.ranks import Call, RankPool
from tests.sharding.planned_on_ranks import CLOCK
from turbogr_plugin.sharding import cpu_topology
from turbogr_plugin.sharding.link_measurement import LinkMeasurement, Timing, _speeds

HERE = "tests.sharding.planned_on_ranks"


def _timing(traffic: str, *, ranks: int = 2, sent: float = 1e6, seconds: float = 0.5, small: float = 1e-4) -> Timing:
    return Timing(
        level="inter", traffic=traffic, ranks=ranks, bytes_sent=sent, seconds=seconds, small_seconds=small, spread=1.0
    )


def test_latency_is_taken_off_a_time_but_no_more_than_half_of_it() -> None:
    assert _timing("exchange", seconds=0.5, small=0.1).rate == pytest.approx(1e6 / 0.4)
    assert _timing("exchange", seconds=0.5, small=0.25).rate == pytest.approx(1e6 / 0.25)
    for small in (0.4, 0.5, 0.7):
        assert _timing("exchange", seconds=0.5, small=small).rate == pytest.approx(1e6 / 0.25)


def test_speeds_are_those_of_the_largest_message_and_latency_that_of_one_message() -> None:
    found = _speeds(
        [
            *(_timing("all_to_all", ranks=16, sent=sent, seconds=sent / 4e6 + 3e-4, small=3e-4) for sent in (1e5, 2e5)),
            _timing("all_to_all", ranks=16, sent=4e5, seconds=0.2 + 3e-4, small=3e-4),
            _timing("all_reduce", ranks=4, seconds=0.25, small=5e-5),
            _timing("exchange", ranks=4, seconds=0.5 + 6e-5, small=6e-5),
        ]
    )
    assert [size for size, _ in found.all_to_all_by_size] == [1e5, 2e5, 4e5]
    assert [rate for _, rate in found.all_to_all_by_size] == pytest.approx([4e6, 4e6, 2e6])
    assert found.all_to_all == pytest.approx(2e6)
    assert found.exchange == pytest.approx(2e6)
    assert found.all_reduce == pytest.approx(1e6 / (0.25 - 5e-5))
    assert found.latency == pytest.approx(2e-5)


def test_one_host_says_that_nothing_lies_between_hosts() -> None:
    topology = cpu_topology(ranks_per_node=2, nodes=1, memory_bytes=1 << 30, intra=1e9, inter=1e9)
    inside = LinkMeasurement(topology=topology, timings=[], memory_bandwidth=1e9)
    assert any("nothing was measured between hosts" in line for line in inside.lines())
    between = LinkMeasurement(topology=topology, timings=[_timing("exchange")], memory_bandwidth=1e9)
    assert not any("nothing was measured" in line for line in between.lines())


@pytest.mark.timeout(150)
def test_a_time_is_the_mean_of_the_middle_half_of_those_of_the_slowest_rank(ranks: RankPool) -> None:
    (outcome,) = ranks.run([Call(f"{HERE}:clocked", world_size=4)])
    slowest = sorted(max(of_turn) for of_turn in list(zip(*CLOCK, strict=True))[1:])
    assert len(slowest) == 9
    for seconds, spread, least in outcome.result():
        assert seconds == pytest.approx(statistics.mean(slowest[2:7]), rel=1e-6)
        assert spread == pytest.approx(slowest[-1] / slowest[0], rel=1e-6)
        assert least == 10.0


@pytest.mark.timeout(150)
def test_hosts_of_one_rank_are_measured_between_hosts_alone(ranks: RankPool) -> None:
    (outcome,) = ranks.run([Call(f"{HERE}:measured_alone", world_size=4)])
    for timings in outcome.result():
        # of 0.2 MB three quarters go to the other ranks, all of them on other hosts
        assert [timing[:3] for timing in timings] == [["inter", "all_to_all", 4]] * 4 + [
            ["inter", "all_reduce", 4],
            ["inter", "exchange", 4],
        ]
        sent = [timing[3] for timing in timings]
        assert sent == pytest.approx([18_750, 37_500, 75_000, 150_000, 300_000, 150_000], abs=32)
