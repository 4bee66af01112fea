"""The lookup with dense gradients, with tensors on the CPU, against fbgemm's CPU kernel and torch's autograd."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from tests.kernels.table_groups import (
    MIXED,
    POOLING,
    UNIFORM,
    Batch,
    Group,
    SparseType,
    dyadic,
    make_batch,
    run,
    split_output,
)
from turbogr_plugin.kernels import fbgemm_dense_lookup
from turbogr_plugin.kernels.fbgemm_dense_lookup import dense_embedding_codegen_lookup_function


def make_dense(group: Group, pooling: str, tables: list[Tensor] | None = None, **arguments: Any) -> Any:
    """fbgemm's module on the CPU."""
    module = DenseTableBatchedEmbeddingBagsCodegen(
        list(group.tables),
        feature_table_map=list(group.features),
        pooling_mode=POOLING[pooling],
        use_cpu=True,
        **arguments,
    )
    generator = torch.Generator().manual_seed(1)
    for number, table in enumerate(module.split_embedding_weights()):
        table.copy_(dyadic(table.shape, generator) if tables is None else tables[number])
    return module


def our_kernel() -> Any:
    return mock.patch.object(
        torch.ops.fbgemm, "dense_embedding_codegen_lookup_function", dense_embedding_codegen_lookup_function
    )


def bags_by_autograd(
    tables: list[Tensor], group: Group, batch: Batch, weights: Tensor | None, pooling: str
) -> list[Tensor]:
    """Bags (without pooling: rows) by plain indexing, which torch differentiates."""
    found: list[Tensor] = []
    for bag, (feature, _) in enumerate(batch.bags(len(group.features))):
        span = slice(int(batch.offsets[bag]), int(batch.offsets[bag + 1]))
        rows = tables[group.features[feature]][batch.indices[span].long()]
        if weights is not None:
            rows = rows * weights[span, None]
        if pooling == "sequence":
            found += list(rows)
        else:
            found.append(rows.sum(0) / (max(len(rows), 1) if pooling == "mean" else 1))
    return found


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("group", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_pooled_lookups_and_gradients_equal_those_of_the_cpu_kernel(group: Group, mode: str) -> None:
    pooling = "sum" if mode == "weighted" else mode
    stock, ours = make_dense(group, pooling), make_dense(group, pooling)
    generator = torch.Generator().manual_seed(2)
    batch = make_batch(group, generator, weighted=mode == "weighted")
    gradient = torch.randn(6, sum(group.widths), generator=generator)
    expected = run(stock, batch, gradient)
    with our_kernel():
        found = run(ours, batch, gradient)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.weights.grad, stock.weights.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted", "weighted mean", "variable", "sequence"])
@pytest.mark.parametrize("group", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_every_mode_equals_plain_indexing_under_autograd(group: Group, mode: str) -> None:
    # fbgemm's CPU kernel pools although it was told not to, and knows no variable batch sizes
    if mode == "sequence":
        group = Group(((11, 8), (7, 8)), (1, 0, 1) if group is MIXED else group.features)
    pooling = {"weighted": "sum", "weighted mean": "mean", "variable": "sum"}.get(mode, mode)
    module = make_dense(group, pooling)
    generator = torch.Generator().manual_seed(3)
    by_rank = [[2, 0, 3], [0, 0, 0], [1, 4, 0], [0, 2, 2]][: len(group.features)] if mode == "variable" else None
    batch = make_batch(group, generator, weighted=mode.startswith("weighted"), by_rank=by_rank)
    tables = [table.clone().requires_grad_() for table in module.split_embedding_weights()]
    weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
    bags = bags_by_autograd(tables, group, batch, weights, pooling)
    with our_kernel():
        output, weights_gradient = run(module, batch, lambda out: dyadic(out.shape, torch.Generator().manual_seed(4)))
    gradient = dyadic(output.shape, torch.Generator().manual_seed(4))
    torch.autograd.backward(bags, split_output(gradient, group, batch, pooling))
    torch.testing.assert_close(split_output(output, group, batch, pooling), [bag.detach() for bag in bags])
    expected = torch.cat([table.grad.flatten() for table in tables if table.grad is not None])
    torch.testing.assert_close(module.weights.grad, expected)
    if weights is not None:
        torch.testing.assert_close(weights_gradient, weights.grad)


@pytest.mark.parametrize("precision", ["FP16", "BF16"])
def test_gradients_of_tables_in_half_precision_are_summed_in_float32(precision: str) -> None:
    rows = 3000  # 3000 ones do not fit fp16's or bf16's integers one by one, but their sum does
    module = make_dense(Group(((2, 4),), (0,)), "sequence", weights_precision=getattr(SparseType, precision))
    with our_kernel():
        module(torch.zeros(rows, dtype=torch.int64), torch.tensor([0, rows])).sum().backward()
    assert module.weights.grad.dtype == module.weights.dtype
    expected = torch.tensor([3000.0] * 4 + [0.0] * 4).to(module.weights.dtype)
    assert torch.equal(module.weights.grad, expected)


def test_pruned_and_unclaimed_ids_give_no_gradient_even_where_the_first_row_is_infinite() -> None:
    module = make_dense(UNIFORM, "sum")
    with torch.no_grad():
        module.weights[:8] = torch.inf
    with our_kernel():
        output = module(torch.tensor([3, -1, 2, 5]), torch.tensor([0, 2, 3, 3]))
        output.sum().backward()
    assert output.isfinite().all()
    touched = module.weights.grad.view(-1, 8).any(1).nonzero().flatten().tolist()
    assert touched == [2, 3]


def test_an_output_dtype_is_honoured() -> None:
    module = make_dense(MIXED, "mean", output_dtype=SparseType.BF16)
    batch = make_batch(MIXED, torch.Generator().manual_seed(5))
    with our_kernel():
        output = module(batch.indices, batch.offsets)
        output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert module.weights.grad.dtype == torch.float32


def test_an_empty_batch_gives_zeros_and_a_gradient_of_zeros() -> None:
    module = make_dense(MIXED, "sum")
    with our_kernel():
        output = module(torch.zeros(0, dtype=torch.int64), torch.zeros(9, dtype=torch.int64))
        output.sum().backward()
    assert torch.equal(output, torch.zeros(2, 28))
    assert torch.equal(module.weights.grad, torch.zeros_like(module.weights))


def test_ids_that_no_table_has_give_zeros_and_are_told_apart_from_pruned_ones() -> None:
    group = UNIFORM
    module = make_dense(group, "sum")
    bags = len(group.features)
    indices = torch.tensor([1, 10**6, -7, -1])
    offsets = torch.tensor([0, 2, *[4] * (bags - 1)])
    with our_kernel(), mock.patch.object(fbgemm_dense_lookup, "report_later") as report:
        found = module(indices, offsets)
    (violations, _), _ = report.call_args
    assert int(violations) == 2
    first = module.split_embedding_weights()[group.features[0]][1]
    assert torch.equal(found[0, : first.numel()], first)
    assert not found[0, first.numel() :].any()
