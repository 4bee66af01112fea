"""Tables are chosen by what the warm-up has counted, and every update has its learning rate, in the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.npu.ranks import Call, Outcome, RankPool
from turbogr_plugin.pipeline import TrainPipelineFineGrained

pytestmark = pytest.mark.timeout(240)

RUNS = "tests.pipeline.table_choice_runs:"
ROWS = {"bag_a": 40, "bag_b": 56, "sequence": 48}  # ids are uniform: alpha is about 1 / rows
#: By name: ranks, limit, staleness, start_batch, own group, what is to be chosen.
CHOICES: dict[str, tuple[int, float, int, int, bool, dict[str, Any]]] = {
    "bag_a keeps the bags back": (2, 0.0235, 1, 3, True, {"staleness": 1, "exact": ["bags"]}),
    "one rank": (1, 0.0235, 1, 4, True, {"staleness": 1, "exact": ["bags"]}),
    "shared group": (2, 0.0235, 1, 3, False, {"staleness": 1, "exact": ["bags"]}),
    "all stale": (2, 0.5, 2, 2, True, {"staleness": 2}),
    "twice the staleness is too much for all": (2, 0.0235, 2, 3, True, {"staleness": 0}),
}


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> dict[str, Outcome]:
    """Every call, once."""
    calls = {}
    for name, (size, limit, staleness, start_batch, own_group, expected) in CHOICES.items():
        arguments = {"limit": limit, "staleness": staleness, "start_batch": start_batch, "steps": 9}
        arguments |= {"expected": expected, "own_group": own_group}
        calls[name] = Call(RUNS + "chosen", arguments, size)
    for staleness in (0, 1):
        calls[f"rates {staleness}"] = Call(RUNS + "rates", {"staleness": staleness, "steps": 6}, 2)
    return dict(zip(calls, ranks.run(list(calls.values()), timeout=200), strict=True))


@pytest.mark.parametrize("name", CHOICES)
def test_a_run_that_chooses_its_tables_is_the_run_that_is_told_them(name: str, outcomes: dict[str, Outcome]) -> None:
    _, _, staleness, start_batch, _, expected = CHOICES[name]
    for rank in outcomes[name].result():
        assert rank["error"] < 1e-9, rank
        assert rank["steps"] == start_batch
        stale = {module: value for module, value in rank["modules"].items() if value}
        exact = set(expected.get("exact", ())) if expected["staleness"] else {"bags", "sequences"}
        assert stale == {module: staleness for module in ("bags", "sequences") if module not in exact}, rank
        assert rank["losses"] and rank["values"]


def test_every_update_has_the_learning_rate_of_its_step(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["rates 0"].result():
        assert rank["losses"] and rank["values"], rank["seen"]
        assert rank["rates"][0] == rank["rates"][1]


def test_learning_rates_that_change_do_not_race_with_stale_updates(
    outcomes: dict[str, Outcome], ranks: RankPool
) -> None:
    again = ranks.run([Call(RUNS + "rates", {"staleness": 1, "steps": 6}, 2)] * 2)
    found = [outcome.result()[0]["seen"][0] for outcome in (outcomes["rates 1"], *again)]
    assert found[0] == found[1] == found[2] and found[0] != outcomes["rates 0"].result()[0]["seen"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": 0, "start_batch": 5}, "staleness of at least 1, got staleness=0"),
        ({"staleness": 1, "start_batch": 1}, "start_batch of at least 2, .*got start_batch=1"),
        ({"staleness": 1, "start_batch": 5, "staleness_limit": -1.0}, "staleness_limit must be a positive number"),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(options: dict[str, Any], message: str) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        TrainPipelineFineGrained(model, optimizer, torch.device("cpu"), **{"staleness_limit": 0.05, **options})
