"""The fused lookup, with tensors on the CPU, against fbgemm's own CPU kernel and a float64 oracle."""

from __future__ import annotations

import gc
import weakref
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
    Group,
    Oracle,
    SparseType,
    WeightDecayMode,
    dyadic,
    fill,
    make_batch,
    make_module,
    our_kernels,
    run,
    split_output,
    states_of,
)

# fbgemm calls Adam, LAMB and LARS experimental
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*EXPERIMENTAL:UserWarning")

MODES = ("sum", "mean", "weighted", "sequence")


def pair(group: Group, optimizer: str, mode: str, seed: int, **arguments: Any) -> tuple[Any, Any, torch.Generator]:
    """fbgemm's module for the CPU and one that will run our kernels, with the same tables."""
    generator = torch.Generator().manual_seed(seed)
    pooling = POOLING["sum" if mode == "weighted" else mode]
    stock = make_module(group, optimizer, accelerator=False, pooling_mode=pooling, **arguments)
    ours = make_module(group, optimizer, accelerator=True, pooling_mode=pooling, **arguments)
    for table, filled in zip(ours.split_embedding_weights(), fill(stock, generator), strict=True):
        table.copy_(filled)
    return stock, ours, generator


def assert_same(stock: Any, ours: Any, *, exact: bool = False) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for expected, found in zip(stock.split_embedding_weights(), ours.split_embedding_weights(), strict=True):
        torch.testing.assert_close(found, expected, **tolerance)
    for expected, found in zip(states_of(stock), states_of(ours), strict=True):
        torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", [UNIFORM, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_lookup_and_update_equal_those_of_fbgemms_cpu_kernel(
    group: Group, mode: str, optimizer: str, implementation: str
) -> None:
    if group is MIXED and mode == "sequence":
        group = Group(((9, 12), (4, 12), (6, 12)), (0, 1, 2, 2))  # tables of several widths cannot be sequences
    stock, ours, generator = pair(group, optimizer, mode, 1)
    for step in range(4):
        batch = make_batch(
            group, generator, weighted=mode == "weighted", dtype=torch.int32 if step % 2 else torch.int64
        )
        gradient = torch.randn(output_shape(group, batch, mode), generator=generator)
        expected = run(stock, batch, gradient)
        with our_kernels(implementation):
            found = run(ours, batch, gradient)
        torch.testing.assert_close(found, expected)
    assert_same(stock, ours)


@pytest.mark.parametrize("mode", ["sum", "weighted", "sequence"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_dyadic_gradients_are_summed_exactly_so_that_nothing_differs_by_a_bit(optimizer: str, mode: str) -> None:
    stock, ours, generator = pair(UNIFORM, optimizer, mode, 2)
    batch = make_batch(UNIFORM, generator, size=40, weighted=mode == "weighted")
    gradient = dyadic(output_shape(UNIFORM, batch, mode), generator)
    expected = run(stock, batch, gradient)
    with our_kernels():
        found = run(ours, batch, gradient)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    # row-wise Adagrad's states are sums of squares; its weights go through a square root
    for name in ("states", "weights")[: 2 if optimizer == "sgd" else 1]:
        read = states_of if name == "states" else (lambda module: module.split_embedding_weights())
        torch.testing.assert_close(read(ours), read(stock), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZER_TYPES))
def test_every_optimizer_follows_its_formula_in_float64(optimizer: str, mode: str) -> None:
    group = UNIFORM if mode == "sequence" else MIXED
    decay = {} if optimizer in ("sgd", "adagrad", "rowwise_adagrad") else {"weight_decay": 0.1}
    compare_with_oracle(group, optimizer, mode, **decay)


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE},
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.NONE},
        {"max_norm": 1.5},
    ],
    ids=["L2", "decoupled", "none", "max_norm"],
)
def test_rowwise_adagrad_decays_weights_and_limits_their_norm(arguments: dict[str, Any]) -> None:
    compare_with_oracle(MIXED, "rowwise_adagrad", "sum", **arguments)


@pytest.mark.parametrize("mode", ["mean", "sequence"])
def test_gradients_of_the_output_are_clamped_before_they_are_spread(mode: str) -> None:
    group = UNIFORM if mode == "sequence" else MIXED
    compare_with_oracle(group, "adagrad", mode, max_gradient=0.75)


def test_adam_can_correct_its_bias_by_the_updates_of_each_row() -> None:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import UserEnabledConfigDefinition

    config = UserEnabledConfigDefinition(use_rowwise_bias_correction=True)
    compare_with_oracle(
        MIXED, "adam", "sum", oracle_name="rowwise_counted_adam", extra_optimizer_config=config, steps=8
    )


def test_the_mean_of_weighted_ids_divides_both_passes_by_the_length() -> None:
    # fbgemm's CPU kernel forgets it in the backward pass ("MEAN pooling will not work with indice_weights!")
    generator = torch.Generator().manual_seed(3)
    module = make_module(MIXED, "sgd", accelerator=True, pooling_mode=POOLING["mean"], learning_rate=1.0)
    tables = [table.requires_grad_() for table in fill(module, generator)]
    batch = make_batch(MIXED, generator, weighted=True)
    assert batch.weights is not None
    weights = batch.weights.clone().requires_grad_()
    bags = []
    for bag, (feature, _) in enumerate(batch.bags(len(MIXED.features))):
        span = slice(int(batch.offsets[bag]), int(batch.offsets[bag + 1]))
        rows = tables[MIXED.features[feature]][batch.indices[span]]
        bags.append((rows * weights[span, None]).sum(0) / max(len(rows), 1))
    gradient = dyadic(output_shape(MIXED, batch, "mean"), generator)
    pulled = split_output(gradient, MIXED, batch, "mean")
    torch.autograd.backward(bags, pulled)
    with our_kernels():
        output, weights_gradient = run(module, batch, gradient)
    torch.testing.assert_close(split_output(output, MIXED, batch, "mean"), [bag.detach() for bag in bags])
    torch.testing.assert_close(weights_gradient, weights.grad)
    for table, updated in zip(tables, module.split_embedding_weights(), strict=True):
        assert table.grad is not None
        torch.testing.assert_close(updated, table.detach() - table.grad)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_weights_of_ids_get_no_gradient_for_features_that_do_not_want_one(implementation: str) -> None:
    stock, ours, generator = pair(MIXED, "sgd", "weighted", 4)
    batch = make_batch(MIXED, generator, weighted=True)
    assert batch.weights is not None
    wanted = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    gradients = []
    for module in (stock, ours):
        weights = batch.weights.clone().requires_grad_()
        with our_kernels(implementation) if module is ours else torch.enable_grad():
            module(batch.indices, batch.offsets, weights, feature_requires_grad=wanted).sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    begin, end = int(batch.offsets[6]), int(batch.offsets[12])
    assert end > begin and not gradients[1][begin:end].any()


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_variable_batch_sizes_give_the_flat_output_by_rank_and_feature(optimizer: str) -> None:
    by_rank = [[2, 0, 3], [0, 0, 0], [1, 4, 0], [0, 2, 2]]
    compare_with_oracle(MIXED, optimizer, "sum", by_rank=by_rank)
    compare_with_oracle(UNIFORM, optimizer, "mean", by_rank=by_rank[:3])
    if optimizer == "adam":
        return
    for group in (UNIFORM, MIXED):
        sizes = by_rank[: len(group.features)]
        stock, ours, generator = pair(group, optimizer, "weighted", 5)
        batch = make_batch(group, generator, weighted=True, by_rank=sizes)
        gradient = dyadic(output_shape(group, batch, "weighted"), generator)
        expected = run(stock, batch, gradient)
        with our_kernels():
            torch.testing.assert_close(run(ours, batch, gradient), expected)
        assert_same(stock, ours)


def test_groups_that_share_one_output_fill_their_parts_and_get_their_gradients() -> None:
    by_rank = [[2, 1], [0, 3], [1, 1], [2, 0]]
    generator = torch.Generator().manual_seed(6)
    groups = (UNIFORM, MIXED)
    batches = [make_batch(group, generator, by_rank=by_rank[: len(group.features)]) for group in groups]
    alone = [make_module(group, "sgd", accelerator=True) for group in groups]
    joint = [make_module(group, "sgd", accelerator=True) for group in groups]
    places, begin = [], 0  # of each group's bags in the joint output: rank 0 of both groups, then rank 1
    sizes = [
        [[width * ranks[rank] for width, ranks in zip(group.widths, by_rank, strict=False)] for rank in range(2)]
        for group in groups
    ]
    starts = [torch.zeros(2, len(group.features), dtype=torch.int64) for group in groups]
    for rank in range(2):
        for number in range(2):
            for feature, size in enumerate(sizes[number][rank]):
                starts[number][rank, feature] = begin
                places.append((number, begin, size))
                begin += size
    gradient = dyadic((begin,), generator)
    output = torch.full((begin,), torch.nan)
    with our_kernels():
        for number, batch in enumerate(batches):
            tables = fill(alone[number], generator)
            for table, filled in zip(joint[number].split_embedding_weights(), tables, strict=True):
                table.copy_(filled)
            output = joint[number](
                batch.indices,
                batch.offsets,
                batch_size_per_feature_per_rank=batch.by_rank,
                vbe_output=output,
                vbe_output_offsets=starts[number],
            )
        output.backward(gradient)
        for number, batch in enumerate(batches):
            own = torch.cat([gradient[at : at + size] for group, at, size in places if group == number])
            found, _ = run(alone[number], batch, own)
            filled = torch.cat([output[at : at + size] for group, at, size in places if group == number])
            torch.testing.assert_close(filled.detach(), found, rtol=0.0, atol=0.0)
            assert_same(alone[number], joint[number], exact=True)


@pytest.mark.parametrize("shared_output", [False, True])
def test_an_output_is_freed_with_its_last_reference(shared_output: bool) -> None:
    module = make_module(UNIFORM, "sgd", accelerator=True)
    fill(module, torch.Generator().manual_seed(19))
    indices, offsets = torch.tensor([3]), torch.tensor([0, 1, 1, 1])
    given: dict[str, Any] = {}
    if shared_output:
        begins = torch.tensor([[0, 8, 16]])
        given = {
            "batch_size_per_feature_per_rank": [[1]] * 3,
            "vbe_output_offsets": begins,
            "vbe_output": torch.zeros(24),
        }
    gc.disable()
    try:
        with our_kernels():
            output = module(indices, offsets, **given)
        given.clear()
        alive = weakref.ref(output)
        del output
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZER_TYPES))
def test_ids_that_stand_for_pruned_rows_add_nothing_and_update_nothing(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(7)
    pruned, plain = (make_module(MIXED, optimizer, accelerator=True) for _ in range(2))
    for table, filled in zip(plain.split_embedding_weights(), fill(pruned, generator), strict=True):
        table.copy_(filled)
    batch = make_batch(MIXED, generator)
    keep = torch.rand(len(batch.indices), generator=generator) < 0.6
    lengths = torch.stack([kept.sum() for kept in keep.split(batch.offsets.diff().tolist())])
    shorter = Batch(batch.indices[keep], torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    gradient = dyadic(output_shape(MIXED, batch, "sum"), generator)
    with our_kernels():
        found, _ = run(pruned, Batch(torch.where(keep, batch.indices, -1), batch.offsets), gradient)
        expected, _ = run(plain, shorter, gradient)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert_same(plain, pruned, exact=True)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZER_TYPES))
def test_a_batch_without_a_single_row_leaves_tables_and_states_as_they_are(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(8)
    module = make_module(MIXED, optimizer, accelerator=True)
    before = fill(module, generator)
    states = [state.clone() for state in states_of(module)]
    empty = torch.zeros(0, dtype=torch.int64)
    batches = [
        Batch(torch.full((5,), -1), torch.tensor([0, 2, 2, 5, 5, 5, 5, 5, 5])),  # pruned rows only
        Batch(empty, torch.zeros(9, dtype=torch.int64)),  # bags without ids
        Batch(empty, torch.zeros(1, dtype=torch.int64)),  # no bags
        Batch(torch.tensor([1, 2]), torch.zeros(1, dtype=torch.int64)),  # ids that no bag claims
    ]
    with our_kernels():
        for batch in batches:
            output, _ = run(module, batch, torch.ones_like)
            assert output.shape == ((len(batch.offsets) - 1) // 4, 28)
            assert not output.any()
    torch.testing.assert_close(module.split_embedding_weights(), before, rtol=0.0, atol=0.0)
    torch.testing.assert_close(states_of(module), states, rtol=0.0, atol=0.0)


def test_sequences_of_an_empty_batch_are_empty_and_ids_outside_of_any_bag_give_zeros() -> None:
    generator = torch.Generator().manual_seed(9)
    module = make_module(UNIFORM, "sgd", accelerator=True, pooling_mode=POOLING["sequence"], learning_rate=1.0)
    before = fill(module, generator)
    with our_kernels():
        nothing = Batch(torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
        output, _ = run(module, nothing, torch.ones_like)
        assert output.shape == (0, 8)
        output, _ = run(module, Batch(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 2, 4])), torch.ones_like)
    torch.testing.assert_close(output[1:4], torch.stack([before[0][2], before[1][3], before[1][4]]))
    assert not output[0].any() and not output[4].any()
    changed = (module.split_embedding_weights()[0] != before[0]).any(1)
    assert changed.tolist() == [row == 2 for row in range(11)]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("indices_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_ids_and_offsets_may_be_strided_and_of_different_integer_types(
    mode: str, indices_dtype: torch.dtype, offsets_dtype: torch.dtype
) -> None:
    from turbogr_plugin.kernels.fbgemm_lookup import operator_function

    stock, ours, generator = pair(MIXED, "adagrad", mode, 10)
    batch = make_batch(MIXED, generator)
    gradient = dyadic(output_shape(MIXED, batch, mode), generator)
    expected = run(stock, batch, gradient)[0]
    lookup = operator_function("adagrad")

    def strided(*args: Any, **kwargs: Any) -> Tensor:
        for name, dtype in (("indices", indices_dtype), ("offsets", offsets_dtype)):
            wide = torch.stack([kwargs[name], kwargs[name] + 1], 1).to(dtype)
            kwargs[name] = wide[:, 0]
        return lookup(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.fbgemm, "split_embedding_codegen_lookup_adagrad_function_pt2", strided)
        output = ours(batch.indices, batch.offsets)
        # a gradient that is expanded or transposed is no different
        output.backward(gradient.t().contiguous().t())
    torch.testing.assert_close(output.detach(), expected)
    assert_same(stock, ours)


@pytest.mark.parametrize("output", ["FP32", "FP16"])  # fbgemm's CPU kernel has no bf16
@pytest.mark.parametrize("tables", ["FP32", "FP16"])
@pytest.mark.parametrize("mode", ["sum", "sequence"])
def test_outputs_and_tables_in_half_precision_round_as_the_cpu_kernel_does(mode: str, tables: str, output: str) -> None:
    stock, ours, generator = pair(
        UNIFORM,
        "rowwise_adagrad",
        mode,
        11,
        weights_precision=getattr(SparseType, tables),
        output_dtype=getattr(SparseType, output),
        stochastic_rounding=False,
    )
    for _ in range(3):
        batch = make_batch(UNIFORM, generator)
        gradient = torch.randn(output_shape(UNIFORM, batch, mode), generator=generator)
        expected, _ = run(stock, batch, lambda out, gradient=gradient: gradient.to(out.dtype))
        with our_kernels():
            found, _ = run(ours, batch, lambda out, gradient=gradient: gradient.to(out.dtype))
        torch.testing.assert_close(found, expected)
    assert_same(stock, ours)


@pytest.mark.parametrize("mode", MODES)
def test_a_bf16_output_is_the_fp32_output_rounded_and_its_gradient_is_that_of_it(mode: str) -> None:
    group = UNIFORM if mode == "sequence" else MIXED
    wide, narrow = (
        make_module(
            group,
            "sgd",
            accelerator=True,
            pooling_mode=POOLING["sum" if mode == "weighted" else mode],
            output_dtype=output_dtype,
        )
        for output_dtype in (SparseType.FP32, SparseType.BF16)
    )
    generator = torch.Generator().manual_seed(18)
    for table, filled in zip(narrow.split_embedding_weights(), fill(wide, generator), strict=True):
        table.copy_(filled)
    batch = make_batch(group, generator, weighted=mode == "weighted")
    gradient = dyadic(output_shape(group, batch, mode), generator)
    with our_kernels():
        expected, _ = run(wide, batch, gradient)
        found, _ = run(narrow, batch, gradient.bfloat16())
    assert torch.equal(found, expected.bfloat16())
    assert_same(wide, narrow, exact=True)


def test_tables_in_bf16_are_read_and_written() -> None:
    generator = torch.Generator().manual_seed(12)
    module = make_module(
        MIXED,
        "sgd",
        accelerator=True,
        weights_precision=SparseType.BF16,
        cache_precision=SparseType.FP32,
        stochastic_rounding=False,
        learning_rate=1.0,
    )
    before = fill(module, generator)
    batch = make_batch(MIXED, generator)
    with our_kernels():
        output, _ = run(module, batch, torch.ones_like)
    oracle = Oracle(MIXED, "sgd", before, learning_rate=1.0)
    sums = oracle.bag_sums(batch, "sum")
    torch.testing.assert_close(split_output(output, MIXED, batch, "sum"), [bag.float() for bag in sums])
    oracle.step(batch, "sum", [torch.ones_like(bag) for bag in sums])
    for table, expected in zip(module.split_embedding_weights(), oracle.weights, strict=True):
        torch.testing.assert_close(table, expected.bfloat16())


@pytest.mark.parametrize("precision", ["FP16", "BF16"])
def test_stochastic_rounding_hits_both_neighbours_and_no_other_value_and_is_right_on_average(precision: str) -> None:
    torch.manual_seed(13)
    rows, width = 4096, 8
    module = make_module(
        Group(((rows, width),), (0,)),
        "sgd",
        accelerator=True,
        weights_precision=getattr(SparseType, precision),
        cache_precision=SparseType.FP32,
        stochastic_rounding=True,
        learning_rate=1.0,
    )
    module.split_embedding_weights()[0].fill_(1.0)
    spacing = {"FP16": 2.0**-10, "BF16": 2.0**-7}[precision]
    with our_kernels():  # 1 + spacing / 4
        run(module, Batch(torch.arange(rows), torch.arange(rows + 1)), lambda out: torch.full_like(out, -spacing / 4))
    found = module.split_embedding_weights()[0].float()
    assert set(found.unique().tolist()) == {1.0, 1.0 + spacing}
    share = float((found > 1.0).float().mean())  # standard deviation of the share: 0.0024
    assert abs(share - 0.25) < 0.015, f"{share} of {found.numel()} were rounded up"


def test_the_learning_rate_of_the_forward_pass_counts() -> None:
    generator = torch.Generator().manual_seed(14)
    module = make_module(UNIFORM, "sgd", accelerator=True, learning_rate=1.0)
    before = fill(module, generator)
    with our_kernels():
        output = module(torch.tensor([3]), torch.tensor([0, 1, 1, 1]))
        module.set_learning_rate(100.0)
        output.sum().backward()
        torch.testing.assert_close(module.split_embedding_weights()[0][3], before[0][3] - 1.0)
        module(torch.tensor([3]), torch.tensor([0, 1, 1, 1])).sum().backward()
    torch.testing.assert_close(module.split_embedding_weights()[0][3], before[0][3] - 101.0)


def test_two_lookups_may_be_under_way_before_their_backward_passes() -> None:
    generator = torch.Generator().manual_seed(15)
    module = make_module(MIXED, "adam", accelerator=True)
    before = fill(module, generator)
    batch = make_batch(MIXED, generator)
    with our_kernels():
        first, second = module(batch.indices, batch.offsets), module(batch.indices, batch.offsets)
        torch.testing.assert_close(first, second)
        first.sum().backward()
        second.sum().backward()
    oracle = Oracle(MIXED, "adam", before)
    for _ in range(2):
        oracle.step(batch, "sum", [torch.ones(MIXED.widths[feature]) for feature, _ in batch.bags(4)])
    for table, expected in zip(module.split_embedding_weights(), oracle.weights, strict=True):
        torch.testing.assert_close(table, expected.float())


def test_a_table_with_more_than_two_to_the_31_elements_is_addressed_in_full() -> None:
    # 4.3 GB of address space, of which only the pages of the rows in use become memory
    from turbogr_plugin.kernels.table_rows import FlatTables, Rows, Tables, lookup_rows, store_rows

    rows, width = 2**28 + 3, 8
    tables = Tables(torch.tensor([0, width]), torch.tensor([0, rows]), width, width)
    mixed = Tables(torch.tensor([0, width, 2 * width - 4]), torch.tensor([0, rows - 1, rows + 1]), 2 * width - 4, width)
    buffer = FlatTables(torch.empty(rows * width, dtype=torch.float16), torch.tensor([0]))
    last = torch.tensor([rows - 1, 0, rows - 2])
    block = torch.arange(24.0).view(3, 8)
    store_rows(buffer, tables, Rows(torch.zeros(3, dtype=torch.int64), last), block)
    assert torch.equal(buffer.values.view(-1, width)[[rows - 1, 0, rows - 2]].float(), block)
    found = lookup_rows(buffer, tables, Rows(torch.zeros(3, dtype=torch.int64), last))
    assert torch.equal(found.float(), block)
    two = FlatTables(buffer.values, torch.tensor([0, (rows - 1) * width]))
    found = lookup_rows(two, mixed, Rows(torch.tensor([0, 1, 1]), torch.tensor([rows - 2, 0, 1])))
    assert found[:, :4].tolist() == [[16.0, 17.0, 18.0, 19.0], [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"offsets": torch.tensor([0, 1, 1])},
            "2 bags cannot be the same number for each of 4",
        ),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, r"offsets has shape \(0,\), needed is"),
        ({"indices": torch.zeros(3)}, "indices must be int32 or int64, got torch.float32"),
        ({"indices": torch.zeros(1, 1, dtype=torch.int64)}, r"indices has shape \(1, 1\), needed is"),
        ({"indice_weights": torch.ones(2)}, "indice_weights has 2 elements for 1 indices"),
        ({"pooling_mode": 7}, r"pooling_mode must be 0 \(SUM\), 1 \(MEAN\) or 2 \(NONE\), got 7"),
        ({"pooling_mode": 2}, "without pooling all tables must have one width, got 4 features with 28 columns"),
        ({"output_dtype": 2}, "output_dtype 2 is not supported by our lookup, only 0"),
        (
            {"aux_bool": [False, False, True, True, False, False, True]},
            "global weight decay .* is not supported by our lookup",
        ),
    ],
)
def test_what_does_not_fit_together_or_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    from turbogr_plugin.kernels.fbgemm_lookup import operator_function

    module = make_module(MIXED, "sgd", accelerator=True)
    lookup = operator_function("sgd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.ops.fbgemm,
            "split_embedding_codegen_lookup_sgd_function_pt2",
            lambda **given: lookup(**(given | changes)),
        )
        with pytest.raises((ValueError, NotImplementedError), match=message):
            module(torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1]))


def test_an_optimizer_that_is_not_served_is_refused_with_the_list_of_those_that_are() -> None:
    from turbogr_plugin.kernels.fbgemm_lookup import KERNELS

    none = next(kernel.function for kernel in KERNELS if "lookup_none_function" in kernel.schema)
    with pytest.raises(
        NotImplementedError, match="optimizer none is not supported by our lookup, only adagrad, adam, lamb"
    ):
        none()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_hundred_steps_with_many_duplicates_stay_with_the_cpu_kernel(optimizer: str) -> None:
    stock, ours, generator = pair(UNIFORM, optimizer, "sum", 16, learning_rate=2.0**-6)
    for _ in range(100):
        batch = make_batch(UNIFORM, generator, size=16)
        gradient = dyadic(output_shape(UNIFORM, batch, "sum"), generator)
        expected, _ = run(stock, batch, gradient)
        with our_kernels():
            found, _ = run(ours, batch, gradient)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert_same(stock, ours, exact=optimizer == "sgd")


def output_shape(group: Group, batch: Batch, mode: str) -> tuple[int, ...]:
    """Shape of fbgemm's output."""
    if mode == "sequence":
        return len(batch.indices), group.widths[0]
    if batch.by_rank is not None:
        return (sum(width * sum(ranks) for width, ranks in zip(group.widths, batch.by_rank, strict=True)),)
    return (len(batch.offsets) - 1) // len(group.features), sum(group.widths)


def compare_with_oracle(
    group: Group,
    optimizer: str,
    mode: str,
    *,
    steps: int = 5,
    by_rank: list[list[int]] | None = None,
    max_gradient: float | None = None,
    oracle_name: str | None = None,
    extra_optimizer_config: Any = None,
    **arguments: Any,
) -> None:
    """Runs our kernels and the oracle side by side."""
    pooling = "sum" if mode == "weighted" else mode
    generator = torch.Generator().manual_seed(17)
    clipping = {} if max_gradient is None else {"gradient_clipping": True, "max_gradient": max_gradient}
    module = make_module(
        group,
        optimizer,
        accelerator=True,
        pooling_mode=POOLING[pooling],
        extra_optimizer_config=extra_optimizer_config,
        **clipping,
        **arguments,
    )
    oracle = Oracle(group, oracle_name or optimizer, fill(module, generator), **arguments)
    oracle.max_gradient = float("inf") if max_gradient is None else max_gradient
    for _ in range(steps):
        batch = make_batch(group, generator, weighted=mode == "weighted", by_rank=by_rank)
        gradient = torch.randn(output_shape(group, batch, mode), generator=generator)
        with our_kernels():
            output, _ = run(module, batch, gradient)
        expected = [bag.float() for bag in oracle.bag_sums(batch, pooling)]
        torch.testing.assert_close(split_output(output, group, batch, pooling), expected, rtol=1e-4, atol=1e-5)
        oracle.step(batch, pooling, split_output(gradient, group, batch, pooling))
    for table, expected_table in zip(module.split_embedding_weights(), oracle.weights, strict=True):
        torch.testing.assert_close(table, expected_table.float(), rtol=1e-4, atol=1e-5)
