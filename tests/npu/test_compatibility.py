"""docs/compatibility.md is true: what works gives the CPU's results, what is refused says so in the words quoted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.npu.ranks import Call, Outcome, RankPool

ROOT = Path(__file__).parents[2]
USE = "tests.npu.compatibility_cases:use"

pytestmark = pytest.mark.timeout(240)


class Row(NamedTuple):
    feature: str
    status: str
    remark: str
    test: str


def _rows() -> list[Row]:
    lines = (ROOT / "docs/compatibility.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [Row(*row) for row in cells[1:]]


ROWS = _rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.feature)
def test_a_row_names_a_test_that_exists_and_quotes_what_is_said(row: Row) -> None:
    file, _, test = row.test.strip("`").partition("::")
    assert f"def {test}(" in (ROOT / file).read_text()
    assert row.status in ("works", "refused", "ignored")
    assert (row.status != "refused") or re.search(r'"[^"]+"', row.remark)


#: Feature of compatibility_cases: options, ranks.
WORKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "unchanged script": ("unchanged_script", {}, 2),
    "FP16": ("communication", {"precision": "fp16"}, 2),
    "BF16": ("communication", {"precision": "bf16"}, 2),
    "feature processors": ("feature_processors", {}, 2),
    "FusedEmbeddingBagCollection": ("fused_collection", {}, 2),
    "KTRegroupAsDict": ("regroup", {}, 1),
    "composable shard": ("composable", {}, 2),
    "TensorPool": ("tensor_pool", {}, 2),
    "KeyedJaggedTensorPool": ("jagged_pool", {}, 2),
}


def _calls(feature: str, options: dict[str, Any], ranks: int) -> list[Call]:
    return [Call(USE, {"feature": feature, "device_type": device, **options}, ranks) for device in ("cpu", "npu")]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in _flat(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", WORKS)
def test_a_feature_that_works_gives_what_it_gives_on_cpu(name: str, ranks: RankPool) -> None:
    cpu, npu = (_flat(outcome.result()) for outcome in ranks.run(_calls(*WORKS[name])))
    # TorchRec sends FP16 where BF16 is asked for on CPU: 8 and 11 bits of the same numbers.
    tolerance = 2**-7 if name == "BF16" else 1e-6
    assert [leaf for leaf in npu if isinstance(leaf, str)] == [leaf for leaf in cpu if isinstance(leaf, str)]
    numbers = [[leaf for leaf in leaves if not isinstance(leaf, str)] for leaves in (npu, cpu)]
    assert numbers[0] == pytest.approx(numbers[1], rel=tolerance, abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_embeddings_are_sent_in_the_precision_that_was_asked_for(precision: str, ranks: RankPool) -> None:
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    (outcome,) = ranks.run(_calls("sent_thirds", {"precision": precision}, 2)[1:])
    ids = torch.tensor([[2, 1], [0, 3]])  # by sample and feature
    expected = (ids * torch.tensor(1 / 3)).to(dtype).float().repeat_interleave(16, dim=1)
    assert outcome.result() == [expected.tolist()] * 2


def test_index_dedup_gives_the_rows_of_every_id(ranks: RankPool) -> None:
    (outcome,) = ranks.run(_calls("index_dedup", {}, 2)[1:])
    for rank in outcome.result():
        rows = [torch.arange(20 * 16).view(20, 16) % 13 / 16 for _ in range(2)]  # of the two shards
        table = torch.cat(rows)
        assert rank == {"f0": table[[1, 2]].tolist(), "f1": table[[3, 4, 39, 1]].tolist()}


_BAGS, _SEQUENCES = {"module": "bags"}, {"module": "sequences"}
COLLISIONS: dict[str, dict[str, Any]] = {
    "LFU": {"policy": "LFU", **_BAGS},
    "LRU": {"policy": "LRU", **_BAGS},
    "DistanceLFU": {"policy": "DistanceLFU", **_BAGS},
    "sequences": {"policy": "LFU", **_SEQUENCES},
    "bags, empty: first": {"policy": "LFU", **_BAGS, "empty": "first"},
    # TorchRec's default; ids are all below half of it, and on the first rank
    "range of 2^63 - 1 ids": {"policy": "LFU", **_BAGS, "hash_size": 2**63 - 1},
    "bags, empty: no rows": {"policy": "DistanceLFU", **_BAGS, "empty": "no rows"},
    "sequences, empty: no rows": {"policy": "DistanceLFU", **_SEQUENCES, "empty": "no rows"},
    "sequences, empty: no rows on one rank": {"policy": "LRU", **_SEQUENCES, "empty": "no rows on one rank"},
}


@pytest.fixture(scope="module")
def collisions(ranks: RankPool) -> dict[str, list[Outcome]]:
    """Training with managed collision on CPU and npu."""
    calls = {name: _calls("managed_collision", options, 2) for name, options in COLLISIONS.items()}
    outcomes = iter(ranks.run([call for pair in calls.values() for call in pair]))
    return {name: [next(outcomes) for _ in pair] for name, pair in calls.items()}


@pytest.mark.parametrize("name", COLLISIONS)
def test_managed_collision_trains_as_on_cpu(name: str, collisions: dict[str, list[Outcome]]) -> None:
    cpu, npu = (outcome.result() for outcome in collisions[name])
    for here, there in zip(cpu, npu, strict=True):
        assert there["losses"] == pytest.approx(here["losses"], rel=1e-6, abs=1e-6)
        assert list(there["state"]) == list(here["state"])
        for part, value in here["state"].items():
            assert _flat(there["state"][part]) == pytest.approx(_flat(value), rel=1e-6, abs=1e-6), part


def test_policies_of_eviction_keep_different_ids(collisions: dict[str, list[Outcome]]) -> None:
    def ids(name: str) -> list[int]:
        states = [rank["state"] for rank in collisions[name][1].result()]
        return _flat([value for state in states for name, value in state.items() if name.endswith("_sorted_raw_ids")])

    free = 2**63 - 1
    assert all(min(ids(policy)) < free for policy in ("LFU", "LRU", "DistanceLFU"))
    assert ids("LFU") != ids("LRU")
    # TorchRec's buffer of ids is as large as the first batch
    assert set(ids("bags, empty: first")) == {free}


#: Feature of compatibility_cases: options, ranks, row of the page.
REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "FP8": ("communication", {"precision": "fp8"}, 1, "communication in FP8, INT8, MX4"),
    "INT8": ("communication", {"precision": "int8"}, 1, "communication in FP8, INT8, MX4"),
    "MX4": ("communication", {"precision": "mx4"}, 1, "communication in FP8, INT8, MX4"),
    "hashed": ("hashed_collision", {}, 1, "managed collision by hashing (HashZchManagedCollisionModule)"),
    "ITEP": ("pruning", {}, 1, "in-training embedding pruning (ITEP)"),
    "quantized": ("quantized", {}, 1, "quantized inference"),
    "metrics": ("metrics", {}, 1, "torchrec.metrics"),
    "compile": ("compiled", {}, 1, "pipeline PT2, torch.compile with Inductor"),
    "FULLY_SHARDED": (
        *("two_dimensional", {"sharding_strategy": "FULLY_SHARDED"}, 1),
        "2-D parallelism: FULLY_SHARDED",
    ),
    "relay": ("two_dimensional", {"use_sharded_relay": True}, 1, "2-D parallelism: sharded relay"),
    "copy": ("copied", {}, 1, "DistributedModelParallel.copy"),
    "reshard": ("resharded", {}, 2, "DistributedModelParallel.reshard"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_feature_that_is_refused_says_why(name: str, ranks: RankPool) -> None:
    feature, options, size, label = REFUSED[name]
    (remark,) = [row.remark for row in ROWS if row.feature == label]
    # What is quoted is what the error says, whose kind stands before it where it is no ValueError.
    quoted = re.search(r'(?:(\w+Error): )?"([^"]+)"', remark)
    assert quoted is not None
    kind, words = quoted[1] or "ValueError", quoted[2]
    (outcome,) = ranks.run(_calls(feature, options, size)[1:])
    for error in outcome.errors:
        said = [line for line in error.splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)][-1]
        assert said.partition(": ")[0].rpartition(".")[2] == kind
        assert words in said.partition(": ")[2]


def test_a_model_cannot_be_copied_on_cpu_either(ranks: RankPool) -> None:
    (outcome,) = ranks.run(_calls("copied", {}, 1)[:1])
    assert "has no attribute 'ProcessGroupNCCL'" in outcome.error


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching", "key_value", "dram_virtual_table"])
def test_a_kernel_outside_of_the_device_is_refused(kernel: str, ranks: RankPool) -> None:
    call = Call(USE, {"feature": "other_kernel", "device_type": "npu", "kernel": kernel})
    (error,) = ranks.run([call])[0].errors
    assert "does not exist on npu, which has no unified memory" in error


def test_options_of_a_cache_change_nothing(ranks: RankPool) -> None:
    calls = [Call(USE, {"feature": "cached", "device_type": "npu", "options": options}) for options in (False, True)]
    without, with_options = (outcome.result() for outcome in ranks.run(calls))
    assert with_options == without
