"""The command line as a user calls it: what it prints, its exit codes, and what a run leaves in its folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import runs
from turbogr_plugin import __version__

pytestmark = pytest.mark.timeout(4 * runs.TIMEOUT)
COMMANDS = ("prepare", "synthesize", "train", "evaluate", "recommend", "info")
USERS = (1014, 1000, 1420, 1007)  # that the recommend commands ask for


def _one_line(outcome: runs.Outcome) -> str:
    """The message of a refusal: exit code 2, nothing on stdout, one line on stderr."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    return lines[0]


class TestUsage:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_has_help(self, command: str) -> None:
        outcome = runs.run_here(command, "--help")
        assert outcome.code == 0
        assert f"turbogr {command}" in outcome.out
        assert command in runs.run_here("--help").out

    def test_no_command_shows_the_commands_and_fails(self) -> None:
        outcome = runs.run_here()
        assert outcome.code == 2
        assert all(command in outcome.out for command in COMMANDS)

    def test_an_unknown_command_is_named_with_the_known_ones(self) -> None:
        message = _one_line(runs.run_here("trian"))
        assert "'trian'" in message
        assert all(command in message for command in COMMANDS)

    def test_version(self) -> None:
        assert runs.run_here("--version") == runs.Outcome(0, f"{__version__}\n", "")


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            pytest.param(["--training.epcohs", "3"], ["--training.epcohs"], id="misspelt option"),
            pytest.param(["--training.epoch", "3"], ["--training.epoch"], id="abbreviated option"),
            pytest.param(["--training.epochs", "three"], ["training.epochs", "three"], id="word for a number"),
            pytest.param(["--training.epochs", "0"], ["training.epochs must be at least 1, got 0"], id="no epochs"),
            pytest.param(["--model.size", "huge"], ["model.size", "huge", "tiny"], id="unknown size"),
            pytest.param(["--device", "abacus"], ["'abacus'", "cpu"], id="unknown device"),
        ],
    )
    def test_in_an_option_is_one_line_that_names_it(self, tiny: Path, arguments: list[str], parts: list[str]) -> None:
        outcome = runs.run_here("train", "--config", str(tiny / "tiny.yaml"), *arguments)
        message = " ".join(outcome.err.split())
        assert outcome.code == 2
        assert "usage:" not in message
        for part in ["turbogr train: ", *parts]:
            assert part in message

    def test_a_misspelt_key_of_the_file_is_named(self, tiny: Path) -> None:
        (tiny / "misspelt.yaml").write_text(runs.CONFIG.replace("global_batch_size", "global_batchsize"))
        message = _one_line(runs.run_here("train", "--config", str(tiny / "misspelt.yaml")))
        assert "'training'" in message
        assert "'global_batchsize'" in message

    def test_a_missing_config_is_named(self, tiny: Path) -> None:
        assert str(tiny / "none.yaml") in _one_line(runs.run_here("train", "--config", str(tiny / "none.yaml")))

    def test_a_missing_input_of_prepare_is_named(self, tiny: Path) -> None:
        outcome = runs.run_here("prepare", str(tiny / "no.txt"), "--format", "text", "--output", str(tiny / "never"))
        assert str(tiny / "no.txt") in _one_line(outcome)
        assert not (tiny / "never").exists()

    def test_prepare_does_not_touch_what_is_no_store(self, tiny: Path) -> None:
        log = str(tiny / "log.txt")
        outcome = runs.run_here("prepare", log, "--format", "text", "--output", log)
        assert outcome.code == 2
        assert "not a prepared store" in outcome.err
        assert len(runs.histories(tiny)) == runs.USERS

    def test_a_folder_that_is_no_run_is_named(self, tiny: Path) -> None:
        for command, more in (("evaluate", []), ("recommend", ["--users", "1000"])):
            message = _one_line(runs.run_here(command, "--run", str(tiny / "store"), *more))
            assert str(tiny / "store/config.yaml") in message
        assert str(tiny) in _one_line(runs.run_here("info", str(tiny)))

    @pytest.mark.parametrize(
        ("command", "parts"),
        [
            ("unknown user", ["no user 5 ", "1 unknown of 2"]),
            ("negative k", ["k is -1"]),
            ("huge user id", ["64-bit", str(1 << 63)]),
            ("unknown checkpoint", ["'step-1'", "best"]),
            ("damaged store", ["times.npy", "sha256", "turbogr prepare"]),
            ("store of another version", ["version 99", "turbogr prepare"]),
            ("other items", ["two/checkpoints/best", "items.npy of the store has another checksum"]),
            ("store is gone", ["store-gone", "is not a prepared store"]),
        ],
    )
    def test_is_one_line_that_names_it(self, one_rank: dict[str, runs.Outcome], command: str, parts: list[str]) -> None:
        message = _one_line(one_rank[command])
        for part in parts:
            assert part in message

    @pytest.mark.usefixtures("one_rank")
    def test_evaluating_makes_no_store(self, tiny: Path) -> None:
        assert not (tiny / "store-gone").exists()

    @pytest.mark.parametrize(
        ("command", "part"), [("missing store", "nowhere is not a prepared store"), ("file in the way", "log.txt")]
    )
    def test_on_one_rank_ends_all_with_one_message(
        self, two_ranks: dict[str, list[runs.Outcome]], command: str, part: str
    ) -> None:
        first, second = two_ranks[command]
        assert part in _one_line(first)
        assert second == runs.Outcome(2, "", "")

    def test_closes_the_report_of_the_launcher(self, tiny: Path) -> None:
        arguments = ["train", "--config", "tiny.yaml", "--data.store", "nowhere", "--output", "never"]
        done = runs.turbogr(*arguments, ranks=2, folder=tiny)
        assert done.returncode != 0
        message = "turbogr train: nowhere is not a prepared store"
        *_, last, border = done.stderr.rstrip().splitlines()
        assert message in last
        assert set(border) == {"="}
        assert 'File "/' not in done.stderr.split("ChildFailedError")[1]
        assert not (tiny / "never").exists()


class TestPrepared:
    def test_store_is_described(self, tiny: Path) -> None:
        outcome = runs.run_here("info", str(tiny / "store"))
        rows = sum(map(len, runs.histories(tiny).values()))
        assert outcome.code == 0
        assert f"{runs.USERS} users" in outcome.out
        assert f"{rows:,} interactions" in outcome.out

    def test_synthetic_logs_are_read_back(self, tmp_path: Path) -> None:
        made = runs.run_here("synthesize", "--output", str(tmp_path / "logs"), "--rows", "2000", "--users", "20")
        assert made.code == 0, made.err
        store = str(tmp_path / "store")
        outcome = runs.run_here("prepare", str(tmp_path / "logs"), "--format", "kuairand", "--output", store)
        assert outcome.code == 0, outcome.err
        assert "read 2,000 rows" in outcome.out


class TestTrained:
    def test_terminal_shows_our_lines_alone(self, two_ranks: dict[str, list[runs.Outcome]]) -> None:
        first, second = two_ranks["train"]
        assert (first.code, second.code) == (0, 0), first.err
        assert second.out == second.err == ""
        assert all(line.startswith("epoch ") for line in first.err.splitlines()), first.err
        filtered, unfiltered, folder = first.out.splitlines()
        for line in (filtered, unfiltered):
            assert all(
                f"{metric} 0." in line or f"{metric} 1." in line for metric in ("HR@10", "HR@50", "NDCG@10", "MRR")
            )
        assert folder == "run folder: two"

    @pytest.mark.usefixtures("two_ranks")
    def test_run_folder_holds_what_is_promised(self, tiny: Path) -> None:
        from PIL import Image
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run = tiny / "two"
        with Image.open(run / "curves.png") as picture:
            assert picture.format == "PNG"
            assert picture.width >= 800
            assert picture.height >= 300
        events = EventAccumulator(str(run / "tensorboard")).Reload()
        points = events.Scalars("train/loss")
        assert [point.step for point in points] == [record["step"] for record in runs.records(run)]
        np.testing.assert_allclose([point.value for point in points], runs.losses(run), rtol=1e-6)
        assert any(tag.startswith("validation/ndcg") for tag in events.Tags()["scalars"])
        assert sorted(path.name for path in (run / "checkpoints").iterdir())[0] == "best"

    @pytest.mark.usefixtures("two_ranks")
    def test_test_ranks_give_the_metrics(self, tiny: Path) -> None:
        metrics = runs.metrics(tiny / "two")
        with np.load(tiny / "two/test_ranks.npz") as saved:
            assert saved["users"].tolist() == sorted(runs.histories(tiny))
            for kind in ("filtered", "unfiltered"):
                ranks = saved[kind].astype(np.float64)
                assert ranks.min() >= 1
                of_kind = metrics["test"][kind]
                assert of_kind["mrr"] == pytest.approx((1 / ranks).mean(), rel=1e-12)
                for k in (10, 50):
                    assert of_kind[f"hr@{k}"] == pytest.approx((ranks <= k).mean(), rel=1e-12)
                    gains = np.where(ranks <= k, 1 / np.log2(ranks + 1), 0)
                    assert of_kind[f"ndcg@{k}"] == pytest.approx(gains.mean(), rel=1e-12)
            assert (saved["filtered"] <= saved["unfiltered"]).all()

    def test_evaluate_prints_the_same_figures(
        self, two_ranks: dict[str, list[runs.Outcome]], one_rank: dict[str, runs.Outcome]
    ) -> None:
        outcome = one_rank["evaluate"]
        assert outcome.code == 0, outcome.err
        assert outcome.err == ""
        assert outcome.out.splitlines() == two_ranks["train"][0].out.splitlines()[:2]

    @pytest.mark.usefixtures("one_rank")
    def test_saved_config_trains_the_same(self, tiny: Path) -> None:
        anew = runs.losses(tiny / "anew")
        assert len(anew) == 2 * runs.STEPS_PER_EPOCH
        np.testing.assert_array_equal(anew, runs.losses(tiny / "one")[: len(anew)])

    @pytest.mark.usefixtures("two_ranks")
    def test_info_shows_the_metrics(self, tiny: Path) -> None:
        outcome = runs.run_here("info", str(tiny / "two"))
        assert outcome.code == 0
        assert '"best_epoch"' in outcome.out


class TestRecommended:
    def test_items_are_unseen_and_known_and_of_the_users_asked_for(
        self, tiny: Path, two_ranks: dict[str, list[runs.Outcome]]
    ) -> None:
        first, second = two_ranks["recommend"]
        assert (first.code, second.code) == (0, 0), first.err
        assert first.err == second.out == second.err == ""
        histories = runs.histories(tiny)
        known = {item for items in histories.values() for item in items}
        lines = [line.split("\t") for line in first.out.splitlines()]
        assert [int(user) for user, _ in lines] == list(USERS)
        for user, listed in lines:
            items = list(map(int, listed.split(" ")))
            assert len(set(items)) == 7
            assert set(items) <= known - set(histories[int(user)])

    def test_items_do_not_depend_on_the_number_of_ranks_or_the_other_users(
        self, two_ranks: dict[str, list[runs.Outcome]], one_rank: dict[str, runs.Outcome]
    ) -> None:
        assert one_rank["recommend"].code == 0
        assert one_rank["recommend"].out == two_ranks["recommend"][0].out
        assert two_ranks["recommend to one user"][0].out.splitlines() == [one_rank["recommend"].out.splitlines()[2]]
