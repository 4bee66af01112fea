"""`jagged_lookup` against a float64 oracle: every optimizer and pooling, large tables, half precision, odd batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from tests.kernels.lookup_cases import (
    FAST_OPTIMIZERS,
    MODES,
    Trained,
    lookup,
    make_batch,
    make_tables,
    train_beside_truth,
    update_of,
)
from tests.kernels.table_groups import Batch, Group, dyadic
from turbogr_plugin.kernels import explain
from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.fused_optimizers import Settings
from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.kernels.jagged_lookup import TableUpdate, jagged_lookup
from turbogr_plugin.kernels.lookup_call import StochasticRounding

UNIFORM = Group(((11, 8), (0, 8), (7, 8), (9, 8)), (0, 1, 0, 2, 3))  # a table without rows, and one with two features
MIXED = Group(((11, 8), (7, 4), (0, 4), (5, 16)), (0, 1, 1, 2, 3))
IMPLEMENTATIONS = ("reference", "cpu")
SLOW_OPTIMIZERS = ("partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd")


def group_of(mode: str) -> Group:
    return UNIFORM if mode in ("none", "mean") else MIXED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("gradients", "optimizer"),
    [*(("random", name) for name in FAST_OPTIMIZERS), *(("dyadic", name) for name in FAST_OPTIMIZERS[:3])],
)
def test_a_hundred_steps_with_many_duplicates_equal_those_of_a_dictionary_in_float64(
    gradients: str, optimizer: str, mode: str
) -> None:
    exact = gradients == "dyadic"
    train_beside_truth(group_of(mode), optimizer, mode, exact=exact, implementations=IMPLEMENTATIONS)


@pytest.mark.parametrize("optimizer", SLOW_OPTIMIZERS)
def test_optimizers_that_only_the_reference_has_follow_their_formula(optimizer: str) -> None:
    mode = MODES[SLOW_OPTIMIZERS.index(optimizer)]
    (trained,) = train_beside_truth(
        *(group_of(mode), optimizer, mode), exact=False, implementations=(None,), steps=40, weight_decay=0.1
    )
    batch = make_batch(trained.group, torch.Generator().manual_seed(1), weighted="weighted" in mode)
    keywords = {"id_weights": batch.weights, "update": update_of(trained, 1)}
    choice = explain(lookup, trained, batch, mode, **keywords)
    assert choice.implementation == "reference"
    assert optimizer in choice.passed_over["cpu"]
    with pytest.raises(ValueError, match=f"'cpu' cannot serve this call of jagged_lookup: .*{optimizer}"):
        lookup(trained, batch, mode, implementation="cpu", **keywords)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_the_output_are_clamped_to_max_gradient(implementation: str) -> None:
    for mode in ("none", "weighted mean"):
        train_beside_truth(
            group_of(mode),
            "sgd",
            mode,
            exact=True,
            implementations=(implementation,),
            steps=10,
            max_gradient=0.75,
        )


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("rowwise_adagrad", {"weight_decay": 0.1, "weight_decay_mode": 1}),
        ("rowwise_adagrad", {"weight_decay": 0.1, "weight_decay_mode": 2}),
        ("adam", {"weight_decay": 0.1}),
    ],
    ids=["L2", "decoupled", "adam"],
)
def test_weights_decay_as_their_optimizer_says(optimizer: str, settings: dict[str, Any]) -> None:
    train_beside_truth(MIXED, optimizer, "sum", exact=False, implementations=IMPLEMENTATIONS, steps=40, **settings)


def test_what_the_cpp_does_not_limit_or_count_goes_to_the_reference() -> None:
    train_beside_truth(MIXED, "rowwise_adagrad", "sum", exact=False, implementations=(None,), steps=20, max_norm=1.5)
    for optimizer, settings in (("rowwise_adagrad", {"max_norm": 1.5}), ("adam", {"rowwise_bias_correction": True})):
        counted = optimizer == "adam"
        trained = make_tables(MIXED, optimizer, torch.Generator().manual_seed(2), counted=counted)
        batch = make_batch(MIXED, torch.Generator().manual_seed(3))
        choice = explain(lookup, trained, batch, "sum", update=update_of(trained, 1, **settings))
        assert choice.implementation == "reference"
        assert next(iter(settings)) in choice.passed_over["cpu"]


@pytest.mark.parametrize("mode", ["none", "weighted sum"])
def test_tables_of_other_widths_that_no_feature_reads_may_lie_between(mode: str) -> None:
    group = Group(((5, 3), (11, 8), (3, 1), (7, 8), (1, 5)), (1, 3, 1))
    train_beside_truth(group, "rowwise_adagrad", mode, exact=True, implementations=IMPLEMENTATIONS, steps=20)
    weights = make_tables(group, "sgd", torch.Generator().manual_seed(1)).weights
    grads = []
    for implementation in IMPLEMENTATIONS:
        leaf = weights.clone().requires_grad_()
        batch = make_batch(group, torch.Generator().manual_seed(2))
        lookup(Trained(group, "sgd", leaf, []), batch, "none", implementation=implementation).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def file_backed(path: Path, elements: int) -> Tensor:
    """Zeros in a file with a hole: only the pages that are touched take memory."""
    return torch.from_file(str(path), shared=True, size=elements)


@pytest.mark.parametrize("mode", ["none", "weighted sum"])
def test_rows_beyond_two_to_the_24_and_elements_beyond_two_to_the_31_are_told_apart(tmp_path: Path, mode: str) -> None:
    # float32 cannot tell ids above 2^24 apart; the second table begins behind element 2^31
    rows = (2**28 + 9, 2**24 + 9)
    group = Group(((rows[0], 8), (rows[1], 8)), (0, 1, 1))
    trained = []
    for name in IMPLEMENTATIONS:
        buffers = [file_backed(tmp_path / f"{name}{size}", size * sum(rows)) for size in (8, 1)]
        trained.append(Trained(group, "rowwise_adagrad", buffers[0], [buffers[1]]))
    train_beside_truth(
        *(group, "rowwise_adagrad", mode),
        exact=True,
        implementations=IMPLEMENTATIONS,
        steps=20,
        trained=trained,
        first=(rows[0] - 5, rows[1] - 5),
    )
    for tables in trained:
        touched = tables.states[0][-16:] != 0
        assert touched.nonzero().min() >= 11


def test_shapes_of_tables_larger_than_any_memory_are_told_without_data() -> None:
    weights = torch.empty(2**33, device="meta")
    ids = torch.empty(5, dtype=torch.int64, device="meta")
    offsets = torch.empty(2, dtype=torch.int64, device="meta")
    output = jagged_lookup(weights, ids, offsets, rows=2**26, dim=128)
    assert isinstance(output, Tensor)
    assert output.shape == (5, 128)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positives_in_fp32_and_negatives_in_half_precision_come_from_one_table(
    dtype: torch.dtype, implementation: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    trained = [make_tables(Group(((9, 8),), (0, 0, 0)), "adagrad", generator) for _ in range(2)]
    trained[1].weights.copy_(trained[0].weights)
    ids = torch.tensor([1, 4, 1, 8, 8, 2, 1, -1, 0, 8])
    offsets = torch.tensor([0, 3, 3, 10])
    outputs = []
    for tables, kinds in zip(trained, ([torch.float32, dtype, dtype], [torch.float32] * 3), strict=True):
        found = jagged_lookup(
            *(tables.weights, ids, offsets),
            rows=9,
            dim=8,
            feature_tables=[0, 0, 0],
            output_dtype=kinds,
            update=update_of(tables, 1),
            implementation=implementation,
        )
        assert isinstance(found, tuple)
        outputs.append(found)
        sum(((part.float() * (1 + number)).sum() for number, part in enumerate(found)), torch.zeros(())).backward()
    (positives, negatives), (everything,) = outputs
    assert (positives.dtype, negatives.dtype) == (torch.float32, dtype)
    assert torch.equal(positives, everything[:3])
    assert torch.equal(negatives, everything[3:].to(dtype))
    # the gradients were 1 for positives and 2 for negatives, and 1 for all
    counts = torch.tensor([2.0, 2 + 2.0, 2.0, 0, 1.0, 0, 0, 0, 6.0])
    assert torch.equal(trained[0].states[0].view(9, 8)[:, 0], counts**2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_without_an_update_the_gradient_of_the_tables_is_that_of_torch(mode: str, implementation: str) -> None:
    group = Group(((11, 8), (7, 8)), (0, 1, 0))
    generator = torch.Generator().manual_seed(4)
    trained = make_tables(group, "sgd", generator)
    batch = make_batch(group, generator, weighted="weighted" in mode, absent=False)
    grads = []
    gradient: Tensor | None = None
    for ours in (True, False):
        weights = trained.weights.clone().requires_grad_()
        factors = None if batch.weights is None else batch.weights.clone().requires_grad_()
        tables = Trained(group, "sgd", weights, [])
        if ours:
            output = lookup(tables, batch, mode, id_weights=factors, implementation=implementation)
        else:
            output = _lookup_of_torch(tables, batch, mode, factors)
        gradient = dyadic(output.shape, generator) if gradient is None else gradient
        output.backward(gradient)
        grads.append((output.detach(), weights.grad, None if factors is None else factors.grad))
    torch.testing.assert_close(*grads)


def _lookup_of_torch(trained: Trained, batch: Batch, mode: str, factors: Tensor | None) -> Tensor:
    features = trained.group.features
    size = (len(batch.offsets) - 1) // len(features)
    ends = batch.offsets.tolist()
    columns = []
    for feature, table in enumerate(features):
        begin, end = ends[feature * size], ends[(feature + 1) * size]
        rows = embedding(batch.indices[begin:end], trained.table(table))
        if factors is not None:
            rows = rows * factors[begin:end, None]
        if mode != "none":
            lengths = batch.offsets[feature * size : (feature + 1) * size + 1].diff()
            bags = [part.sum(0) for part in rows.split(lengths.tolist())]
            rows = torch.stack(bags) / (lengths.clamp(min=1)[:, None] if "mean" in mode else 1)
        columns.append(rows)
    return torch.cat(columns, 0 if mode == "none" else 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["none", "sum", "mean"])
def test_odd_batches_give_what_their_dictionary_gives(mode: str, implementation: str) -> None:
    group = Group(((11, 8), (0, 8), (7, 8)), (0, 1, 2))
    batches = {
        "a feature without ids in the whole batch": ([3, 3, 1], [0, 2, 3, 3, 3, 3, 3]),
        "all ids equal": ([4, 4, 4, 4, 4], [0, 2, 3, 3, 3, 3, 5]),
        "ids in the last table only": ([6, 0, 6], [0, 0, 0, 0, 0, 1, 3]),
        "ids for the table without rows only": ([0, 1, -1], [0, 0, 0, 2, 3, 3, 3]),
        "no ids": ([], [0] * 7),
        "no bags": ([], [0]),
    }
    for name, (ids, offsets) in batches.items():
        generator = torch.Generator().manual_seed(5)
        trained = make_tables(group, "sgd", generator)
        before = [trained.table(number).clone() for number in range(3)]
        batch = Batch(torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets))
        if mode == "none" and len(offsets) == 1:
            continue
        output = lookup(trained, batch, mode, update=update_of(trained, 1), implementation=implementation)
        output.sum().backward()
        wanted = [table.clone() for table in before]
        for bag, (begin, end) in enumerate(pairwise(offsets)):
            for row in ids[begin:end]:
                table = wanted[bag // 2]
                if 0 <= row < len(table):
                    table[row] -= 2.0**-4 / ((end - begin) if mode == "mean" else 1)
        for number in range(3):
            assert torch.equal(trained.table(number), wanted[number]), name
        assert output.shape == ((len(ids), 8) if mode == "none" else ((len(offsets) - 1) // 3, 24))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["none", "sum"])
def test_gradients_may_have_any_strides(mode: str, implementation: str) -> None:
    group = group_of(mode)
    generator = torch.Generator().manual_seed(6)
    batch = make_batch(group, generator)
    found: list[tuple[Tensor, Tensor]] = []
    for kind in ("contiguous", "transposed", "strided", "expanded", "full"):
        trained = make_tables(group, "rowwise_adagrad", torch.Generator().manual_seed(7))
        output = lookup(trained, batch, mode, update=update_of(trained, 1), implementation=implementation)
        gradient = dyadic(output.shape, torch.Generator().manual_seed(8))
        if kind == "transposed":
            gradient = gradient.t().contiguous().t()
        elif kind == "strided":
            gradient = torch.stack([gradient, gradient + 1], 2)[:, :, 0]
        elif kind == "expanded":
            gradient = torch.tensor(0.5).expand(output.shape)
        elif kind == "full":
            gradient = torch.full(output.shape, 0.5)
        output.backward(gradient)
        found.append((trained.weights, trained.states[0]))
    for same in (found[:3], found[3:]):
        for other in same[1:]:
            assert torch.equal(other[0], same[0][0])
            assert torch.equal(other[1], same[0][1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_stochastic_rounding_gives_the_same_bits_with_every_implementation(optimizer: str, dtype: torch.dtype) -> None:
    tables = []
    for implementation in IMPLEMENTATIONS:
        generator = torch.Generator().manual_seed(9)
        # widths of one, two and four words of random numbers, and rows with and without a rest
        group = Group(((11, 8), (7, 4), (5, 12), (4, 6)), (0, 1, 1, 2, 3))
        trained = make_tables(group, optimizer, generator, dtype=dtype)
        for step in range(1, 6):
            batch = make_batch(group, generator)
            update = update_of(trained, step, stochastic_rounding=StochasticRounding(seed=17, step=step))
            output = lookup(trained, batch, "sum", update=update, implementation=implementation)
            output.backward(dyadic(output.shape, generator))
        tables.append(trained)
    assert torch.equal(tables[0].weights, tables[1].weights)


def test_stochastic_rounding_is_a_function_of_seed_step_row_and_column_and_right_on_average() -> None:
    rows, width = 4096, 8

    def rounded(ids: Tensor, seed: int, step: int) -> Tensor:
        trained = Trained(Group(((rows, width),), (0,)), "sgd", torch.ones(rows * width, dtype=torch.bfloat16), [])
        update = update_of(trained, 1, learning_rate=1.0, stochastic_rounding=StochasticRounding(seed, step))
        batch = Batch(ids, torch.tensor([0, len(ids)]))
        lookup(trained, batch, "none", update=update).backward(torch.full((len(ids), width), -(2.0**-9)))
        return trained.weights.view(rows, width)

    everything = torch.arange(rows)
    found = rounded(everything, 1, 1)
    assert set(found.unique().tolist()) == {1.0, 1.0 + 2.0**-7}  # 1 + 2^-9 is a quarter of the way
    assert abs(float((found > 1).float().mean()) - 0.25) < 0.012  # five standard deviations
    assert torch.equal(rounded(everything.flip(0), 1, 1), found)
    assert torch.equal(rounded(everything[100:200], 1, 1)[100:200], found[100:200])
    for other in (rounded(everything, 2, 1), rounded(everything, 1, 2)):
        agreeing = float((other == found).float().mean())  # independent draws agree with 1/16 + 9/16
        assert abs(agreeing - 0.625) < 0.014


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", FAST_OPTIMIZERS)
def test_the_backward_pass_is_that_of_coalesced_rows_and_an_update_of_them(
    optimizer: str, dtype: torch.dtype, implementation: str
) -> None:
    group = Group(((50, 12),), (0, 0))
    fused, parted = (make_tables(group, optimizer, torch.Generator().manual_seed(17), dtype=dtype) for _ in range(2))
    generator = torch.Generator().manual_seed(18)
    for step in range(1, 6):
        batch = make_batch(group, generator, size=20)
        key = StochasticRounding(seed=3, step=step)
        gradient = torch.randn(len(batch.indices), 12, generator=generator)
        update = update_of(fused, step, stochastic_rounding=key)
        lookup(fused, batch, "none", update=update, implementation=implementation).backward(gradient)
        ids, rows = coalesce_rows(batch.indices, gradient, implementation=implementation)
        fused_update(
            *(parted.table(0), [state.view(50, -1).squeeze(1) for state in parted.states], ids, rows, optimizer),
            learning_rate=2.0**-4,
            iteration=step,
            eps=0.5,
            stochastic_rounding=key,
            implementation=implementation,
        )
    assert torch.equal(fused.weights, parted.weights)
    for one, other in zip(fused.states, parted.states, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["none", "sum", "weighted mean"])
def test_a_gradient_that_is_not_finite_names_its_table_before_anything_is_changed(
    mode: str, implementation: str
) -> None:
    group = Group(((11, 8), (7, 8)), (0, 1, 0))
    names = ["users", "items"]
    for bad, feature in ((torch.nan, 1), (torch.inf, 2), (-torch.inf, 0)):
        trained = make_tables(group, "adagrad", torch.Generator().manual_seed(10))
        before = trained.weights.clone()
        batch = Batch(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 1, 1, 3, 4, 4]))
        if "weighted" in mode:
            batch.weights = torch.ones(4)
        update = update_of(trained, 1, nan_guard=names)
        output = lookup(trained, batch, mode, id_weights=batch.weights, update=update, implementation=implementation)
        gradient = torch.ones_like(output)
        if mode == "none":
            gradient[(0, 1, 3)[feature], 5] = bad
        else:
            gradient[1, 8 * feature + 5] = bad
        with pytest.raises(ValueError, match=f"got {bad} for table '{names[group.features[feature]]}'"):
            output.backward(gradient)
        assert torch.equal(trained.weights, before)
        assert not trained.states[0].any()


def test_a_gradient_that_is_not_finite_is_found_in_each_block_and_a_block_that_is_not_used_has_zeros() -> None:
    trained = make_tables(Group(((5, 4), (3, 4)), (0, 1, 0)), "sgd", torch.Generator().manual_seed(16))
    before = trained.weights.clone()
    kinds = [torch.float16, torch.float32, torch.float32]
    for feature, block, place in ((0, 0, 1), (1, 1, 0), (2, 1, 2)):
        found = lookup(
            *(trained, Batch(torch.tensor([1, 2, 2, 1, 4]), torch.tensor([0, 2, 3, 5])), "none"),
            output_dtype=kinds,
            update=update_of(trained, 1, nan_guard=["users", "items"]),
        )
        gradient = torch.zeros_like(found[block])
        gradient[place, 3] = torch.nan
        name = ["users", "items", "users"][feature]
        with pytest.raises(ValueError, match=rf"table '{name}' \(feature {feature}, position {place + 2 * block}\)"):
            found[block].backward(gradient)
        assert torch.equal(trained.weights, before)


def test_a_gradient_that_is_not_finite_reaches_only_its_own_rows_without_the_guard() -> None:
    for implementation in IMPLEMENTATIONS:
        trained = make_tables(Group(((5, 4),), (0,)), "sgd", torch.Generator().manual_seed(11))
        before = trained.table(0).clone()
        batch = Batch(torch.tensor([2, -1, 2, 4]), torch.tensor([0, 4]))
        output = lookup(trained, batch, "none", update=update_of(trained, 1), implementation=implementation)
        gradient = torch.ones(4, 4)
        gradient[0, 1], gradient[1, 2] = torch.nan, torch.nan
        output.backward(gradient)
        assert trained.table(0).isnan().nonzero().tolist() == [[2, 1]]
        assert torch.equal(trained.table(0)[[0, 1, 3]], before[[0, 1, 3]])


def test_a_lookup_without_gradients_leaves_the_tables_and_takes_no_part_in_a_graph() -> None:
    trained = make_tables(MIXED, "sgd", torch.Generator().manual_seed(12))
    batch = make_batch(MIXED, torch.Generator().manual_seed(13))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not lookup(trained, batch, "sum", update=update_of(trained, 1)).requires_grad
            assert not lookup(trained, batch, "sum").requires_grad
    assert lookup(trained, batch, "sum", update=update_of(trained, 1)).requires_grad


def test_two_lookups_may_be_under_way_before_their_backward_passes() -> None:
    for implementation in IMPLEMENTATIONS:
        trained = make_tables(MIXED, "sgd", torch.Generator().manual_seed(14))
        before = trained.weights.clone()
        batch = make_batch(MIXED, torch.Generator().manual_seed(15))
        keywords: dict[str, Any] = {"update": update_of(trained, 1), "implementation": implementation}
        first, second = (lookup(trained, batch, "sum", **keywords) for _ in range(2))
        assert torch.equal(first, second)
        first.sum().backward()
        once = trained.weights - before
        second.sum().backward()
        assert torch.equal(trained.weights - before, 2 * once)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("changed", ["ids", "offsets", "id_weights"])
def test_what_changes_between_forward_and_backward_is_an_error_and_updates_nothing(
    changed: str, implementation: str
) -> None:
    weights, ids, offsets = torch.ones(8, 4), torch.tensor([1, 2, 5]), torch.tensor([0, 2, 3])
    given = {"ids": ids, "offsets": offsets, "id_weights": torch.ones(3)}
    update = TableUpdate(optimizer="sgd", settings=Settings(learning_rate=1.0))
    output = jagged_lookup(
        *(weights, ids, None),
        rows=8,
        dim=4,
        pooling="sum",
        bag_offsets=offsets,
        id_weights=given["id_weights"],
        update=update,
        implementation=implementation,
    )
    assert isinstance(output, Tensor)
    given[changed].fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert bool((weights == 1).all())


def test_rows_in_float64_of_narrower_tables_go_to_the_reference() -> None:
    weights, ids, offsets = torch.randn(6, 4), torch.tensor([1, 5]), torch.tensor([0, 2])
    given = {"rows": 6, "dim": 4, "output_dtype": torch.float64}
    found = jagged_lookup(weights, ids, offsets, **given)
    assert isinstance(found, Tensor)
    assert torch.equal(found, weights[ids].double())
    assert "returns rows in" in explain(jagged_lookup, weights, ids, offsets, **given).passed_over["cpu"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_are_repaired_before_the_lengths_of_features_are_taken_from_them(implementation: str) -> None:
    weights, ids = torch.arange(24.0).view(6, 4), torch.tensor([0, 1, 2])
    positives, negatives = jagged_lookup(
        *(weights, ids, torch.tensor([0, 2, 7])),
        rows=[3, 3],
        dim=4,
        output_dtype=[torch.float32, torch.float16],
        bounds_check="ignore",
        implementation=implementation,
    )
    assert torch.equal(positives, weights[:2])
    assert torch.equal(negatives, weights[5:].half())


def test_pooled_tables_of_one_column_are_contiguous_as_a_compiled_graph_expects() -> None:
    ids, offsets = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 2, 3, 4])
    weights = torch.arange(8.0)
    for implementation in ("reference", None):
        found = jagged_lookup(
            *(weights, ids, None),
            rows=[5, 3],
            dim=1,
            pooling="sum",
            bag_offsets=offsets,
            implementation=implementation,
        )
        assert isinstance(found, Tensor)
        assert found.is_contiguous()
        assert found.tolist() == [[0.0, 7.0], [1.0, 6.0]]


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gradient_of_zero_leaves_rows_finite_with_the_usual_settings(optimizer: str, implementation: str) -> None:
    weights = torch.ones(4, 8)
    states = {"adagrad": [(4, 8)], "rowwise_adagrad": [(4,)], "adam": [(4, 8), (4, 8)]}[optimizer]
    update = TableUpdate(
        optimizer=optimizer,
        states=[torch.zeros(shape) for shape in states],
        settings=Settings(learning_rate=0.1, iteration=1),
    )
    ids, offsets = torch.tensor([1, 1, 3]), torch.tensor([0, 3])
    output = jagged_lookup(weights, ids, offsets, rows=4, dim=8, update=update, implementation=implementation)
    assert isinstance(output, Tensor)
    version = weights._version
    output.backward(torch.zeros_like(output))
    assert bool((weights == 1).all())
    assert weights._version > version  # autograd is told, whatever has written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": torch.ones(4, 8)}, r"weights of two dimensions must be \[R, D\], R = 8 rows.*\(4, 8\)"),
        ({"rows": [4, 4], "dim": [4, 8]}, r"tables that all have D columns.*\[4, 8\] columns"),
        ({"update": TableUpdate(optimizer="sgd", settings=Settings(learning_rate=1.0), nan_guard="t")}, "nan_guard"),
    ],
)
def test_what_would_read_other_rows_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"weights": torch.ones(8, 4), "rows": 8, "dim": 4, **changes}
    with pytest.raises(ValueError, match=message):
        jagged_lookup(given.pop("weights"), torch.tensor([1]), torch.tensor([0, 1]), **given)
