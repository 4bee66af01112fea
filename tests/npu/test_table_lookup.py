"""fbgemm's table modules on npu: equal to those on the CPU, from allowed operators, without waiting for the device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.table_groups import (
    MIXED,
    OPTIMIZER_TYPES,
    POOLING,
    UNIFORM,
    Batch,
    BoundsCheckMode,
    Group,
    SparseType,
    dyadic,
    fill,
    make_batch,
    make_module,
    our_kernels,
    run,
    states_of,
)
from turbogr_plugin.backend import adaptation
from turbogr_plugin.backend.adaptations import dense_tables_on_device, fused_tables_on_device
from turbogr_plugin.kernels import fbgemm_batch_metadata, fbgemm_bounds_check, fbgemm_dense_lookup, fbgemm_lookup
from turbogr_plugin.kernels.npu_operators import register

# fbgemm calls Adam, LAMB and LARS experimental
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*EXPERIMENTAL:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def _registered(npu: Any) -> None:
    kernels = [
        *fbgemm_batch_metadata.KERNELS,
        *fbgemm_bounds_check.KERNELS,
        *fbgemm_dense_lookup.KERNELS,
        *fbgemm_lookup.KERNELS,
    ]
    outcomes = [*register(kernels), *map(adaptation.apply, fused_tables_on_device.ADAPTATIONS)]
    assert [outcome for outcome in outcomes if outcome.status == "refused"] == []


def on_npu(group: Group, optimizer: str, like: Any | None = None, **arguments: Any) -> Any:
    """A module as TorchRec makes it for a device that it does not know, with the tables of another."""
    module = make_module(group, optimizer, accelerator=False, device="npu", **arguments)
    if like is not None:
        for table, value in zip(module.split_embedding_weights(), like.split_embedding_weights(), strict=True):
            table.copy_(value)
    return module


def moved(batch: Batch) -> Batch:
    weights = None if batch.weights is None else batch.weights.to("npu")
    return Batch(batch.indices.to("npu"), batch.offsets.to("npu"), weights, batch.by_rank)


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found.split_embedding_weights(), expected.split_embedding_weights(), **_EXACT)
    torch.testing.assert_close(states_of(found), states_of(expected), **_EXACT)


_EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "check_device": False}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZER_TYPES))
def test_steps_on_npu_equal_those_on_the_cpu_to_the_bit_and_never_wait_for_the_device(npu: Any, optimizer: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for group, mode in ((UNIFORM, "sequence"), (UNIFORM, "mean"), (MIXED, "sum"), (MIXED, "weighted")):
        pooling = POOLING["sum" if mode == "weighted" else mode]
        check = {"pooling_mode": pooling, "bounds_check_mode": BoundsCheckMode.WARNING}
        here = make_module(group, optimizer, accelerator=True, **check)
        fill(here, generator)
        there = on_npu(group, optimizer, here, **check)
        for step in range(3):
            batch = make_batch(group, generator, weighted=mode == "weighted")
            batch.indices[::5] = 99  # repaired to 0
            with our_kernels():
                expected = run(here, batch, lambda out: torch.linspace(-1, 1, out.numel()).view_as(out))
            gradient = torch.linspace(-1, 1, expected[0].numel()).view_as(expected[0]).to("npu")
            there_batch = moved(batch)
            npu.reset()
            found = run(there, there_batch, gradient)
            # fbgemm's own module reads its step counter from the device before the first step of Adam and LAMB
            if step or optimizer in ("sgd", "adagrad"):
                assert npu.counters().host_syncs == 0, npu.host_syncs()
            assert npu.cpu_fallbacks() == {}
            torch.testing.assert_close(found, expected, **_EXACT)
        assert_equal(there, here)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZER_TYPES))
def test_states_can_be_read_set_saved_and_loaded(npu: Any, optimizer: str) -> None:
    generator = torch.Generator().manual_seed(2)
    module = on_npu(MIXED, optimizer)
    module.init_embedding_weights_uniform(-1.0, 1.0)
    batch = moved(make_batch(MIXED, generator))
    run(module, batch, torch.ones_like)
    module.flush()
    module.reset_cache_states()
    assert {state.device.type for state in states_of(module)} <= {"npu"}
    if optimizer in ("adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"):  # fbgemm names no others
        for table, state in zip(module.split_embedding_weights(), module.get_optimizer_state(), strict=True):
            assert all(value.shape[0] == table.shape[0] for value in state.values() if value.numel() > 1), state
    saved = {name: value.cpu() for name, value in module.state_dict().items()}
    other = on_npu(MIXED, optimizer)
    other.load_state_dict(saved)
    assert_equal(other, module)
    for each in (module, other):
        each.set_learning_rate(0.125)
        run(each, batch, torch.ones_like)
    assert_equal(other, module)


def test_lookups_without_gradients_and_in_inference_mode_give_the_same(npu: Any) -> None:
    for group, mode in ((UNIFORM, "sequence"), (MIXED, "mean")):
        module = on_npu(group, "adam", pooling_mode=POOLING[mode])
        fill_on_npu(module)
        batch = moved(make_batch(group, torch.Generator().manual_seed(3)))
        trained = module(batch.indices, batch.offsets)
        assert trained.requires_grad
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                output = module(batch.indices, batch.offsets)
            assert not output.requires_grad
            torch.testing.assert_close(output, trained.detach(), **_EXACT)


def test_variable_batch_sizes_with_one_output_for_two_groups(npu: Any) -> None:
    by_rank = [[2, 1], [0, 3], [1, 1]]
    generator = torch.Generator().manual_seed(4)
    size = 8 * sum(map(sum, by_rank))
    modules = [on_npu(UNIFORM, "rowwise_adagrad", bounds_check_mode=BoundsCheckMode.WARNING) for _ in range(2)]
    for module in modules:
        fill_on_npu(module)
    batches = [moved(make_batch(UNIFORM, generator, by_rank=by_rank)) for _ in modules]
    alone = [
        module(batch.indices, batch.offsets, batch_size_per_feature_per_rank=by_rank)
        for module, batch in zip(modules, batches, strict=True)
    ]
    begins, begin = torch.zeros(2, 3, dtype=torch.int64), 0
    for rank in range(2):
        for feature, sizes in enumerate(by_rank):
            begins[rank, feature] = begin
            begin += 8 * sizes[rank]
    output = torch.empty(2 * size, device="npu")
    places = [begins.to("npu"), (begins + size).to("npu")]
    npu.reset()
    for module, batch, place in zip(modules, batches, places, strict=True):
        output = module(
            batch.indices,
            batch.offsets,
            batch_size_per_feature_per_rank=by_rank,
            vbe_output=output,
            vbe_output_offsets=place,
        )
    output.sum().backward()
    assert npu.counters().host_syncs == 0, npu.host_syncs()
    torch.testing.assert_close(output.detach(), torch.cat(alone).detach(), **_EXACT)
    assert all(states_of(module)[0].cpu().any() for module in modules)


def test_fatal_bounds_check_raises_with_the_numbers_and_waits_once(npu: Any) -> None:
    module = on_npu(MIXED, "sgd", bounds_check_mode=BoundsCheckMode.FATAL)
    offsets = torch.tensor([0, 1, 2, 2, 2]).to("npu")
    good, bad = torch.tensor([1, 6]).to("npu"), torch.tensor([1, 7]).to("npu")
    npu.reset()
    module(good, offsets)
    assert npu.counters().host_syncs == 1
    with pytest.raises(ValueError, match="id 7 at position 1 belongs to feature 1, whose table has 7 rows"):
        module(bad, offsets)


def test_a_warning_of_the_bounds_check_comes_later_and_without_a_wait(
    npu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = on_npu(MIXED, "sgd", bounds_check_mode=BoundsCheckMode.WARNING)
    offsets = torch.tensor([0, 1, 2, 2, 2]).to("npu")
    indices = torch.tensor([1, 99]).to("npu")
    with caplog.at_level(logging.WARNING):
        npu.reset()
        for _ in range(3):
            module(indices.clone(), offsets)
        module(torch.zeros_like(indices), offsets)
        assert npu.counters().host_syncs == 0
        torch.npu.synchronize()
        module(torch.zeros_like(indices), offsets)
    assert module.bounds_check_warning.cpu().tolist() == [0]
    assert "ids or offsets were out of range and have been repaired" in caplog.text


def test_stochastic_rounding_of_fp16_tables_runs_on_npu(npu: Any) -> None:
    module = on_npu(UNIFORM, "sgd", weights_precision=SparseType.FP16, stochastic_rounding=True, learning_rate=1.0)
    for table in module.split_embedding_weights():
        table.fill_(1.0)
    batch = moved(make_batch(UNIFORM, torch.Generator().manual_seed(5)))
    run(module, batch, lambda out: torch.full_like(out, -(2.0**-12)))
    values = torch.cat([table.flatten() for table in module.split_embedding_weights()]).cpu().float()
    assert values.unique().tolist()[:2] == [1.0, 1.0 + 2.0**-10]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_replicas_of_a_group_round_alike_and_each_step_anew(npu: Any, optimizer: str) -> None:
    given = {"weights_precision": SparseType.FP16, "stochastic_rounding": True, "learning_rate": 2.0**-12}
    batch = make_batch(UNIFORM, torch.Generator().manual_seed(5), size=20)
    found = []
    for replica in range(2):
        module = on_npu(UNIFORM, optimizer, **given)
        found.append([])
        for _ in range(2):
            for table in module.split_embedding_weights():
                table.fill_(1.0)
            if replica and optimizer == "sgd":  # fbgemm counts the steps of Adam itself
                with torch.no_grad():  # a lookup without training draws nothing
                    module(*(tensor.to("npu") for tensor in (batch.indices, batch.offsets)))
            run(module, moved(batch), lambda out: torch.full_like(out, -1.0))
            found[-1].append(torch.cat([table.flatten() for table in module.split_embedding_weights()]).cpu())
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted", "sequence"])
def test_dense_tables_on_npu_equal_the_same_kernel_on_the_cpu(npu: Any, mode: str) -> None:
    from tests.kernels.test_fbgemm_dense_lookup import make_dense, our_kernel

    group = UNIFORM if mode == "sequence" else MIXED
    pooling = "sum" if mode == "weighted" else mode
    here = make_dense(group, pooling)
    there = make_dense(group, pooling).to("npu")
    there.current_device = torch.device("npu")
    there.feature_dims = here.feature_dims
    batch = make_batch(group, torch.Generator().manual_seed(6), weighted=mode == "weighted")
    with our_kernel():
        expected = run(here, batch, torch.ones_like)
    there_batch = moved(batch)
    npu.reset()
    found = run(there, there_batch, torch.ones_like)
    assert npu.counters().host_syncs == 0, npu.host_syncs()
    torch.testing.assert_close(found, expected, **_EXACT)
    torch.testing.assert_close(there.weights.grad, here.weights.grad, **_EXACT)


def fill_on_npu(module: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    for table in module.split_embedding_weights():
        table.copy_(dyadic(table.shape, generator))


def test_stock_fbgemm_refuses_adam_on_npu(npu: Any) -> None:
    (record,) = fused_tables_on_device.ADAPTATIONS
    adaptation.undo(record)
    try:
        with pytest.raises(AssertionError, match="is not supported in CPU mode"):
            on_npu(MIXED, "adam")
    finally:
        assert adaptation.apply(record).status == "applied"
    assert on_npu(MIXED, "adam").weights_dev.device.type == "npu"


@pytest.mark.parametrize(
    ("location", "arguments", "message"),
    [
        ("MANAGED", {}, "table 0 has location MANAGED, but npu has neither unified memory nor caches"),
        ("HOST", {"uvm_non_rowwise_momentum": True}, "uvm_non_rowwise_momentum is True, but npu has no unified memory"),
    ],
)
def test_tables_and_states_in_unified_memory_are_refused(
    npu: Any, location: str, arguments: dict[str, Any], message: str
) -> None:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    spec = (4, 4, EmbeddingLocation[location], ComputeDevice.CPU)
    with pytest.raises(ValueError, match=message):
        SplitTableBatchedEmbeddingBagsCodegen([spec], device="npu", **arguments)


def test_a_hundred_steps_with_many_duplicates_stay_with_the_cpu(npu: Any) -> None:
    generator = torch.Generator().manual_seed(8)
    here = make_module(UNIFORM, "adam", accelerator=True)
    fill(here, generator)
    there = on_npu(UNIFORM, "adam", here)
    gradient: Tensor
    for _ in range(100):
        batch = make_batch(UNIFORM, generator, size=16)
        gradient = torch.randn(16, 24, generator=generator)
        with our_kernels():
            run(here, batch, gradient)
        run(there, moved(batch), gradient.to("npu"))
    assert_equal(there, here)


def test_stock_torchrec_leaves_data_parallel_tables_on_the_cpu(npu: Any) -> None:
    from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
    from torchrec.distributed.embedding_types import (
        EmbeddingComputeKernel,
        GroupedEmbeddingConfig,
        ShardedEmbeddingTable,
    )
    from torchrec.modules.embedding_configs import DataType, PoolingType
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    common: dict[str, Any] = {
        "data_type": DataType.FP32,
        "pooling": PoolingType.MEAN,
        "is_weighted": False,
        "has_feature_processor": False,
        "compute_kernel": EmbeddingComputeKernel.DENSE,
    }
    table = ShardedEmbeddingTable(
        num_embeddings=5,
        embedding_dim=4,
        local_rows=5,
        local_cols=4,
        name="t",
        embedding_names=["f"],
        feature_names=["f"],
        weight_init_min=-1.0,
        weight_init_max=1.0,
        **common,
    )
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 1]), offsets=torch.tensor([0, 2, 3])).to("npu")

    def build() -> Any:
        torch.manual_seed(9)
        return BatchedDenseEmbeddingBag(
            GroupedEmbeddingConfig(embedding_tables=[table], **common), device=torch.device("npu", 0)
        )

    for record in dense_tables_on_device.ADAPTATIONS:
        adaptation.undo(record)
    stock = build()
    assert stock.emb_module.weights.device.type == "cpu"
    for record in dense_tables_on_device.ADAPTATIONS:
        assert adaptation.apply(record).status == "applied"
    ours = build()
    assert {tensor.device.type for _, tensor in ours.named_parameters()} == {"npu"}
    assert ours._param_per_table["t"].device.type == "npu"
    torch.testing.assert_close(ours.emb_module.weights.cpu(), stock.emb_module.weights, rtol=0.0, atol=0.0)
    ours(features).sum().backward()
    assert ours.emb_module.weights.grad.cpu().view(5, 4)[:, 0].tolist() == [0.0, 1.5, 0.5, 0.0, 0.0]
