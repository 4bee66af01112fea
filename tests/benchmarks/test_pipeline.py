"""The pipeline benchmark: its figures from what the ranks found, its workload, and what it says where it cannot run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from benchmarks.pipeline import __main__ as benchmark
from benchmarks.pipeline import ranks
from benchmarks.pipeline.ranks import EXACT, PIPELINES, SEMI_SYNC, SPARSE_DIST, STALE, Settings
from benchmarks.pipeline.workload import COMPUTE, PROCESSOR, WAIT, Compute, batches
from tests.forked import run_program
from turbogr_plugin.pipeline.timeline import StepTimes


def _found(losses: dict[str, list[float]], **steps: list[float]) -> dict[str, Any]:
    """What ranks would find: step times as given, and a step of 10 ms, 6 of them compute and 1 exposed."""
    profiled = StepTimes(duration=0.010, compute=0.006, communication=0.004, exposed=0.001, other=0.003).record()
    return {
        "dense_seconds": 0.006,
        "communication_ms": 4.0,
        "pipelines": {
            name: {
                "step_ms": steps.get(name.split()[-1], [10.0, 10.0]) if name in (EXACT, STALE) else steps[name],
                "profiled": profiled,
                "losses": losses[name],
                "runs_agree": True,
            }
            for name in PIPELINES
        },
    }


LOSSES = {SPARSE_DIST: [3.0, 2.0], EXACT: [3.0, 2.0], SEMI_SYNC: [3.0, 2.5], STALE: [3.0, 2.5]}


def test_the_figures_are_those_of_tau_1_and_speedups_are_taken_turn_by_turn() -> None:
    found = _found(LOSSES, SparseDist=[15.0, 30.0], SemiSync=[12.0, 24.0], **{"1": [10.0, 10.0], "0": [20.0, 20.0]})
    figures = benchmark.figures_of(found)
    assert (figures["speedup_vs_sparsedist"], figures["speedup_vs_semisync"]) == (2.25, pytest.approx(1.8))
    assert figures["tau_0"]["speedup_vs_sparsedist"] == 1.125
    assert (figures["compute_share"], figures["exposed_share"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert figures["shares_sum"] == pytest.approx(1)
    assert figures["dense_ms"] == 6 and figures["communication_alone_ms"] == 4
    assert benchmark.step_of(found, SPARSE_DIST).median == 22.5
    json.dumps(figures)


def test_losses_agree_only_where_every_bit_does() -> None:
    steps: dict[str, list[float]] = {"SparseDist": [1.0], "SemiSync": [1.0]}
    found = _found(LOSSES, **steps)
    assert all(benchmark.agreements(found, _found(LOSSES, **steps)).values())
    other = _found({**LOSSES, STALE: [3.0, 2.5 + 1e-15]}, **steps)
    assert benchmark.agreements(other, found) == {
        "tau_0_equals_sparsedist": True,
        "tau_1_equals_semisync": False,
        "tau_1_is_stale": True,
        "runs_agree": True,
        "control_has_the_same_losses": False,
    }
    assert not benchmark.agreements(_found({**LOSSES, STALE: LOSSES[EXACT]}, **steps), found)["tau_1_is_stale"]


def test_without_what_two_hosts_need_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "why_not", lambda: "needs root for network namespaces")
    assert benchmark.main(["--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped: two hosts cannot be emulated here: needs root for network namespaces"
    assert json.loads(lines[-1])["skipped"] == "needs root for network namespaces"


def test_settings_reach_the_ranks_as_they_are() -> None:
    settings = Settings(
        lookups=1, rows=2, dim=3, steps=4, rounds=5, ratio=0.5, dense_seconds=None, kind=WAIT, seed=6, timelines=None
    )
    assert Settings.from_json(settings.as_json()) == settings


@pytest.mark.parametrize("kind", [WAIT, PROCESSOR])
def test_the_dense_part_changes_nothing_and_takes_twice_as_long_backward(kind: str) -> None:
    compute = Compute(kind, 0.03, 0.001)
    values = torch.randn(4, 3, requires_grad=True)
    with profile() as profiler:
        started = time.perf_counter()
        given = compute(values)
        given.backward(torch.full((4, 3), 2.0))
        taken = time.perf_counter() - started
    assert torch.equal(given, values) and values.grad is not None and (values.grad == 2).all()
    ranges = [event for event in profiler.events() if event.name == COMPUTE]
    assert len(ranges) == 2
    if kind == WAIT:
        assert taken >= 0.03
    else:
        products = [sum(child.name == "aten::mm" for child in each.cpu_children) for each in ranges]
        assert sorted(products) == [10, 20]


def test_batches_are_drawn_by_their_seed_and_favour_the_first_rows() -> None:
    first, again, other = (list(batches(3, lookups=800, rows=1000, seed=seed)) for seed in (1, 1, 2))
    values = torch.stack([batch.ids.values() for batch in first])
    assert torch.equal(values, torch.stack([batch.ids.values() for batch in again]))
    assert not torch.equal(values, torch.stack([batch.ids.values() for batch in other]))
    assert values.min() >= 0 and values.max() < 1000
    assert 0.45 < (values < 125).double().mean() < 0.55  # the cube of a uniform draw
    assert first[0].ids.lengths().tolist() == [100] * 8


@pytest.mark.full
def test_two_ranks_train_the_same_under_all_pipelines_and_give_all_figures(tmp_path: Path) -> None:
    settings = Settings(
        lookups=64,
        rows=200,
        dim=8,
        steps=2,
        rounds=0,
        ratio=0.5,
        dense_seconds=None,
        kind=WAIT,
        seed=0,
        timelines=None,
    )
    program = [str(Path(ranks.__file__)), settings.as_json(), str(tmp_path / "found.json")]
    ended = run_program(program, ranks=2, folder=tmp_path, timeout=100)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["communication_ms"] > 0
    assert found["dense_seconds"] == pytest.approx(found["communication_ms"] / 1e3 / 0.5)
    assert all(benchmark.agreements(found, found).values())
    for name in PIPELINES:
        shares = found["pipelines"][name]["profiled"]
        assert len(benchmark.losses_of(found, name)) == 7
        assert shares["compute_share"] + shares["exposed_share"] + shares["other_share"] == pytest.approx(1)
        assert shares["compute_ms"] >= 1e3 * found["dense_seconds"] and shares["communication_ms"] > 0
