"""Batches that are balanced between ranks which read files of their own, on four ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.npu.ranks import Call, RankPool
from tests.sharding.balanced_runs import ROWS, ids_of, length_of
from turbogr_plugin.sharding.balanced_batches import BalancedBatches
from turbogr_plugin.sharding.batch_balance import idle_share
from turbogr_plugin.sharding.sequence_cost import SequenceCost

RUN = "tests.sharding.balanced_runs:"
SIZES = {
    "as many": [[16, 16, 16]] * 4,
    "unequal": [[5, 9], [], [1, 0, 30, 2], [7]],
    "one rank alone": [[], [], [3, 9, 1], []],
    "nothing": [[], [], [], []],
    "no samples": [[0], [0, 0], [], [0]],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "single batches": {},
    "equal counts": {"equal_counts": True},
    "window": {"window": 3, "seed": 5},
    "memory limit": {"memory_limit": 1200},
}
RESUMED = ["unequal, single batches", "as many, window", "unequal, window", "one rank alone, window"]
COST = SequenceCost(linear=1.0, quadratic=0.01)
FAILURES = {
    "file": ("OSError", "RuntimeError", "shard-1.parquet is gone"),
    "structure": ("ValueError", "RuntimeError", "batches must have one structure"),
    "lengths": ("ValueError", "RuntimeError", r"lengths of a batch must have the shape [3], got [1]"),
    "long": ("ValueError", "RuntimeError", "a sample of 114 tokens exceeds memory_limit 110"),
    "limit": (
        "ValueError",
        "ValueError",
        "memory_limit 80 per rank is exceeded: the best assignment found of 12 samples",
    ),
    "options": ("ValueError", "ValueError", "memory_limit and seed must be the same on all ranks"),
    "dtype": ("ValueError", "ValueError", "those of ranks 0 and 1 differ"),
}
SHARDINGS = [("cpu", "row_wise"), ("cpu", "table_wise"), ("npu", "row_wise")]


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> dict[str, Any]:
    """All runs, by name."""
    cases = {
        f"{sizes}, {options}": {"sizes": SIZES[sizes], **OPTIONS[options]} for sizes in SIZES for options in OPTIONS
    }
    calls = {
        "balance": Call(f"{RUN}balance_each", {"cases": cases}, world_size=4),
        "resume": Call(f"{RUN}resume_each", {"cases": {name: cases[name] for name in RESUMED}}, world_size=4),
        "plans": Call(f"{RUN}compare_plans", {}, world_size=4),
        "calibrate": Call(f"{RUN}calibrate", {}, world_size=4),
        "fail": Call(f"{RUN}fail_each", {"cases": list(FAILURES)}, world_size=4),
    }
    for device, sharding in SHARDINGS:
        for balanced in (False, True):
            arguments = {"balanced": balanced, "sharding": sharding, "device_type": device}
            calls[f"{device} {sharding} {balanced}"] = Call(f"{RUN}train", arguments, world_size=2)
    return dict(zip(calls, ranks.run(list(calls.values())), strict=True))


def _of_ranks(outcomes: dict[str, Any], call: str, case: str) -> list[Any]:
    return [of_rank[case] for of_rank in outcomes[call].result()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_sample_arrives_whole_and_once_and_all_ranks_stop_together(
    outcomes: dict[str, Any], sizes: str, options: str
) -> None:
    of_ranks = _of_ranks(outcomes, "balance", f"{sizes}, {options}")
    expected = [1000 * rank + n for rank, batches in enumerate(SIZES[sizes]) for n in range(sum(batches))]
    assert sorted(number for rank in of_ranks for batch in rank["numbers"] for number in batch) == sorted(expected)
    assert all(all(rank["whole"]) for rank in of_ranks)
    steps = max(len(batches) for batches in SIZES[sizes])
    assert {len(rank["numbers"]) for rank in of_ranks} == {steps}
    assert {rank["again"] for rank in of_ranks} == {0}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", RESUMED)
def test_a_run_goes_on_from_any_step_with_the_batches_that_would_have_followed(
    outcomes: dict[str, Any], case: str
) -> None:
    for rank in _of_ranks(outcomes, "resume", case):
        assert len(rank["following"]) == len(rank["numbers"]) + 1 > 2
        assert rank["following"] == [rank["numbers"][step:] for step in range(len(rank["numbers"]) + 1)]
        assert rank["same"]


def test_positions_that_are_none_and_those_of_other_options_are_refused() -> None:
    def batches(window: int) -> BalancedBatches[dict[str, torch.Tensor]]:
        return BalancedBatches(
            iter([{"x": torch.arange(4)}] * 3), lengths=lambda batch: batch["x"], cost=COST, window=window
        )

    state = batches(2).state_dict()
    with pytest.raises(ValueError, match="state was saved with another cost, window"):
        batches(1).load_state_dict(state)
    drawn = batches(2)
    next(drawn)
    with pytest.raises(ValueError, match="must come before the first batch, 1 were given"):
        drawn.load_state_dict(state)
    for step in (2, -1):
        with pytest.raises(ValueError, match=f"step must be one of the last windows' up to 1, got {step}"):
            drawn.state_dict(step=step)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_get_what_costs_nearly_the_same(outcomes: dict[str, Any], options: str) -> None:
    of_ranks = [rank["numbers"] for rank in _of_ranks(outcomes, "balance", f"as many, {options}")]
    read = [[range(1000 * rank + 16 * step, 1000 * rank + 16 * step + 16) for step in range(3)] for rank in range(4)]

    def idle(batches: Any) -> float:
        loads = np.array([[COST.of([length_of(n) for n in batch]).sum() for batch in rank] for rank in batches])
        return float(np.mean([idle_share(of_step) for of_step in loads.T]))

    assert idle(of_ranks) < 0.02 < idle(read)
    if options == "equal counts":
        assert {len(batch) for rank in of_ranks for batch in rank} == {16}
    if options == "memory limit":
        assert max(sum(map(length_of, batch)) for rank in of_ranks for batch in rank) <= 1200


@pytest.mark.timeout(120)
def test_without_a_window_samples_stay_in_their_step(outcomes: dict[str, Any]) -> None:
    of_ranks = [rank["numbers"] for rank in _of_ranks(outcomes, "balance", "as many, single batches")]
    for step in range(3):
        assert {n % 1000 // 16 for rank in of_ranks for n in rank[step]} == {step}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_rank_ends_all_of_them_with_its_reason(outcomes: dict[str, Any], how: str) -> None:
    own, others, message = FAILURES[how]
    of_ranks = _of_ranks(outcomes, "fail", how)
    assert [rank["raised"] for rank in of_ranks] == [others, own, others, others]
    assert all(message in rank["message"] and rank["seconds"] < 20 for rank in of_ranks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("device", "sharding"), SHARDINGS)
def test_training_on_balanced_batches_gives_the_same_table_to_the_bit(
    outcomes: dict[str, Any], device: str, sharding: str
) -> None:
    plain, balanced = (outcomes[f"{device} {sharding} {balanced}"].result() for balanced in (False, True))
    assert plain[0] == plain[1] == balanced[0] == balanced[1]
    samples = [1000 * rank + number for rank in range(2) for number in range(7)]
    touched = {row for sample in samples for part in ids_of(sample)[:2] for row in part}
    changed = {row for row in range(ROWS) if plain[0][row] != [0.5] * 4}
    assert changed == touched


@pytest.mark.timeout(120)
def test_ranks_fit_one_cost_model_from_the_steps_of_all(outcomes: dict[str, Any]) -> None:
    of_ranks = outcomes["calibrate"].result()
    assert of_ranks[0] == of_ranks[1] == of_ranks[2] == of_ranks[3]
    assert of_ranks[0] == pytest.approx([2e-3, 1e-5, 0.5, 36], rel=1e-6)


@pytest.mark.timeout(120)
def test_ranks_that_plan_differently_are_told_so(outcomes: dict[str, Any]) -> None:
    for said in outcomes["plans"].result():
        assert said == {
            "same": "",
            "costs": "ranks 0 and 2 have planned with different costs: all must plan with the same",
            "seed": "ranks 0 and 2 have planned with different plan, seed, sizes or options: all must plan with the "
            "same",
        }


def test_bad_arguments_are_refused() -> None:
    for options, message in (
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"spread": 0.5}, "spread must be at least 1, got 0.5"),
        ({"window": 2, "equal_counts": True}, "equal_counts belongs to window=1, got window=2"),
        ({"memory_limit": 0}, "memory_limit must be at least 1 token, got 0"),
    ):
        arguments: dict[str, Any] = {"lengths": len, "cost": SequenceCost.tokens(), **options}
        with pytest.raises(ValueError, match=message):
            BalancedBatches(iter([]), **arguments)


def test_without_other_ranks_batches_come_as_they_are_and_are_finished() -> None:
    stream = iter([torch.tensor([3, 1]), torch.tensor([2])])
    batches: BalancedBatches[Any] = BalancedBatches(
        stream, lengths=lambda batch: batch, cost=SequenceCost.tokens(), finish=lambda batch: batch.tolist()
    )
    assert list(batches) == [[3, 1], [2]]
