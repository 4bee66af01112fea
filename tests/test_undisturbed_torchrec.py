"""The plugin does not disturb TorchRec on CPU: the same answers in a process with it and in one without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu.ranks import Call, Outcome, RankPool

pytestmark = pytest.mark.timeout(240)

ANSWERS = "tests.torchrec_answers:"
TRAINED = [
    *(("sparse_nn", "base", 2), ("sparse_nn", "sparse_dist", 2), ("dlrm_dcn", "sparse_dist, not all", 1)),
    *(("deepfm", "lite", 2), ("sequence", "sparse_dist", 2), ("simple_deepfm", "base", 1)),
]
CALLS = {
    **{name: Call(ANSWERS + name) for name in ("plans", "estimates", "sharders", "jagged", "signatures")},
    "adapted": Call(ANSWERS + "is_adapted"),
    **{
        f"{model}, {pipeline}, {ranks}": Call(ANSWERS + "training", {"model": model, "pipeline": pipeline}, ranks)
        for model, pipeline, ranks in TRAINED
    },
}


def _answers(setup: str) -> dict[str, Outcome]:
    # The planner enumerates sets of strings: their order is part of its answers, and of the hash seed.
    environment = {"TURBOGR_AUTOLOAD": "0", "PYTHONHASHSEED": "0"}
    pool = RankPool(setup=f"tests.npu.ranks:{setup}", environment=environment, processes=2)
    try:
        return dict(zip(CALLS, pool.run(list(CALLS.values()), timeout=200), strict=True))
    finally:
        pool.close()


@pytest.fixture(scope="module")
def answers() -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    return _answers("without_plugin"), _answers("without_npu")


def test_only_one_of_the_processes_has_the_plugin(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    without, with_plugin = answers
    assert without["adapted"].result() == [False]
    assert with_plugin["adapted"].result() == [True]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "adapted"])
def test_torchrec_answers_the_same_with_the_plugin(name: str, answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    without, with_plugin = answers
    assert with_plugin[name].result() == without[name].result()
