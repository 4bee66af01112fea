"""Two emulated hosts, and the arithmetic of the benchmark that runs on them."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.hierarchical import step_spans
from benchmarks.hierarchical.__main__ import COMPUTE_SECONDS, main
from benchmarks.hierarchical.variants import (
    ALONE,
    ALONE_FP16,
    GROUPS,
    GROUPS_FP16,
    PLAIN,
    PLAIN_FP16,
    Variant,
    planned,
)
from benchmarks.hierarchical.workload import Workload
from benchmarks.two_hosts import TwoHosts, wait, why_not
from turbogr_plugin.sharding import cpu_topology
from turbogr_plugin.sharding.link_bandwidths import LinkSpeeds
from turbogr_plugin.sharding.plan_report import TCP_FRAMING, sent_over_link

SEND = """
import json, sys, torch, torch.distributed as dist
from benchmarks.two_hosts import sent_bytes
dist.init_process_group("gloo")
rank, payload = dist.get_rank(), torch.ones(2_000_000, dtype=torch.uint8)
found = {}
for name, (source, target) in {"inside": (0, 1), "over the link": (0, 2)}.items():
    dist.barrier()
    before = sent_bytes()
    if rank == source:
        dist.send(payload, target)
    if rank == target:
        dist.recv(payload, source)
    dist.barrier()
    found[name] = sent_bytes() - before
if rank == 0:
    json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts: {why_not()}")
def test_only_what_goes_from_host_to_host_crosses_the_link(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    with TwoHosts(rate_mbit=400) as hosts:
        command = [sys.executable, "-c", SEND, str(tmp_path / "found")]
        assert wait(hosts.start(command, 2, environment={"PYTHONPATH": root}), timeout=60) == 0
    found = json.loads((tmp_path / "found").read_text(encoding="utf-8"))
    assert 2_000_000 < found["over the link"] < 2_200_000
    assert found["inside"] < 100_000


@pytest.mark.timeout(120)
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts: {why_not()}")
def test_a_rank_that_fails_ends_the_others_and_its_code_is_returned() -> None:
    program = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(100)"
    with TwoHosts() as hosts:
        ranks = hosts.start([sys.executable, "-c", program], 2)
        assert wait(ranks, timeout=60) == 7
        assert all(rank.poll() is not None for rank in ranks)


#: MB that a host sent per step by the counter of its interface, and ms per step: docs/hierarchical.md, first workload.
MEASURED = {
    PLAIN: (9.19, 1092),
    PLAIN_FP16: (4.74, 506),
    GROUPS: (6.07, 582),
    GROUPS_FP16: (3.15, 329),
    ALONE: (12.27, 1089),
    ALONE_FP16: (6.29, 607),
}
DENSE_BYTES = 132e3


@pytest.mark.parametrize("variant", MEASURED, ids=lambda variant: variant.name)
def test_bytes_and_steps_of_two_emulated_hosts_are_as_measured(variant: Variant) -> None:
    megabytes, milliseconds = MEASURED[variant]
    inside = LinkSpeeds(
        all_to_all=0.8278e9,
        all_reduce=0.7309e9,
        exchange=1.322e9,
        latency=2.156e-3,
        all_to_all_by_size=((5e5, 0.4245e9), (1e6, 0.6458e9), (2e6, 0.6276e9), (4e6, 0.8278e9)),
    )
    between = LinkSpeeds(
        all_to_all=4.766e6,
        all_reduce=5.868e6,
        exchange=5.885e6,
        latency=3.028e-3,
        all_to_all_by_size=((5e5, 5.735e6), (1e6, 5.214e6), (2e6, 4.904e6), (4e6, 4.766e6)),
    )
    topology = cpu_topology(
        ranks_per_node=2, nodes=2, memory_bytes=4 << 30, intra=inside, inter=between, memory_bandwidth=4.338e9
    )
    workload = Workload(listed=False)
    rows = int(workload.popularity()[1].sum())
    plan = planned(variant, workload, rows, topology, COMPUTE_SECONDS * workload.lookups)
    assert plan.report is not None
    (candidate,) = plan.report.candidates
    assert candidate.prediction is not None
    sent = sent_over_link(candidate, ranks=2, world=4, dense_bytes=DENSE_BYTES, framing=TCP_FRAMING)
    assert sent / 1e6 == pytest.approx(megabytes, rel=0.03)
    assert 1e3 * candidate.prediction.step == pytest.approx(milliseconds, rel=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_covered_time_is_that_of_a_clock_that_ticks(seed: int) -> None:
    drawn = random.Random(seed)
    spans = [(begin, begin + drawn.randrange(1, 30)) for begin in (drawn.randrange(200) for _ in range(12))]
    bounds = sorted(drawn.sample(range(220), 5))
    ticks = {tick for begin, end in spans for tick in range(begin, end)}
    wanted = [sum(first <= tick < last for tick in ticks) for first, last in itertools.pairwise(bounds)]
    assert step_spans.covered(spans, bounds) == wanted


def test_without_root_the_benchmark_says_why_it_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main([]) == 0
    assert "skipped: needs root" in capsys.readouterr().out
