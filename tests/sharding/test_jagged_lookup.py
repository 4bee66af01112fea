"""TorchRec's collections on our lookup do what they do on fbgemm's, on one and two ranks, and what fbgemm's cannot."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    DenseTableBatchedEmbeddingBagsCodegen,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import KeyValueEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection

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
        *(
            (
                {"weights_precision": precision},
                f"tables t0, t1: weights_precision {precision.name} has no lookup of ours; allowed: FP32, FP16, BF16",
            )
            for precision in (SparseType.INT8, SparseType.FP8, SparseType.NFP8)
        ),
    ],
    ids=["row counters", "global weight decay", "moving average", "int8", "fp8", "nfp8"],
)
def test_tables_that_ours_does_not_serve_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    refused, served = _fused(**arguments), _fused()
    with pytest.raises(ValueError, match=message):
        use_jagged_lookup(nn.ModuleList([served, refused]))
    assert type(served) is SplitTableBatchedEmbeddingBagsCodegen


@pytest.mark.parametrize("location", ["MANAGED", "MANAGED_CACHING"])
def test_tables_in_unified_memory_are_refused_by_name(location: str) -> None:
    tables = _fused()
    # fbgemm places tables there on GPUs only
    (rows, width, _, device), second = tables.embedding_specs
    tables.embedding_specs = [(rows, width, EmbeddingLocation[location], device), second]
    with pytest.raises(ValueError, match=f"tables t0, t1 lie in {location}; our lookup reads HOST and DEVICE memory"):
        use_jagged_lookup(tables)
    assert type(tables) is SplitTableBatchedEmbeddingBagsCodegen


class SSDTables(nn.Module):
    """Stands for fbgemm's SSDTableBatchedEmbeddingBags, which needs a directory on a disk and a GPU."""


def _kernel_of_torchrec(held: nn.Module) -> nn.Module:
    """TorchRec's module for key-value tables t0 and t1, around another table module."""
    kernel = KeyValueEmbedding.__new__(KeyValueEmbedding)
    nn.Module.__init__(kernel)
    kernel._config = SimpleNamespace(embedding_tables=[SimpleNamespace(name="t0"), SimpleNamespace(name="t1")])
    kernel._emb_module = held
    return kernel


def test_tables_in_key_value_stores_are_refused_by_name() -> None:
    served = _fused()
    message = (
        "tables t0, t1: KeyValueEmbedding holds them in SSDTables, which has no lookup of ours; allowed are .*fused"
    )
    with pytest.raises(ValueError, match=message):
        use_jagged_lookup(nn.ModuleList([served, _kernel_of_torchrec(SSDTables())]))
    assert type(served) is SplitTableBatchedEmbeddingBagsCodegen


def test_tables_without_names_of_their_own_are_refused_by_those_that_torchrec_has() -> None:
    tables = _fused(weights_precision=SparseType.INT8, table_names=None)
    with pytest.raises(ValueError, match="tables t0, t1: weights_precision INT8"):
        use_jagged_lookup(_kernel_of_torchrec(tables))
    with pytest.raises(ValueError, match=r"tables \(without names\): weights_precision INT8"):
        use_jagged_lookup(tables)


def test_a_subclass_of_fbgemms_tables_is_refused() -> None:
    class Mine(SplitTableBatchedEmbeddingBagsCodegen):
        pass

    tables = _fused()
    tables.__class__ = Mine
    with pytest.raises(ValueError, match="Mine is a subclass of fbgemm's tables"):
        use_jagged_lookup(tables)


def test_a_subclass_of_torchrecs_collection_that_deduplicates_is_refused() -> None:
    class Mine(ShardedEmbeddingCollection):
        pass

    collection, served = Mine.__new__(Mine), _fused()
    nn.Module.__init__(collection)
    collection._use_index_dedup, collection._device, collection._lookups = True, torch.device("cpu"), [served]
    with pytest.raises(ValueError, match="Mine with use_index_dedup is a subclass of TorchRec's collection"):
        use_jagged_lookup(collection)
    assert type(served) is SplitTableBatchedEmbeddingBagsCodegen
    collection._use_index_dedup = False
    assert use_jagged_lookup(collection) == 1
    assert type(collection) is Mine


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


RATE, EPS, DECAY = 0.25, 1e-3, 0.25


def _rows_after_one_step(precision: str, *, ours: bool, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise Adagrad, pooled by sums: rows before and after [12, 8], and the gradients [12, 8] (one row has none)."""
    tables = _fused(
        weights_precision=SparseType[precision],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPS,
        stochastic_rounding=False,
        **arguments,
    )
    with torch.no_grad():
        for number, rows in enumerate(tables.split_embedding_weights()):
            rows.copy_((torch.arange(rows.numel()).view_as(rows) % 7 - 3 + number) / 4)
    before = torch.cat([rows.detach().double() for rows in tables.split_embedding_weights()])
    if ours:
        use_jagged_lookup(tables)
    pooled = tables(torch.tensor([1, 2, 1, 6, 0, 4]), torch.tensor([0, 3, 3, 4, 6]))
    pooled.backward(torch.full_like(pooled, 0.5))
    gradients = torch.zeros_like(before)
    for row in (1, 2, 1, 5 + 6, 5 + 0, 5 + 4):
        gradients[row] += 0.5
    return before, torch.cat([rows.detach().double() for rows in tables.split_embedding_weights()]), gradients


def _formula(rows: Tensor, gradients: Tensor, mode: WeightDecayMode) -> Tensor:
    """Row-wise Adagrad's first step in float64, with the weight decay in the gradient (L2) or beside it (decoupled)."""
    decayed = gradients + DECAY * rows if mode is WeightDecayMode.L2 else gradients
    rate = RATE / (decayed.square().mean(1, keepdim=True).sqrt() + EPS)
    shrunk = (1 - RATE * DECAY) * rows if mode is WeightDecayMode.DECOUPLE else rows
    return torch.where(gradients.any(1, keepdim=True), shrunk - rate * decayed, rows)


@pytest.mark.parametrize("mode", [WeightDecayMode.L2, WeightDecayMode.DECOUPLE], ids=lambda mode: mode.name)
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_weight_decay_follows_its_formula_where_fbgemm_honours_it_in_fp16_only(
    precision: str, mode: WeightDecayMode
) -> None:
    given = {"weight_decay": DECAY, "weight_decay_mode": mode}
    before, ours, gradients = _rows_after_one_step(precision, ours=True, **given)
    _, theirs, _ = _rows_after_one_step(precision, ours=False, **given)
    spacing = {"FP32": 1e-6, "FP16": 2.0**-10}[precision]
    torch.testing.assert_close(ours, _formula(before, gradients, mode), rtol=spacing, atol=spacing)
    if precision == "FP16":
        torch.testing.assert_close(theirs, ours, rtol=spacing, atol=spacing)
    else:
        _, without, _ = _rows_after_one_step(precision, ours=False)
        assert torch.equal(theirs, without)
        assert float((theirs - ours).abs().max()) > 0.01


@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_max_norm_holds_for_updated_rows_and_not_with_fbgemm(precision: str) -> None:
    _, ours, gradients = _rows_after_one_step(precision, ours=True, max_norm=0.5)
    _, theirs, _ = _rows_after_one_step(precision, ours=False, max_norm=0.5)
    _, without, _ = _rows_after_one_step(precision, ours=False)
    assert torch.equal(theirs, without)
    updated = gradients.any(1)
    assert ours[updated].norm(dim=1).tolist() == pytest.approx([0.5] * int(updated.sum()), rel=2e-3)
    assert torch.equal(ours[~updated], without[~updated])


@pytest.mark.parametrize("wrong", [5, -1], ids=["behind the table", "before it"])
@pytest.mark.parametrize("kind", ["fused", "dense"])
def test_without_bounds_checks_an_id_that_no_table_has_gives_zeros_where_fbgemm_raises(kind: str, wrong: int) -> None:
    tables: nn.Module = (
        _fused(bounds_check_mode=BoundsCheckMode.NONE)
        if kind == "fused"
        else DenseTableBatchedEmbeddingBagsCodegen([(5, 8), (7, 8)], use_cpu=True)
    )
    ids, offsets = torch.tensor([wrong, 6]), torch.tensor([0, 1, 2])
    with pytest.raises(RuntimeError, match="out of bounds"):
        tables(ids, offsets)
    use_jagged_lookup(tables)
    first, second = (rows.detach().clone() for rows in tables.split_embedding_weights())  # type: ignore[operator]
    pooled = tables(ids, offsets)
    assert not pooled[:, :8].any()
    assert torch.equal(pooled[:, 8:], second[6:])
    pooled.sum().backward()
    if kind == "fused":
        assert torch.equal(tables.split_embedding_weights()[0], first)  # type: ignore[operator]
    else:
        (gradient,) = (parameter.grad for parameter in tables.parameters())
        assert gradient is not None
        assert gradient.nonzero().flatten().tolist() == list(range((5 + 6) * 8, 12 * 8))
