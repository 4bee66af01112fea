"""TorchRec's own models train on npu as on CPU: every model, sharding type, world, pipeline, precision and optimizer.

Everything outside the list of what torch_npu implements, and the boxed execution of fbgemm's operators, is forbidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.npu.cases import MODELS, OPTIMIZERS, SHARDINGS, WORLDS, Case, all_cases, is_legal, pairwise_cover
from tests.npu.harness import TOLERANCE, Result, run_cases
from tests.npu.ranks import Call, RankPool


@pytest.fixture(scope="module")
def cover(ranks: RankPool) -> dict[Case, Result]:
    cases = pairwise_cover()
    return dict(zip(cases, run_cases(ranks, cases, timeout=400), strict=True))


@pytest.mark.timeout(420)
@pytest.mark.parametrize("case", pairwise_cover(), ids=lambda case: case.name)
def test_losses_on_npu_are_those_on_cpu(case: Case, cover: dict[Case, Result]) -> None:
    assert cover[case].faults() == []


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("sharding", "world"), itertools.product(SHARDINGS, WORLDS))
def test_every_legal_combination_trains_on_npu_as_on_cpu(ranks: RankPool, sharding: str, world: str) -> None:
    cases = [case for case in all_cases() if (case.sharding, case.world) == (sharding, world)]
    results = run_cases(ranks, cases, timeout=1180)
    assert {result.case.name: faults for result in results if (faults := result.faults())} == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", ["dlrm", "sequence"])
def test_shardings_and_pipelines_of_one_model_agree_on_its_losses(ranks: RankPool, model: str) -> None:
    """They compute the same sums in another order; a run on the wrong rows would train too.

    Data-parallel tables are not among them: TorchRec leaves those to the optimizer of the dense part.
    """
    shardings = [sharding for sharding in SHARDINGS if sharding != "data_parallel"]
    every = [Case(model, sharding, "2", "base", "fp32", "sgd") for sharding in shardings]
    every += [
        Case(model, "row_wise", "2", pipeline, "fp32", "sgd") for pipeline in ("sparse_dist", "fused_sparse_dist")
    ]
    cases = [case for case in every if is_legal(case)]
    calls = [Call("tests.npu.script:run", {"name": case.name, "device_type": "npu"}, 2) for case in cases]
    first, *others = (outcome.result() for outcome in ranks.run(calls, timeout=200))
    assert len(others) >= 4
    for case, other in zip(cases[1:], others, strict=True):
        for ours, theirs in zip(other, first, strict=True):
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), case.name


@pytest.mark.timeout(240)
def test_tables_that_do_not_learn_would_be_noticed(ranks: RankPool) -> None:
    """What the comparison of losses is worth: no update at all moves them by many times what is tolerated."""
    models = [model for model in MODELS if model != "sequence"]
    cases = [Case(model, "table_wise", "1", "base", "fp32", optimizer) for model in models for optimizer in OPTIMIZERS]
    calls = [
        Call("tests.npu.script:run", {"name": case.name, "device_type": "cpu", "tables_learn": learn}, 1)
        for case in cases
        for learn in (True, False)
    ]
    losses = [outcome.result()[0]["losses"] for outcome in ranks.run(calls, timeout=200)]
    for case, learning, still in zip(cases, losses[::2], losses[1::2], strict=True):
        moved = max(abs(a / b - 1) for a, b in zip(learning, still, strict=True))
        assert moved > 50 * TOLERANCE, (case.name, moved)


def test_the_cover_meets_every_pair_of_values_of_a_legal_case() -> None:
    places = range(5)  # the optimizers take turns in the whole product

    def pairs(cases: Sequence[Case]) -> set[tuple[int, str, int, str]]:
        values = [tuple(vars(case).values()) for case in cases]
        return {(i, value[i], j, value[j]) for value in values for i, j in itertools.combinations(places, 2)}

    assert pairs(all_cases()) <= pairs(pairwise_cover())
