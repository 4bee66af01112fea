"""Touched rows and their gradients against torch's own embeddings, and the update of them against a lookup's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from turbogr_plugin.sharding.sparse_exchange import SummedRows
from turbogr_plugin.sharding.table_update import check_tables, update_tables, zero_rows_stay
from turbogr_plugin.sharding.touched_rows import TableLayout, TouchedRows

SIZES = [(30, 8), (12, 4), (20, 8)]
FEATURES = [0, 0, 1, 2]  # the table of each; fbgemm on CPU wants those of a table side by side, as TorchRec has them
BAGS = 3


def tables_of(pooling: PoolingMode, optimizer: str = "EXACT_ADAGRAD", **arguments: Any) -> Any:
    sizes = [(rows, 8 if pooling == PoolingMode.NONE else dim) for rows, dim in SIZES]
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in sizes],
        feature_table_map=FEATURES,
        pooling_mode=pooling,
        optimizer=EmbOptimType[optimizer],
        learning_rate=0.125,
        **arguments,
    )
    generator = torch.Generator().manual_seed(1)
    for weights in made.split_embedding_weights():
        weights.copy_(torch.randn(weights.shape, generator=generator))
    return made


def lookup(seed: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """indices, offsets and weights; with `most` = 0 of nothing."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(FEATURES) * BAGS,), generator=generator)
    ids = [
        torch.randint(0, SIZES[FEATURES[bag // BAGS]][0], (int(count),), generator=generator)
        for bag, count in enumerate(lengths)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.cat(ids), offsets, torch.randint(1, 5, (int(lengths.sum()),), generator=generator) / 4


def grad_like(output: Tensor) -> Tensor:
    return torch.randint(-4, 5, output.shape, generator=torch.Generator().manual_seed(9)).float() / 8


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
@pytest.mark.parametrize(
    ("pooling", "weighted", "most"),
    [
        *(
            (pooling, False, most)
            for pooling in (PoolingMode.SUM, PoolingMode.MEAN, PoolingMode.NONE)
            for most in (5, 0)
        ),
        (PoolingMode.SUM, True, 5),  # fbgemm weights sums only
    ],
)
def test_gradients_by_row_and_then_the_update_are_the_update_of_the_lookup(
    optimizer: str, pooling: PoolingMode, weighted: bool, most: int
) -> None:
    theirs, ours = tables_of(pooling, optimizer), tables_of(pooling, optimizer)
    layout = TableLayout.of(ours)
    for seed in range(3):
        indices, offsets, weights = lookup(seed, most)
        given = {"per_sample_weights": weights} if weighted else {}
        output = theirs(indices, offsets, **given)
        grad = grad_like(output)
        if output.numel():
            output.backward(grad)
        touched = TouchedRows.of(layout, indices, offsets, weights if weighted else None)
        sums = SummedRows(touched.ids, touched.counts, touched.gradients(grad))
        update_tables(ours, layout, sums, torch.tensor(0.125), iteration=seed + 1)
    # 1/3 of a bag's mean is no dyadic number: its multiples are added in another order
    rounding = 1e-6 if pooling == PoolingMode.MEAN else 0.0
    for here, there in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        assert torch.allclose(here, there, rtol=0, atol=rounding)
    for here_states, there_states in zip(ours.split_optimizer_states(), theirs.split_optimizer_states(), strict=True):
        for here, there in zip(here_states, there_states, strict=True):
            assert torch.allclose(here, there, rtol=0, atol=rounding)


def test_the_update_leaves_counters_rate_and_dtype_as_they_were() -> None:
    tables = tables_of(PoolingMode.SUM, "EXACT_ROWWISE_ADAGRAD")
    layout = TableLayout.of(tables)
    indices, offsets, _ = lookup(0, 5)
    grad = grad_like(tables(indices, offsets))
    before = (tables.step, int(tables.iter), tables.output_dtype, tables._indices, float(tables.learning_rate_tensor))
    touched = TouchedRows.of(layout, indices, offsets, None)
    sums = SummedRows(touched.ids, touched.counts, touched.gradients(grad))
    with torch.no_grad():
        update_tables(tables, layout, sums, torch.tensor(0.5), iteration=1)
    after = (tables.step, int(tables.iter), tables.output_dtype, tables._indices, float(tables.learning_rate_tensor))
    assert after == before


def test_linear_ids_put_tables_of_one_width_together() -> None:
    layout = TableLayout.of(tables_of(PoolingMode.SUM))
    assert layout.order == (1, 0, 2)
    assert layout.bounds == (0, 12, 42, 62)
    assert [(width.dim, width.tables, width.features) for width in layout.widths] == [
        (4, (0,), (2,)),
        (8, (1, 2), (0, 1, 3)),
    ]
    indices, offsets, _ = lookup(0, 5)
    touched = TouchedRows.of(layout, indices, offsets, None)
    of_feature = offsets[::BAGS]
    named = {
        (FEATURES[f], int(row))
        for f in range(len(FEATURES))
        for row in indices[int(of_feature[f]) : int(of_feature[f + 1])]
    }
    assert sorted(layout.starts[table] + row for table, row in named) == touched.ids.tolist()
    assert touched.counts == [sum(table == each for table, _ in named) for each in layout.order]


def test_which_tables_have_an_exact_sum() -> None:
    check_tables(tables_of(PoolingMode.SUM))
    with pytest.raises(ValueError, match="gradient_clipping is of each lookup"):
        check_tables(tables_of(PoolingMode.SUM, gradient_clipping=True, max_gradient=1.0))
    assert zero_rows_stay(tables_of(PoolingMode.SUM))
    assert not zero_rows_stay(tables_of(PoolingMode.SUM, "EXACT_ROWWISE_ADAGRAD", weight_decay=0.1))
