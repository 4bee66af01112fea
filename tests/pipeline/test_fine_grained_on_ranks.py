"""TrainPipelineFineGrained computes what it should on 1, 2 and 4 ranks; all calls go to the pool at once.

Two independent judges: TorchRec's own pipelines, to the last bit, and a simulation without sharding in float64.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.npu.ranks import Call, Outcome, RankPool

pytestmark = pytest.mark.timeout(240)

RUNS = "tests.pipeline.fine_grained_runs:"
OWN, SHARED = True, False
#: Model, ranks, whether the tables have a process group of their own.
EXACT = [
    *(("dlrm", 1, OWN), ("dlrm", 2, OWN), ("dlrm", 4, OWN)),
    *(("hstu", 1, OWN), ("hstu", 2, OWN), ("hstu", 4, OWN)),
    ("small", 2, SHARED),
]
SEMI_SYNC = [("small", 2, OWN), ("dlrm", 2, SHARED), ("hstu", 2, OWN)]
STEPS = 6

#: By name: ranks, case, staleness of each step, options, further arguments.
SIMULATED: dict[str, tuple[int, dict[str, Any], list[int], dict[str, Any], dict[str, Any]]] = {
    "exact": (2, {}, [0] * 8, {}, {}),
    "staleness 1": (2, {}, [0] + [1] * 7, {"staleness": 1}, {}),
    "staleness 1, shared group": (2, {"own_group": False}, [0] + [1] * 7, {"staleness": 1}, {}),
    "staleness 1, groups of 2": (4, {"group": 2}, [0] + [1] * 7, {"staleness": 1}, {}),
    "staleness 2": (4, {}, [0, 1] + [2] * 6, {"staleness": 2}, {}),
    "staleness 2, groups of 1": (2, {"group": 1}, [0, 1] + [2] * 6, {"staleness": 2}, {}),
    "from batch 3 on": (2, {}, [0, 0, 0, 1, 2, 2, 2, 2], {"staleness": 2, "start_batch": 3}, {}),
    "switched": (
        *(2, {}, [0, 1, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1], {"staleness": 2}),
        {"switches": {4: 0, 8: 1}},
    ),
    "evaluated meanwhile": (2, {}, [0] + [1] * 7, {"staleness": 1}, {"evaluate_at": [2, 5]}),
    "bags exact": (1, {}, [0] + [1] * 7, {"staleness": 1}, {"exact": "bags"}),
    "sequences exact, groups of 2": (4, {"group": 2}, [0] + [1] * 7, {"staleness": 1}, {"exact": "sequences"}),
}
#: Losses and weights are of order 1: float32 against float64 after eight steps.
TOLERANCE = 1e-6


def _name(model: str, ranks: int, own_group: bool) -> str:
    return f"{model}, {ranks} ranks{'' if own_group else ', shared group'}"


def _calls() -> dict[str, Call]:
    calls = {}
    for kind, cases in (("base", EXACT), ("semi_sync", SEMI_SYNC)):
        options: dict[str, Any] = {"staleness": 1} if kind == "semi_sync" else {}
        theirs: dict[str, Any] = {"start_batch": 0} if kind == "semi_sync" else {}
        for model, ranks, own_group in cases:
            arguments = {
                "case": {"name": model, "own_group": own_group},
                "steps": STEPS,
                "options": options,
                "kind": kind,
                "their_options": theirs,
            }
            calls[f"{kind} {_name(model, ranks, own_group)}"] = Call(RUNS + "compared", arguments, ranks)
    for staleness in (0, 1):  # what the optimizer of the dense part updates is never stale
        arguments = {
            "case": {"name": "dlrm", "sharding": "data_parallel"},
            "steps": STEPS,
            "options": {"staleness": staleness},
        }
        calls[f"data-parallel tables, staleness {staleness}"] = Call(RUNS + "compared", arguments, 2)
    for own_group in (OWN, SHARED):
        calls[f"lane, own group {own_group}"] = Call(RUNS + "lane_of_the_sparse_side", {"own_group": own_group}, 2)
    for name, (ranks, case, staleness, options, others) in SIMULATED.items():
        arguments = {"case": case, "staleness": staleness, "options": options, **json.loads(json.dumps(others))}
        calls[name] = Call(RUNS + "against_the_simulation", arguments, ranks)
    calls["hooks"] = Call(RUNS + "hooked", {"staleness": 1}, 2)
    calls["no gradient"] = Call(RUNS + "without_gradient_on_a_rank", {}, 2)
    calls["20 steps"] = Call(RUNS + "groups_against_one", {"steps": 20, "group": 2}, 4)
    calls["dyadic"] = Call(RUNS + "dyadic", {"steps": 5, "group": 2}, 4)
    calls["averaged"] = Call(RUNS + "averaged", {"interval": 3}, 2)
    return calls


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> dict[str, Outcome]:
    """Every call, once."""
    calls = _calls()
    return dict(zip(calls, ranks.run(list(calls.values()), timeout=220), strict=True))


@pytest.mark.parametrize(
    "name",
    [f"base {_name(*case)}" for case in EXACT]
    + [f"semi_sync {_name(*case)}" for case in SEMI_SYNC]
    + ["data-parallel tables, staleness 0", "data-parallel tables, staleness 1"],
)
def test_losses_and_values_are_those_of_torchrecs_pipeline_to_the_last_bit(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    for rank in outcomes[name].result():
        assert rank["steps"] == STEPS
        assert rank["moved"] > 1e-6
        assert rank["losses"], rank["seen"]
        assert rank["values"]


@pytest.mark.parametrize("name", SIMULATED)
def test_losses_and_values_are_those_of_the_simulated_delayed_update(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[name].result():
        assert max(rank["losses"]) <= TOLERANCE, rank
        assert rank["values"] <= TOLERANCE, rank["values"]


def test_staleness_makes_a_difference_that_the_simulation_would_show(outcomes: dict[str, Outcome]) -> None:
    seen = [outcomes[name].result()[0]["seen"] for name in ("exact", "staleness 1")]
    assert seen[0][0] == seen[1][0]
    assert max(abs(one - other) for one, other in zip(*seen, strict=True)) > 1e4 * TOLERANCE


def test_groups_end_as_one_group_without_a_pipeline_but_for_rounding(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["20 steps"].result():
        assert 0 < max(rank.values()) <= 1e-5, rank


def test_groups_end_as_one_group_to_the_last_bit_where_sums_do_not_round(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["dyadic"].result():
        assert rank == dict.fromkeys(("losses", "tables", "replicas", "moved"), True)


def test_groups_that_average_do_so_as_under_torchrecs_pipeline(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["averaged"].result():
        assert rank == {"losses": True, "values": True}


def test_a_rank_without_a_gradient_lets_the_others_learn(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["no gradient"].result():
        assert rank == {"losses": True, "values": True}


def test_backward_hooks_of_sharded_modules_run_once_per_step(outcomes: dict[str, Outcome]) -> None:
    for calls in outcomes["hooks"].result():
        assert [calls.count(module) for module in ("bags", "sequences")] == [4, 4]


def test_the_sparse_side_has_a_thread_where_it_has_a_group(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[f"lane, own group {OWN}"].result():
        assert rank == {"threads": ["turbogr-sparse"], "reasons": []}


def test_with_a_shared_group_the_caller_runs_the_sparse_side_and_is_told_why_once(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[f"lane, own group {SHARED}"].result():
        assert rank["threads"] == ["MainThread"]
        assert len(rank["reasons"]) == 1 and "shares a process group" in rank["reasons"][0]
