"""TorchRec's embedding modules on one npu: fused tables with each optimizer, data-parallel tables."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu.ranks import Call, RankPool

OPTIMIZERS = (
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
)
CASES = (
    *(
        {"kind": kind, "sharding": "table_wise", "optimizer": optimizer}
        for kind in ("pooled", "sequence")
        for optimizer in OPTIMIZERS
    ),
    {"kind": "pooled", "sharding": "data_parallel"},
    {"kind": "sequence", "sharding": "data_parallel"},
)
# What fbgemm can train on the CPU; data-parallel sequences are pooled there by mistake.
ON_CPU = [
    case
    for case in CASES
    if case.get("optimizer", "EXACT_SGD") in OPTIMIZERS[:3]
    and case != {"kind": "sequence", "sharding": "data_parallel"}
]


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> dict[str, Any]:
    """All runs, by case and device."""
    calls = {f"{case} npu": Call("tests.npu.table_runs:train", {**case, "device": "npu"}) for case in CASES}
    calls |= {f"{case} cpu": Call("tests.npu.table_runs:train", {**case, "device": "cpu"}) for case in ON_CPU}
    calls |= {
        f"{kind} {device}": Call("tests.npu.table_runs:train_unsharded", {"kind": kind, "device": device})
        for kind in ("pooled", "sequence")
        for device in ("npu", "cpu")
    }
    return dict(zip(calls, ranks.run(list(calls.values())), strict=True))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_training_on_npu_equals_training_on_the_cpu(outcomes: dict[str, Any], case: dict[str, str]) -> None:
    (there,), (here,) = outcomes[f"{case} npu"].result(), outcomes[f"{case} cpu"].result()
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-5)
    assert there["tables"] == pytest.approx(here["tables"], rel=1e-4, abs=1e-6)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ON_CPU], ids=str)
def test_what_only_an_accelerator_can_train_trains_on_npu(outcomes: dict[str, Any], case: dict[str, str]) -> None:
    (there,) = outcomes[f"{case} npu"].result()
    # the loss is the sum of squares of what was looked up: any of these optimizers brings it down
    assert sum(there["losses"][-5:]) < 0.8 * sum(there["losses"][:5])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_data_parallel_tables_train_as_fused_ones_do(outcomes: dict[str, Any], kind: str) -> None:
    fused: dict[str, str] = {"kind": kind, "sharding": "table_wise", "optimizer": "EXACT_SGD"}
    parallel = {"kind": kind, "sharding": "data_parallel"}
    (expected,) = outcomes[f"{fused} npu"].result()
    (found,) = outcomes[f"{parallel} npu"].result()
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["tables"] == pytest.approx(expected["tables"], rel=1e-4, abs=1e-6)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_unsharded_modules_train_a_hundred_steps_as_on_the_cpu(outcomes: dict[str, Any], kind: str) -> None:
    (there,), (here,) = outcomes[f"{kind} npu"].result(), outcomes[f"{kind} cpu"].result()
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-5, abs=1e-9)
    assert there["tables"] == pytest.approx(here["tables"], rel=1e-4, abs=1e-6)
