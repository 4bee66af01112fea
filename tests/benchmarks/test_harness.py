from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.prepare import run_prepare
from turbogr_plugin.data import synthetic


def test_variants_take_turns_after_the_warm_up() -> None:
    order: list[str] = []
    variants = {name: (lambda name=name: order.append(name)) for name in "abc"}

    timings = harness.take_turns(variants, rounds=2, warmup=1, synchronize=lambda: order.append("|"))

    assert "".join(order).replace("|", "") == "abcabcabc" and order.count("|") == 18
    assert all(timing.runs == 2 and timing.lower <= timing.median <= timing.upper for timing in timings.values())


@pytest.mark.parametrize(
    ("speeds", "attempts", "steady"),
    [([1.0, 1.1], 1, True), ([1.0, 1.2, 1.0, 0.9], 2, True), ([1.0, 2.0] * 3, 3, False), ([2.0, 1.0] * 3, 3, False)],
)
def test_a_run_on_a_drifting_machine_is_repeated(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], attempts: int, steady: bool
) -> None:
    coming = iter(speeds)
    monkeypatch.setattr(harness, "probe", lambda: next(coming))
    runs: list[int] = []

    result, drift = harness.steadily(lambda: runs.append(1) or len(runs))  # type: ignore[func-returns-value]

    assert (result, drift.attempts, drift.steady) == (attempts, attempts, steady)
    assert ("NOT steady" in str(drift)) != steady


def test_the_last_line_is_one_json_object_with_figures_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    harness.print_table("title", ("name", "seconds"), [("a", 1234.5678), ("bb", 2.0)])
    harness.finish({"rows_per_second": 5.0}, drift=harness.Drift(1.0, 1.05, 1, True), as_json=True)

    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == ["title", "  name  seconds", "  ----  -------", "  a       1,235", "  bb          2"]
    record = json.loads(lines[-1])
    assert record["rows_per_second"] == 5.0 and record["drift"]["steady"]
    assert record["machine"]["cores"] >= 1 and "duckdb" in record["machine"]["versions"]


def test_prepare_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    synthetic.generate(tmp_path / "logs", rows=20_000, users=50, items=400, seed=1)

    run = run_prepare(tmp_path / "logs", tmp_path / "store")

    assert run.processor > 0 and run.wall > 0 and 0.02 < run.peak_gb < 4 and run.kept > 0
    assert (tmp_path / "store" / "manifest.json").is_file()
