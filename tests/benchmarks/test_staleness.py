"""The staleness benchmark: its arithmetic against direct computations, and which runs it compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import staleness
from benchmarks.staleness import METRICS, Pair
from tests.data.small_store import random_sequences, write_small_store
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.metrics import user_metrics


def pair(seed: int, exact: list[float], stale: list[float]) -> Pair:
    return Pair(
        seed=seed,
        exact={name: np.array(exact) for name in METRICS},
        stale={name: np.array(stale) for name in METRICS},
    )


def test_differences_are_paired_by_user_and_seed() -> None:
    pairs = [pair(0, [1, 0, 0, 1], [1, 1, 0, 1]), pair(1, [0, 0, 1, 1], [0, 1, 0, 1])]
    found = staleness.difference(pairs, "hr@10")
    by_user = np.array([0, 1, -0.5, 0])
    assert (found.exact, found.stale) == (0.5, 0.625)
    assert found.mean == pytest.approx(0.125)
    assert found.users == pytest.approx(np.sqrt(((by_user - 0.125) ** 2).sum() / 3 / 4))
    assert found.seeds == pytest.approx(0.125)  # 0.25 and 0
    assert found.apart == 0
    assert np.isnan(staleness.difference(pairs[:1], "hr@10").seeds)


@pytest.mark.parametrize(
    ("mean", "users", "passes"), [(0.004, 0.003, True), (-0.006, 0.01, False), (0.004, 0.001, False)]
)
def test_a_difference_passes_within_two_standard_errors_and_the_limit(mean: float, users: float, passes: bool) -> None:
    found = staleness.Difference(exact=0.1, stale=0.1 + mean, mean=mean, users=users, seeds=0.0, apart=0.0)
    assert found.passes is passes


def _run(folder: Path, *, seed: int, of: int, ranks: list[int], epochs: int = 3) -> Path:
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "training": {"seed": seed, "epochs": epochs},
        "pipeline": {"kind": "fine_grained", "staleness": of},
        "output": str(folder),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    users = np.arange(len(ranks))[::-1]
    np.savez(folder / "test_ranks.npz", users=users, filtered=np.array(ranks), unfiltered=np.array(ranks))
    return folder


def test_a_pair_is_two_runs_that_differ_in_staleness_alone(tmp_path: Path) -> None:
    exact = _run(tmp_path / "exact", seed=5, of=0, ranks=[3, 11, 1])
    stale = _run(tmp_path / "stale", seed=5, of=1, ranks=[2, 4, 90])
    found = staleness.read_pair(exact, stale)
    assert found.seed == 5
    np.testing.assert_array_equal(found.exact["hr@10"], [1, 0, 1])
    np.testing.assert_array_equal(found.stale["hr@10"], [0, 1, 1])
    assert found.exact["ndcg@10"][0] == float(user_metrics(_tensor([1]))["ndcg@10"])
    other = _run(tmp_path / "other", seed=5, of=1, ranks=[2, 4, 90], epochs=4)
    with pytest.raises(InputError, match="differ in more than their staleness"):
        staleness.read_pair(exact, other)
    with pytest.raises(InputError, match="was not trained with staleness 1"):
        staleness.read_pair(exact, exact)
    with pytest.raises(InputError, match="is not a finished run"):
        staleness.read_pair(exact, tmp_path)


def _tensor(values: list[int]) -> Any:
    import torch

    return torch.tensor(values)


def test_alpha_is_that_of_the_batches_of_a_run(tmp_path: Path) -> None:
    store = write_small_store(tmp_path / "store", random_sequences(40, 50, seed=1), num_items=50)
    config = staleness.configuration(tmp_path / "store", 2)
    assert config["training"] == {**config["training"], "epochs": 2, "evaluate_every": 2, "patience": 0}
    # 512 uniform negatives per target drown the few items of the sequences.
    assert staleness.alpha_of(config, store) == pytest.approx(1 / 50, rel=0.01)


def test_the_table_has_a_row_for_each_metric_and_says_what_does_not_pass() -> None:
    pairs = {"some": [pair(0, [1, 0], [0, 0]), pair(1, [1, 1], [1, 1])]}
    values = staleness.result(pairs, {"some": 0.002}, {"some": 7}, 24)
    assert values["passes"] is False
    text = staleness.table(values)
    assert "some        2.00e-03  HR@10" in text and "NDCG@10" in text
    assert "-0.2500" in text and text.count("not within two s.e.") == 2
    assert "some: 2 users, 7 items, seeds [0, 1]" in text


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--epochs", "0"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    assert staleness.main(arguments) == 2
