"""TorchRec's collections on our lookup do what they do on fbgemm's, on one and two ranks, and what fbgemm's cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    DenseTableBatchedEmbeddingBagsCodegen,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn

from tests.npu.ranks import Call, RankPool
from turbogr_plugin.kernels import dispatch
from turbogr_plugin.sharding.jagged_lookup import (
    JaggedLookupDenseTables,
    JaggedLookupTables,
    table_modules,
    use_jagged_lookup,
)

RUN, PLACES = "tests.sharding.lookup_runs:", "tests.sharding.lookup_places:"
EXACT = [
    {"kind": kind, "sharding": sharding, "world_size": ranks}
    for ranks in (1, 2)
    for kind in ("sequence", "pooled")
    for sharding in ("table_wise", "row_wise", "column_wise")
    if ranks == 2 or (kind == "pooled" and sharding == "table_wise")
]
OTHERS: list[dict[str, Any]] = [
    {"kind": "pooled", "sharding": "table_wise", "pooling": "MEAN", "optimizer": "EXACT_ROWWISE_ADAGRAD"},
    {"kind": "pooled", "sharding": "row_wise", "weighted": True, "optimizer": "EXACT_ADAGRAD"},
    {"kind": "sequence", "sharding": "row_wise", "optimizer": "EXACT_ROWWISE_ADAGRAD", "output": "fp16"},
    {"kind": "sequence", "sharding": "table_wise", "optimizer": "EXACT_ADAGRAD"},
    {"kind": "pooled", "sharding": "data_parallel"},
]


def _two(case: dict[str, Any], **changes: Any) -> Call:
    arguments = {name: value for name, value in case.items() if name != "world_size"}
    return Call(f"{RUN}train", {**arguments, **changes}, world_size=case.get("world_size", 2))


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> dict[str, Any]:
    """All runs, by case and lookup."""
    calls = {}
    for case in (*EXACT, *OTHERS):
        calls[f"{case} fbgemm"] = _two(case, ours=False)
        calls[f"{case} ours"] = _two(case, ours=True)
    for case in EXACT[-2:]:
        calls[f"{case} into ours"] = _two(case, ours=False, ours_later=True)
        calls[f"{case} out of ours"] = _two(case, ours=True, ours_later=False)
    found = ranks.run(list(calls.values()))
    return dict(zip(calls, found, strict=True))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_with_dyadic_gradients_training_is_bit_equal_to_fbgemm(outcomes: dict[str, Any], case: dict[str, Any]) -> None:
    theirs, ours = outcomes[f"{case} fbgemm"].result(), outcomes[f"{case} ours"].result()
    for there, here in zip(theirs, ours, strict=True):
        assert not there["ours ran"]
        assert here["ours ran"]
        for key in ("losses", "tables", "states"):
            assert here[key] == there[key], key


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_training_equals_fbgemm_to_rounding(outcomes: dict[str, Any], case: dict[str, Any]) -> None:
    for there, here in zip(outcomes[f"{case} fbgemm"].result(), outcomes[f"{case} ours"].result(), strict=True):
        assert here["losses"] == pytest.approx(there["losses"], rel=1e-5, abs=1e-5)
        for name, rows in there["tables"].items():
            torch.testing.assert_close(torch.tensor(here["tables"][name]), torch.tensor(rows), rtol=1e-5, atol=1e-6)
        assert here["states"].keys() == there["states"].keys()
        for name, states in there["states"].items():
            for one, other in zip(here["states"][name], states, strict=True):
                torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", EXACT[-2:], ids=str)
@pytest.mark.parametrize("way", ["into ours", "out of ours"])
def test_a_checkpoint_goes_from_one_lookup_to_the_other(
    outcomes: dict[str, Any], case: dict[str, Any], way: str
) -> None:
    for there, here in zip(outcomes[f"{case} fbgemm"].result(), outcomes[f"{case} {way}"].result(), strict=True):
        assert (here["losses"], here["tables"], here["states"]) == (there["losses"], there["tables"], there["states"])


@pytest.mark.timeout(120)
def test_pipelines_and_two_dimensional_parallelism_see_no_difference(ranks: RankPool) -> None:
    pipelines = ("TrainPipelineSparseDist", "TrainPipelineSemiSync")
    calls = [
        Call(f"{PLACES}pipeline", {"name": name, "ours": ours}, world_size=2)
        for name in pipelines
        for ours in (False, True)
    ]
    calls += [Call(f"{PLACES}two_dimensional", {"ours": ours}, world_size=4) for ours in (False, True)]
    found = [outcome.result() for outcome in ranks.run(calls)]
    for theirs, ours in zip(found[:-2:2], found[1:-2:2], strict=True):
        for there, here in zip(theirs, ours, strict=True):
            assert here["losses"] == pytest.approx(there["losses"], rel=1e-6)
    for there, here in zip(found[-2], found[-1], strict=True):
        for key in ("tables", "states"):
            for one, other in zip(here[key], there[key], strict=True):
                torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-7)


@pytest.mark.timeout(120)
def test_the_sharders_give_on_npu_what_they_give_on_the_cpu(ranks: RankPool) -> None:
    cases: list[dict[str, Any]] = [
        {"kind": "sequence", "sharding": "row_wise", "ours": True},
        {"kind": "pooled", "sharding": "table_wise", "ours": True, "pooling": "MEAN"},
        {"kind": "sequence", "sharding": "table_wise", "ours": True, "output": "fp16"},
    ]
    calls = [_two(case, device=device) for case in cases for device in ("cpu", "npu")]
    found = [outcome.result() for outcome in ranks.run(calls)]
    for here, there in zip(found[::2], found[1::2], strict=True):
        for cpu, npu in zip(here, there, strict=True):
            assert npu["losses"] == pytest.approx(cpu["losses"], rel=1e-6)
            assert npu["tables"].keys() == cpu["tables"].keys()
            for name, rows in cpu["tables"].items():
                torch.testing.assert_close(torch.tensor(npu["tables"][name]), torch.tensor(rows), rtol=1e-6, atol=1e-7)


@pytest.mark.timeout(120)
def test_data_parallel_sequences_train_on_cpu_as_sharded_ones(ranks: RankPool) -> None:
    cases: list[dict[str, Any]] = [
        {"kind": "sequence", "sharding": sharding, "ours": True, "world_size": 1}
        for sharding in ("data_parallel", "table_wise")
    ]
    theirs = _two({**cases[0], "ours": False})
    parallel, fused, stock = ranks.run([*(_two(case) for case in cases), theirs])
    assert "split_with_sizes" in stock.error  # fbgemm's dense tables pool what should stay a sequence
    (here,), (there,) = parallel.result(), fused.result()
    assert here["losses"] == there["losses"]
    assert list(here["tables"].values()) == list(there["tables"].values())


def _fused(**arguments: Any) -> SplitTableBatchedEmbeddingBagsCodegen:
    specs = [(ROWS, 8, EmbeddingLocation.HOST, ComputeDevice.CPU) for ROWS in (5, 7)]
    given = {"embedding_specs": specs, "table_names": ["t0", "t1"], "device": torch.device("cpu"), **arguments}
    return SplitTableBatchedEmbeddingBagsCodegen(**given)


def test_a_module_of_fbgemm_stays_the_object_that_it_is() -> None:
    tables = nn.ModuleDict({"fused": _fused(), "dense": DenseTableBatchedEmbeddingBagsCodegen([(5, 8)], use_cpu=True)})
    parameters, names = list(tables.parameters()), list(tables.state_dict())
    fused, dense = tables["fused"], tables["dense"]
    assert use_jagged_lookup(tables) == 2
    assert (tables["fused"], tables["dense"]) == (fused, dense)
    assert (type(fused), type(dense)) == (JaggedLookupTables, JaggedLookupDenseTables)
    assert all(one is other for one, other in zip(tables.parameters(), parameters, strict=True))
    assert list(tables.state_dict()) == names
    assert use_jagged_lookup(tables) == 2
    assert table_modules(tables) == [fused, dense]


def test_copies_keep_our_lookup() -> None:
    tables = _fused()
    use_jagged_lookup(tables)
    ids, offsets = torch.tensor([1, 2, 6]), torch.tensor([0, 2, 3])
    expected = tables(ids, offsets)
    copied = copy.deepcopy(tables)
    assert type(copied) is JaggedLookupTables
    assert torch.equal(copied(ids, offsets), expected)


def test_only_the_lookup_operators_are_ours_and_only_inside_forward() -> None:
    tables = _fused()
    ids, offsets = torch.tensor([1, 2, 6]), torch.tensor([0, 2, 3])
    dispatch._taken.clear()
    expected = tables(ids, offsets)
    assert "jagged_lookup" not in dispatch.taken()
    use_jagged_lookup(tables)
    assert torch.equal(tables(ids, offsets), expected)
    assert "jagged_lookup" in dispatch.taken()
    dispatch._taken.clear()
    _fused()(ids, offsets)
    assert "jagged_lookup" not in dispatch.taken()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "weight_decay_mode": WeightDecayMode.COUNTER,
                "counter_based_regularization": CounterBasedRegularizationDefinition(),
            },
            "tables t0, t1: our lookup has no row counters",
        ),
        (
            {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
                "global_weight_decay": GlobalWeightDecayDefinition(),
            },
            "tables t0, t1: our lookup has no global weight decay",
        ),
        (
            {"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD},
            "optimizer EMAINPLACE_ROWWISE_ADAGRAD has no lookup of ours; allowed: EXACT_SGD",
        ),
    ],
    ids=["row counters", "global weight decay", "moving average"],
)
def test_tables_that_ours_does_not_serve_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    refused, served = _fused(**arguments), _fused()
    with pytest.raises(ValueError, match=message):
        use_jagged_lookup(nn.ModuleList([served, refused]))
    assert type(served) is SplitTableBatchedEmbeddingBagsCodegen


def test_a_subclass_of_fbgemms_tables_is_refused() -> None:
    class Mine(SplitTableBatchedEmbeddingBagsCodegen):
        pass

    tables = _fused()
    tables.__class__ = Mine
    with pytest.raises(ValueError, match="Mine is a subclass of fbgemm's tables"):
        use_jagged_lookup(tables)


def test_tables_in_bf16_train_on_cpu_where_fbgemm_has_no_kernel() -> None:
    tables = _fused(weights_precision=SparseType.BF16, optimizer=EmbOptimType.EXACT_SGD, learning_rate=0.5)
    tables.init_embedding_weights_uniform(1.0, 1.0)
    ids, offsets = torch.tensor([1, 1, 6]), torch.tensor([0, 2, 3])
    with pytest.raises(NotImplementedError, match="BFloat16"):
        tables(ids, offsets)
    use_jagged_lookup(tables)
    tables(ids, offsets).sum().backward()
    first, second = tables.split_embedding_weights()
    assert first[:, 0].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert second[:, 0].tolist() == [1.0] * 6 + [0.5]
