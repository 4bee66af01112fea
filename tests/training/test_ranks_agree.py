"""Two ranks and one rank train the same model: same global batches, negatives, dropout and initial values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import runs

pytestmark = pytest.mark.timeout(4 * runs.TIMEOUT)
TOLERANCE = 1e-5  # relative to the loss of the step; float32 sums in another order differ by about 1e-7


@pytest.mark.usefixtures("one_rank", "two_ranks")
class TestLosses:
    @pytest.mark.parametrize(
        ("one", "two", "steps"), [("one", "two", 50), ("one-shared", "two-shared", 12)], ids=["own", "shared negatives"]
    )
    def test_agree_step_by_step(self, tiny: Path, one: str, two: str, steps: int) -> None:
        of_one, of_two = runs.losses(tiny / one), runs.losses(tiny / two)
        assert len(of_one) == len(of_two) >= steps
        difference = np.abs(of_two / of_one - 1)
        print(f"{two}: largest relative difference {difference.max():.1e} at step {difference.argmax() + 1}")
        assert difference.max() <= TOLERANCE
        assert of_one.std() > 0.1  # something is learned, so that agreement means something

    def test_agree_where_a_rank_has_no_sample(self, tiny: Path) -> None:
        store_users = runs.histories(tiny)
        tokens = [record["tokens"] for record in runs.records(tiny / "two")]
        lengths = {len(items) - 2 for items in store_users.values()}
        last_of_epochs = tokens[runs.STEPS_PER_EPOCH - 1 :: runs.STEPS_PER_EPOCH]
        assert last_of_epochs
        assert set(last_of_epochs) <= lengths  # one user: the second rank has none
        assert tokens == [record["tokens"] for record in runs.records(tiny / "one")]

    def test_of_the_two_kinds_of_negatives_differ(self, tiny: Path) -> None:
        assert runs.losses(tiny / "one")[0] != runs.losses(tiny / "one-shared")[0]


@pytest.mark.usefixtures("one_rank", "two_ranks")
def test_validations_and_the_test_agree(tiny: Path) -> None:
    for one, two in zip(
        runs.records(tiny / "one", "validation.jsonl"), runs.records(tiny / "two", "validation.jsonl"), strict=True
    ):
        assert one["step"] == two["step"]
        assert one["filtered"]["ndcg@10"] == pytest.approx(two["filtered"]["ndcg@10"], rel=1e-3)
    one_metrics, two_metrics = runs.metrics(tiny / "one"), runs.metrics(tiny / "two")
    assert (one_metrics["world_size"], two_metrics["world_size"]) == (1, 2)
    for name in ("best_epoch", "best_step", "epochs", "steps", "stopped_early", "test_users", "store"):
        assert one_metrics[name] == two_metrics[name], name
    assert one_metrics["test"]["filtered"] == pytest.approx(two_metrics["test"]["filtered"], rel=1e-3)


@pytest.mark.usefixtures("one_rank")
def test_the_summary_tells_which_kernels_ran_and_why_no_faster_ones(tiny: Path) -> None:
    (attention,) = runs.metrics(tiny / "one")["kernels"]["jagged_attention"]
    if attention["implementation"] == "cpu":
        assert attention["passed_over"] == {}
        assert attention["details"]["vectors"]
    else:
        assert attention["implementation"] == "reference"
        assert attention["passed_over"]["cpu"]
