"""The quality benchmark: its arithmetic against direct computations, and the recorded baseline against its data."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import quality
from benchmarks.baselines import sasrec_ranks
from benchmarks.baselines.sasrec_ranks import RECORD_KEYS, SasrecRanks
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError

needs_recbole_data = pytest.mark.skipif(
    not any(d.name == "recbole" for d in importlib.metadata.distributions()),
    reason="MovieLens-100K comes with the recbole wheel: pip install --no-deps recbole==1.2.1",
)


def make_record(**changes: Any) -> dict[str, Any]:
    """A complete record of a small run."""
    values: dict[str, Any] = dict.fromkeys(RECORD_KEYS, 0)
    values |= {
        "config": {"MAX_ITEM_LIST_LENGTH": 50, "seed": 2020},
        "versions": {"recbole": "1.2.1"},
        "machine": {"cpu": "some", "threads": 2},
        "complete": True,
    }
    return values | changes


def baseline(filtered: list[int], unfiltered: list[int] | None = None, **changes: Any) -> SasrecRanks:
    return SasrecRanks(
        users=np.arange(1, len(filtered) + 1),
        filtered=np.array(filtered),
        unfiltered=np.array(unfiltered or filtered),
        record=make_record(**changes),
    )


def hstu_run(ranks: list[int], seed: int = 0) -> quality.HstuRun:
    return quality.HstuRun(
        folder=Path("run"),
        config={"training": {"seed": seed, "epochs": 60}, "model": {"max_length": 200}, "output": f"runs/{seed}"},
        filtered=np.array(ranks),
        unfiltered=np.array(ranks),
        summary={"epochs": 3, "best_epoch": 2, "seconds": 1.0},
    )


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> InteractionStore:
    return sasrec_ranks.movielens_store(tmp_path_factory.mktemp("movielens") / "store")


def test_bootstrap_interval_agrees_with_drawing_the_users_one_by_one() -> None:
    differences = np.random.default_rng(7).normal(0.02, 1.0, size=(200, 2))
    low, high = quality.paired_bootstrap(differences, samples=20_000, seed=1)
    generator = np.random.default_rng(99)
    means = np.stack([differences[generator.integers(200, size=200)].mean(axis=0) for _ in range(20_000)])
    # Two independent estimates of a quantile of a distribution with standard deviation 0.07.
    np.testing.assert_allclose(low, np.quantile(means, 0.025, axis=0), atol=0.006)
    np.testing.assert_allclose(high, np.quantile(means, 0.975, axis=0), atol=0.006)


def test_bootstrap_draws_all_metrics_from_the_same_users_and_repeats_with_its_seed() -> None:
    one = np.random.default_rng(3).normal(size=50)
    low, high = quality.paired_bootstrap(np.stack([one, one], axis=1), samples=500, seed=5)
    assert low[0] == pytest.approx(low[1], abs=1e-15)
    assert high[0] == pytest.approx(high[1], abs=1e-15)
    again, _ = quality.paired_bootstrap(np.stack([one, one], axis=1), samples=500, seed=5)
    assert (again == low).all()


def test_equal_differences_have_an_interval_of_no_width() -> None:
    low, high = quality.paired_bootstrap(np.full((30, 1), 0.25), samples=100, seed=0)
    assert low[0] == pytest.approx(0.25)
    assert high[0] == pytest.approx(0.25)


def test_difference_is_the_mean_over_seeds_minus_the_baseline() -> None:
    values = quality.result(baseline([1, 20, 3, 11]), [hstu_run([1, 10, 20, 11], 0), hstu_run([2, 10, 60, 11], 1)])
    assert values["filtered"]["hr@10"]["sasrec"] == 0.5
    assert values["filtered"]["hr@10"]["hstu"] == [0.5, 0.5]
    assert values["hstu_minus_sasrec_hr10"] == 0.0
    ndcg = [(1 + 1 / np.log2(11)) / 4, (1 / np.log2(3) + 1 / np.log2(11)) / 4]
    assert values["hstu_minus_sasrec_ndcg10"] == pytest.approx(np.mean(ndcg) - (1 + 0.5) / 4, abs=1e-12)
    assert values["hstu_minus_sasrec_hr50"] == pytest.approx(-1 / 8, abs=1e-12)
    assert values["filtered"]["mrr"]["hstu_mean"] == pytest.approx(
        (1 + 1 / 10 + 1 / 20 + 1 / 11 + 1 / 2 + 1 / 10 + 1 / 60 + 1 / 11) / 8, abs=1e-12
    )


def test_filtered_and_unfiltered_ranks_are_not_mixed_up() -> None:
    values = quality.result(baseline([1, 1], [100, 100]), [hstu_run([1, 1])])
    assert values["filtered"]["hr@50"]["difference"] == 0.0
    assert values["unfiltered"]["hr@50"]["difference"] == 1.0
    assert values["hstu_minus_sasrec_hr50"] == 0.0


def test_runs_that_are_averaged_differ_in_their_seed_alone() -> None:
    runs = [hstu_run([1], 0), hstu_run([1], 1)]
    quality.check_runs(runs)
    with pytest.raises(InputError, match="each seed once"):
        quality.check_runs([*runs, hstu_run([1], 1)])
    runs[1].config["training"]["epochs"] = 80
    with pytest.raises(InputError, match="more than their seed"):
        quality.check_runs(runs)


def test_table_names_what_was_compared_and_says_when_the_baseline_is_not_complete() -> None:
    text = quality.table(quality.result(baseline([1, 2]), [hstu_run([1, 2], 4)]))
    for part in ("RecBole 1.2.1", "seed 2020", "last 50 items", "HSTU 4", "last 200 items", "NDCG@10", "filtered"):
        assert part in text
    assert f"seed {quality.BOOTSTRAP_SEED}" in text
    assert "NOT COMPLETE" not in text
    assert "NOT COMPLETE" in quality.table(quality.result(baseline([1], complete=False), [hstu_run([1])]))


def test_json_is_the_last_line_and_holds_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SasrecRanks, "read", lambda: baseline([1, 20]))
    monkeypatch.setattr(quality, "read_run", lambda folder, _: hstu_run([1, 2], int(folder.name)))
    assert quality.main(["--json", "--runs", "0", "1", "2"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["hstu_minus_sasrec_hr10"] == 0.5
    assert values["hstu_minus_sasrec_ndcg10"] == pytest.approx(0.5 / np.log2(3), abs=1e-12)
    assert values["hstu_seeds"] == [0, 1, 2]
    assert values["machine"]["versions"]["torch"]


def test_input_errors_are_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(SasrecRanks, "read", lambda: baseline([1]))
    assert quality.main(["--runs", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert quality.main(["--seeds", "0"]) == 2


def test_ranks_survive_their_file(tmp_path: Path) -> None:
    ranks = baseline([3, 1], [4, 1], train_loss_per_epoch=[2.5])
    ranks.write(tmp_path / "ranks.json")
    again = SasrecRanks.read(tmp_path / "ranks.json")
    assert again.record == ranks.record
    for name in ("users", "filtered", "unfiltered"):
        assert getattr(again, name).tolist() == getattr(ranks, name).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "version 2"),
        ({"users": [2, 1]}, "ascend"),
        ({"filtered": [3]}, "one filtered"),
        ({"filtered": [0, 1]}, "count from 1"),
        ({"unfiltered": [1, 1]}, "never makes a rank worse"),
        ({"record": {"model": "SASRec"}}, "lacks .*versions"),
    ],
    ids=["version", "users", "length", "rank", "order", "record"],
)
def test_a_damaged_file_of_ranks_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    baseline([3, 1], [4, 1]).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        SasrecRanks.read(path)


def test_a_missing_file_of_ranks_comes_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--rebuild-baseline"):
        SasrecRanks.read(tmp_path / "ranks.json")


def test_an_unfinished_run_is_refused_with_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a finished run.*metrics\.json"):
        quality.read_run(tmp_path, baseline([1]))


@needs_recbole_data
def test_export_holds_every_interaction_in_order_of_time_and_file(movielens: InteractionStore) -> None:
    distribution = importlib.metadata.distribution("recbole")
    source = Path(str(distribution.locate_file("recbole/dataset_example/ml-100k/ml-100k.inter")))
    rows = [line.split() for line in source.read_text().splitlines()[1:]]
    ordered = sorted(rows, key=lambda row: (int(row[0]), float(row[3])))  # stable: ties stay in file order
    header, *exported = sasrec_ranks.export_inter(movielens).decode().splitlines()
    assert header.split() == ["user_id:token", "item_id:token", "timestamp:float"]
    assert [line.split()[:2] for line in exported] == [row[:2] for row in ordered]
    positions = [int(line.split()[2]) for line in exported]
    users = [row[0] for row in ordered]
    starts = [i for i in range(len(users)) if i == 0 or users[i] != users[i - 1]]
    assert [i for i, position in enumerate(positions) if position == 0] == starts
    assert all(after == before + 1 for before, after in itertools.pairwise(positions) if after)


@needs_recbole_data
def test_scores_are_ranked_against_the_last_item_with_all_others_seen(
    movielens: InteractionStore, tmp_path: Path
) -> None:
    scores = np.random.default_rng(0).normal(size=(movielens.num_users, movielens.num_items)).astype(np.float32)
    np.save(tmp_path / "scores.npy", scores)
    checksums = {
        "data_sha256": hashlib.sha256(sasrec_ranks.export_inter(movielens)).hexdigest(),
        "users_sha256": hashlib.sha256(np.arange(1, 944).tobytes()).hexdigest(),
        "items_sha256": hashlib.sha256(np.arange(1, 1683).tobytes()).hexdigest(),
        "scores_sha256": hashlib.sha256((tmp_path / "scores.npy").read_bytes()).hexdigest(),
    }
    (tmp_path / "record.json").write_text(json.dumps(make_record(**checksums)))
    ranks = sasrec_ranks.ranks_from_scores(tmp_path / "scores.npy", tmp_path / "record.json", movielens)
    for user in (0, 1, 500, 942):
        *seen, target = movielens.sequence(user)[0].tolist()
        order = sorted(range(movielens.num_items), key=lambda item: (-scores[user, item], item))
        assert ranks.unfiltered[user] == order.index(target) + 1
        assert ranks.filtered[user] == [item for item in order if item not in set(seen)].index(target) + 1
    np.save(tmp_path / "scores.npy", scores + 1)
    with pytest.raises(InputError, match="scores_sha256"):
        sasrec_ranks.ranks_from_scores(tmp_path / "scores.npy", tmp_path / "record.json", movielens)


@needs_recbole_data
def test_recorded_baseline_is_complete_and_of_this_data(movielens: InteractionStore) -> None:
    ranks = SasrecRanks.read()
    quality.check_data(movielens, ranks)
    assert ranks.users.tolist() == movielens.raw_user_ids.tolist()
    assert int(ranks.unfiltered.max()) <= movielens.num_items
    assert ranks.record["complete"] is True
    assert ranks.record["users_sha256"] == hashlib.sha256(movielens.raw_user_ids.tobytes()).hexdigest()
    assert ranks.record["items_sha256"] == hashlib.sha256(movielens.raw_item_ids.tobytes()).hexdigest()
    assert ranks.record["samples"] == {"train": 100_000 - 3 * 943, "valid": 943, "test": 943}
    assert ranks.record["versions"]["recbole"] == "1.2.1"


def test_recorded_baseline_used_recboles_defaults() -> None:
    record = SasrecRanks.read().record
    expected = {"loss_type": "CE", "MAX_ITEM_LIST_LENGTH": 50, "stopping_step": 10, "valid_metric": "NDCG@10"}
    expected |= {"seed": 2020, "train_batch_size": 2048, "learner": "adam", "learning_rate": 0.001, "epochs": 300}
    assert {name: record["config"][name] for name in expected} == expected
    # RecBole stops after more than `stopping_step` validations without a better one.
    assert record["epochs_run"] == min(record["best_epoch"] + 11, 300)
    assert record["best_valid_ndcg@10"] == max(record["valid_ndcg@10_per_epoch"])


@needs_recbole_data
def test_a_run_on_other_data_is_refused(movielens: InteractionStore, tmp_path: Path) -> None:
    users = movielens.raw_user_ids
    np.savez(tmp_path / "test_ranks.npz", users=users, filtered=users, unfiltered=users)
    (tmp_path / "metrics.json").write_text("{}")
    config = {"data": {"store": str(movielens.path)}, "training": {"seed": 3}, "model": {"max_length": 200}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match="not the data of the baseline"):
        quality.read_run(tmp_path, baseline(users.tolist(), data_sha256="0"))
    digest = hashlib.sha256(sasrec_ranks.export_inter(movielens)).hexdigest()
    run = quality.read_run(tmp_path, baseline(users.tolist(), data_sha256=digest))
    assert (run.seed, run.max_length) == (3, 200)
    with pytest.raises(InputError, match="not the 2 of the baseline"):
        quality.read_run(tmp_path, baseline([1, 2], data_sha256=digest))
