"""The balance benchmark: its peers against direct computations, its draws, and the keys of its record."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.balance import __main__ as benchmark
from benchmarks.balance import epochs, global_batches, lengths, peers
from tests.sharding.length_draws import DRAWS
from turbogr_plugin.sharding.step_plans import StepPlan

REAL = pytest.mark.skipif(not lengths.DATA.is_dir(), reason="the folder shared/data beside the checkout is missing")
FIGURES = {
    *("idle_8_16", "idle_8_64", "idle_8_256", "idle_8_1024", "token_gap_16", "plan_ms"),
    *("idle_2_16", "idle_2_64", "batch_cost_spread", "length_autocorr", "idle_short"),
}
"""Names that readers of the record rely on; what is wanted of each stands in the benchmark alone."""


def _loads(costs: np.ndarray, rank_of: np.ndarray, ranks: int) -> np.ndarray:
    return np.bincount(rank_of, weights=costs, minlength=ranks)


@REAL
def test_the_lists_are_those_of_all_users() -> None:
    clicks, beauty = lengths.clicks(4096), lengths.beauty()
    assert len(clicks.values) == lengths.USERS and clicks.values.max() == 4096
    assert 0.45 < (clicks.values == 4096).mean() < 0.47
    assert len(beauty.values) == lengths.BEAUTY_USERS and beauty.values.max() == 293


@REAL
def test_without_the_real_lists_their_quantiles_give_nearly_the_same_lengths(tmp_path: Path) -> None:
    for real, generated in (
        (lengths.clicks(4096), lengths.clicks(4096, folder=tmp_path)),
        (lengths.beauty(), lengths.beauty(folder=tmp_path)),
    ):
        assert "generated" in generated.source and "generated" not in real.source
        assert generated.values.mean() == pytest.approx(real.values.mean(), rel=0.05)


def test_batches_are_drawn_with_their_seed_and_without_repeated_users() -> None:
    everyone = np.arange(500)
    drawn = global_batches.draw(everyone, ranks=8, per_rank=4, batches=20, seed=1)
    assert drawn.shape == (20, 32) and all(len(set(batch)) == 32 for batch in drawn)
    assert np.array_equal(drawn, global_batches.draw(everyone, ranks=8, per_rank=4, batches=20, seed=1))
    assert not np.array_equal(drawn, global_batches.draw(everyone, ranks=8, per_rank=4, batches=20, seed=2))


@pytest.mark.parametrize("seed", range(6))
def test_karmarkar_karp_is_equal_in_number_and_near_the_best_such_assignment(seed: int) -> None:
    costs = DRAWS["lognormal"](8, seed).astype(float)
    rank_of = peers.karmarkar_karp(costs, 2)
    assert np.bincount(rank_of).tolist() == [4, 4]
    best = min(
        max(costs[list(half)].sum(), costs.sum() - costs[list(half)].sum())
        for half in itertools.combinations(range(8), 4)
    )
    assert best <= _loads(costs, rank_of, 2).max() <= 1.15 * best


def test_karmarkar_karp_does_the_textbook_example() -> None:
    """Of 1, 2, 3, 4 in two sets of two it makes the groups (1, 2) and (3, 4) and merges them crosswise."""
    assert _loads(
        np.array([4.0, 1.0, 3.0, 2.0]), peers.karmarkar_karp(np.array([4.0, 1.0, 3.0, 2.0]), 2), 2
    ).tolist() == [
        5.0,
        5.0,
    ]


@pytest.mark.parametrize("name", global_batches.METHODS)
@pytest.mark.parametrize(("samples", "ranks"), [(64, 8), (21, 16), (5, 8)])
def test_every_method_assigns_every_sample(samples: int, ranks: int, name: str) -> None:
    costs = DRAWS["capped"](samples, 0).astype(float)
    rank_of = global_batches.METHODS[name](costs, ranks)
    assert rank_of.shape == (samples,) and 0 <= rank_of.min() <= rank_of.max() < ranks


def test_greedy_gives_the_longest_to_whoever_has_least() -> None:
    assert _loads(np.array([5.0, 4, 3, 3, 3]), peers.greedy(np.array([5.0, 4, 3, 3, 3]), 2), 2).tolist() == [8, 10]


class _Given(StepPlan):
    """Steps that the test has written down."""

    def __init__(self, steps: list[list[list[int]]]) -> None:
        super().__init__(np.ones(6), ranks=2, seed=0)
        self._steps = steps

    def steps_of_epoch(self, epoch: int) -> int:
        return len(self._steps)

    def samples_of_step(self, epoch: int, step: int) -> list[np.ndarray]:
        return [np.array(samples, dtype=np.int64) for samples in self._steps[step]]

    def identity(self) -> dict[str, Any]:
        return {}


def test_an_epoch_is_judged_by_its_loads() -> None:
    tokens = np.array([1, 3, 4, 2, 6, 5])
    epoch = epochs.measure(_Given([[[0], [1]], [[2], [3, 4]], [[5], []]]), tokens, tokens.astype(float))
    assert epoch.idle == pytest.approx(np.mean([1 - 2 / 3, 1 - 6 / 8, 1 - 2.5 / 5]))
    assert epoch.spread == 3.0 and epoch.steps == 3 and epoch.most_samples == 2
    assert epoch.autocorrelation == pytest.approx(np.corrcoef([2, 4], [4, 5])[0, 1])
    with pytest.raises(AssertionError, match="every sample exactly once"):
        epochs.measure(_Given([[[0], [1]], [[2], [3, 3]]]), tokens, tokens.astype(float))


def test_the_record_has_the_figures_and_the_table_every_method(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "probe", lambda: 1.0)
    monkeypatch.setattr(benchmark, "RANKS", (4, 16))
    monkeypatch.setattr(benchmark, "FEW_RANKS", (16, 64))
    monkeypatch.setattr(benchmark, "OTHER_SPREADS", ())
    assert benchmark.AIMS.keys() == FIGURES
    monkeypatch.setattr(benchmark, "AIMS", {name: aim for name, aim in benchmark.AIMS.items() if "8_" not in name})
    monkeypatch.setattr(lengths, "clicks", lambda cap: lengths.Lengths(DRAWS["capped"](3000, 0), "drawn"))
    monkeypatch.setattr(lengths, "beauty", lambda: lengths.Lengths(DRAWS["zipf"](9000, 0), "drawn"))
    assert benchmark.main(["--json", "--batches", "5", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    record = json.loads(printed.splitlines()[-1])
    for key in benchmark.AIMS:
        assert isinstance(record[key], float), key
    assert {"idle_8_4", "idle_8_16", "plan_clock_ms"} <= record.keys() and record["seed"] == 3
    assert list(record["long_batches"]) == list(global_batches.METHODS)
    assert record["batch_cost_spread"] == max(
        record["few_samples"][f"ours, 32 batches ahead, {ranks} ranks"]["spread"] for ranks in (16, 64)
    )
    for name in (*global_batches.METHODS, "ours, 32 batches ahead", "ours, filled to the budget"):
        assert name in printed


@REAL
def test_whole_epochs_on_the_real_lengths_reach_their_figures_and_docs_tell_them() -> None:
    few = benchmark.few_samples(lengths.clicks(benchmark.CAP), seed=0)
    short = benchmark.short_sequences(lengths.beauty(), seed=0)
    figures = {**few, **short}
    for key in ("idle_2_16", "idle_2_64", "batch_cost_spread", "length_autocorr", "idle_short"):
        assert figures[key] <= benchmark.AIMS[key], key
    documented = (Path(__file__).parents[2] / "docs" / "balance.md").read_text()
    for name, epoch in {**few["few_samples"], **short["short_sequences"]}.items():
        assert f"{epoch['idle']:.4f}" in documented, name
