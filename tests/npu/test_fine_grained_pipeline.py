"""TrainPipelineFineGrained on npu: its losses are right, nothing is unordered, and the caller never waits.

The functions that run on the ranks are in fine_grained_runs.py; all calls of this module go to the pool at once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.npu.ranks import Call, Outcome, RankPool
from tests.npu.test_pipelines_streams import HOST_SYNCS_OF_TORCHREC

pytestmark = pytest.mark.timeout(240)

RUNS = "tests.npu.fine_grained_runs:"
GROUPS = {"name": "small", "group": 1}
#: Model, ranks, ranks of a group of HierarchicalModelParallel.
EQUAL: list[tuple[str, int, int | None]] = [("dlrm", 2, None), ("hstu", 1, None), ("hstu", 2, 1)]
MORE_EQUAL: list[tuple[str, int, int | None]] = [
    *(("dlrm", 1, None), ("dlrm", 4, None), ("hstu", 2, None), ("hstu", 4, None)),
    *(("dlrm", 2, 1), ("dlrm", 4, 2), ("hstu", 4, 2)),
]
#: By name: ranks, case, staleness of each step, further arguments.
SIMULATED: dict[str, tuple[int, dict[str, Any], list[int], dict[str, Any]]] = {
    "staleness 1, evaluated meanwhile": (2, {}, [0] + [1] * 6, {"options": {"staleness": 1}, "evaluate_at": [2, 5]}),
    "staleness 2, groups of 1": (2, {"group": 1}, [0, 1] + [2] * 5, {"options": {"staleness": 2}}),
}
#: Losses are of order 1: float32 against float64.
TOLERANCE = 1e-6
#: Pipelines in which everything is in order.
ORDERED: dict[str, dict[str, Any]] = {
    "staleness 0": {"case": {"name": "small"}, "options": {}, "read_at": [3, 5]},
    "staleness 1": {"case": {"name": "small"}, "options": {"staleness": 1}},
    "staleness 2, evaluated, pinned": {
        "case": {"name": "small"},
        "options": {"staleness": 2},
        "evaluate_at": [2, 5],
        "read_at": [5],
        "pin": True,
    },
    "staleness 1, groups": {"case": GROUPS, "options": {"staleness": 1}},
}
MORE_ORDERED: dict[str, dict[str, Any]] = {
    "staleness 2": {"case": {"name": "small"}, "options": {"staleness": 2}},
    "staleness 1, shared group": {"case": {"name": "small", "own_group": False}, "options": {"staleness": 1}},
    "staleness 0, groups": {"case": GROUPS, "options": {}, "read_at": [3, 6]},
    "staleness 2, groups": {"case": GROUPS, "options": {"staleness": 2}, "evaluate_at": [2, 5], "read_at": [5]},
    "staleness 1, filled": {"case": {"name": "small"}, "options": {"staleness": 1}, "fill": True},
    "staleness 1, copied behind forward": {
        "case": {"name": "small"},
        "options": {"staleness": 1, "enqueue_batch_after_forward": True},
    },
    "staleness 1, inputs cleared": {
        "case": {"name": "small"},
        "options": {"staleness": 1, "clear_data_dist_inputs": True},
    },
    "hstu, staleness 1": {"case": {"name": "hstu"}, "options": {"staleness": 1}},
    "dlrm, staleness 1": {"case": {"name": "dlrm"}, "options": {"staleness": 1}},
}
#: Waits without which something is unordered, each with what shows it.
WITHOUT: dict[str, dict[str, Any]] = {
    "dense_forward after lookup": {"case": {"name": "small"}, "options": {"staleness": 1}},
    "embedding_backward after dense_backward": {"case": {"name": "small"}, "options": {"staleness": 1}},
    "record of the gradients": {"case": {"name": "small"}, "options": {"staleness": 1}},
    "update after the exchange": {"case": GROUPS, "options": {"staleness": 1}},
}
MORE_WITHOUT: dict[str, dict[str, Any]] = {
    "feature_dist after load": {"case": {"name": "small"}, "options": {"staleness": 1}},
    "lanes after the caller": {"case": GROUPS, "options": {}},
    "record of the embeddings": {"case": {"name": "small"}, "options": {"staleness": 1}, "evaluate_at": [2, 4]},
    "event of finish": {"case": {"name": "small"}, "options": {}, "read_at": [2, 4]},
    "records of the exchange": {"case": GROUPS, "options": {"staleness": 1}},
    "exchange after the lookup": {"case": GROUPS, "options": {"staleness": 1}},
}


def _compared(model: str, ranks: int, group: int | None, steps: int = 4) -> Call:
    case = {"name": model, "group": group}
    return Call(RUNS + "compared", {"case": case, "steps": steps, "options": {}}, ranks)


def _stepped(arguments: dict[str, Any], steps: int, without: str = "") -> Call:
    return Call(RUNS + "stepped", {**arguments, "steps": steps, "without": without}, 2)


def _calls() -> dict[str, Call]:
    calls = {f"equal {case}": _compared(*case) for case in EQUAL}
    for name, (ranks, case, staleness, others) in SIMULATED.items():
        arguments = {"case": case, "staleness": staleness, **others}
        calls[name] = Call(RUNS + "against_the_simulation", arguments, ranks)
    calls["dyadic"] = Call(RUNS + "dyadic", {"steps": 4, "group": 2}, 4)
    calls |= {f"ordered {name}": _stepped(arguments, 8) for name, arguments in ORDERED.items()}
    calls |= {f"without {name}": _stepped(arguments, 6, name) for name, arguments in WITHOUT.items()}
    return calls


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> dict[str, Outcome]:
    """Every call, once."""
    calls = _calls()
    return dict(zip(calls, ranks.run(list(calls.values()), timeout=220), strict=True))


def _check_equal(outcome: Outcome) -> None:
    for rank in outcome.result():
        assert rank["races"] == []
        assert rank["moved"] > 1e-5
        assert rank["losses"], rank["seen"]
        assert rank["values"]


def _check_ordered(outcome: Outcome) -> None:
    for rank in outcome.result():
        assert rank["races"] == []


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_losses_and_values_are_those_of_torchrecs_pipeline_on_npu_to_the_last_bit(
    case: Any, outcomes: dict[str, Outcome]
) -> None:
    _check_equal(outcomes[f"equal {case}"])


def test_groups_end_as_one_where_sums_do_not_round(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["dyadic"].result():
        assert rank.pop("races") == []
        assert all(rank.values()), rank


@pytest.mark.parametrize("name", SIMULATED)
def test_stale_losses_are_those_of_the_simulated_delayed_update(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[name].result():
        assert rank["races"] == []
        assert max(rank["losses"]) <= TOLERANCE, rank
        assert rank["values"] <= TOLERANCE, rank["values"]


@pytest.mark.parametrize("name", ORDERED)
def test_no_use_of_memory_is_unordered(name: str, outcomes: dict[str, Outcome]) -> None:
    _check_ordered(outcomes[f"ordered {name}"])


@pytest.mark.parametrize("name", WITHOUT)
def test_without_one_of_the_waits_something_is_unordered(name: str, outcomes: dict[str, Outcome]) -> None:
    assert any(rank["races"] for rank in outcomes[f"without {name}"].result())


def test_the_caller_never_waits_for_the_device_and_the_lanes_only_where_torchrec_makes_them(
    outcomes: dict[str, Outcome],
) -> None:
    for rank in outcomes["ordered staleness 1"].result():
        assert not rank["inline"]
        assert rank["callers_syncs"] == {}, json.dumps(rank["callers_syncs"], indent=1)
        assert rank["syncs"]
        for place in rank["syncs"]:
            lines = place.partition(" at ")[2].split(" < ")
            ours = next(line for line in lines if "/turbogr_plugin/backend/" not in line)
            assert any(file in ours for file in HOST_SYNCS_OF_TORCHREC), place


def test_with_groups_the_caller_never_waits_for_the_device(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["ordered staleness 1, groups"].result():
        assert not rank["inline"]
        assert rank["callers_syncs"] == {}, json.dumps(rank["callers_syncs"], indent=1)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_EQUAL, ids=str)
def test_every_model_and_number_of_ranks_has_the_losses_of_torchrecs_pipeline(case: Any, ranks: RankPool) -> None:
    (outcome,) = ranks.run([_compared(*case, steps=20)], timeout=220)
    _check_equal(outcome)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*ORDERED, *MORE_ORDERED])
def test_no_use_of_memory_is_unordered_in_100_steps(name: str, ranks: RankPool) -> None:
    (outcome,) = ranks.run([_stepped((ORDERED | MORE_ORDERED)[name], 100)], timeout=800)
    _check_ordered(outcome)


@pytest.mark.full
def test_without_any_other_of_the_waits_something_is_unordered(ranks: RankPool) -> None:
    calls = [_stepped(arguments, 6, name) for name, arguments in MORE_WITHOUT.items()]
    for name, outcome in zip(MORE_WITHOUT, ranks.run(calls, timeout=220), strict=True):
        assert any(rank["races"] for rank in outcome.result()), name
