"""Lookup of a group of tables, pooling, and their gradients: what the fused and the dense lookup of fbgemm share.

An id of -1 (pruned row), or one that no bag claims, adds nothing; the length that the mean divides by counts it, as
upstream. The mean of weighted ids divides both passes by the length; fbgemm's CPU kernel forgets it in the backward
pass.

Left out: the record of a call (lookup_call.py); autograd and the operators' arguments (fbgemm_lookup.py,
fbgemm_dense_lookup.py, jagged_lookup.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.lookup_call import MEAN, SEQUENCE, SUM, Lookup
from turbogr_plugin.kernels.table_bags import (
    Values,
    VariableBatch,
    arrange_bags,
    bag_lengths,
    check_bags,
    collect_bags,
)
from turbogr_plugin.kernels.table_rows import lookup_rows

_OUTPUT_DTYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}  # fbgemm's SparseType
_TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_lookup(call: Lookup) -> None:
    """Raises ValueError or NotImplementedError for what these kernels do not serve; reads no device memory."""
    if call.weights.values.dtype not in _TABLE_DTYPES:
        raise NotImplementedError(
            f"tables in {call.weights.values.dtype} are not supported by our lookup, only fp32, fp16 and bf16"
        )
    if call.pooling not in (SUM, MEAN, SEQUENCE):
        raise ValueError(f"pooling_mode must be 0 (SUM), 1 (MEAN) or 2 (NONE), got {call.pooling}")
    if call.pooling == SEQUENCE:
        if not call.tables.uniform:
            raise ValueError(
                f"without pooling all tables must have one width, got {call.tables.features} features with "
                f"{call.tables.total_d} columns and at most {call.tables.max_d}"
            )
        if call.variable is not None:
            raise NotImplementedError("variable batch sizes need pooling, pooling_mode is 2 (NONE)")
        if call.indice_weights is not None:
            raise ValueError("indice_weights need pooling, pooling_mode is 2 (NONE)")
    for name, tensor in (("indices", call.indices), ("offsets", call.offsets)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if call.indices.dim() != 1:
        raise ValueError(f"indices has shape {tuple(call.indices.shape)}, needed is [number of values]")
    if call.indice_weights is not None and call.indice_weights.numel() != call.indices.numel():
        raise ValueError(
            f"indice_weights has {call.indice_weights.numel()} elements for {call.indices.numel()} indices"
        )
    check_bags(call.tables, call.offsets, call.variable)


def forward_lookup(call: Lookup, values: Values) -> tuple[Tensor, ...]:
    """Looks up and pools.

    Returns:
        Without pooling the rows of each block, [ids of the block, D]; else one tensor, [B, total_D] or the flat output
        of variable batch sizes.
    """
    found = lookup_rows(call.weights, call.tables, values.rows)
    if call.pooling == SEQUENCE:
        found = found.masked_fill(values.absent.unsqueeze(1), 0.0)
        if call.output_dtypes is None:
            return (found.to(call.output_dtype),)
        return tuple(found[block.begin : block.end].to(block.dtype, copy=True) for block in call.blocks)
    bags = call.bags
    found = found.to(call.accumulation)
    if call.indice_weights is not None:
        found = found * call.indice_weights.to(call.accumulation).unsqueeze(1)
    # one bag more than there are takes what is absent: a factor of zero would not stop an infinite weight
    bag = values.bag.masked_fill(values.absent, bags)
    pooled = found.new_zeros(bags + 1, call.tables.max_d).index_add_(0, bag, found)[:bags]
    if call.pooling == MEAN:
        pooled = pooled / bag_lengths(call.offsets).unsqueeze(1)
    return (arrange_bags(pooled, call.tables, call.output_dtype, call.variable),)


def gradient_by_bag(call: Lookup, grads: tuple[Tensor, ...]) -> Tensor:
    """[bags, max_D] (without pooling [N, D]) in the dtype of sums: the gradient of each bag's sum.

    Where there are no bags it has one row of zeros, for ids that no bag claims.
    """
    if call.pooling == SEQUENCE:
        wide = [gradient.to(call.accumulation) for gradient in grads]
        return wide[0] if len(wide) == 1 else torch.cat(wide)
    if call.bags == 0:
        return grads[0].new_zeros(1, call.tables.max_d, dtype=call.accumulation)
    gradient = collect_bags(grads[0], call.tables, call.bags, call.variable).to(call.accumulation)
    return gradient / bag_lengths(call.offsets).unsqueeze(1) if call.pooling == MEAN else gradient


def gradient_by_value(call: Lookup, values: Values, by_bag: Tensor, order: Tensor | None = None) -> Tensor:
    """[N, max_D] in the dtype of sums: gradient of each looked-up row, in the given order of positions."""
    if call.pooling == SEQUENCE:
        return by_bag if order is None else by_bag.index_select(0, order)
    gradient = by_bag.index_select(0, values.bag if order is None else values.bag.index_select(0, order))
    if call.indice_weights is None:
        return gradient
    factor = call.indice_weights if order is None else call.indice_weights.index_select(0, order)
    return gradient * factor.to(call.accumulation).unsqueeze(1)


def gradient_of_indice_weights(call: Lookup, values: Values, by_bag: Tensor) -> Tensor:
    """[N], dtype of `indice_weights`: their gradient; zero where the feature does not want it."""
    assert call.indice_weights is not None
    found = lookup_rows(call.weights, call.tables, values.rows).to(call.accumulation)
    product = found * by_bag.index_select(0, values.bag)
    columns = call.tables.columns(values.rows.feature)
    gradient = (product if columns is None else product.masked_fill(~columns, 0.0)).sum(1)
    unwanted = values.absent
    if call.feature_requires_grad is not None:
        unwanted = unwanted | (call.feature_requires_grad == 0).index_select(0, values.rows.feature)
    return gradient.masked_fill(unwanted, 0.0).to(call.indice_weights.dtype)


def variable_batch(
    bag_offsets: Tensor | None,
    rank_offsets: Tensor | None,
    output_offsets: Tensor | None,
    output_size: int,
    features: int,
    output: Tensor | None = None,
    own_offsets: Tensor | None = None,
) -> VariableBatch | None:
    """Variable batch sizes from fbgemm's arguments; None if there are none.

    Args:
        bag_offsets: [T + 1] int32 (B_offsets).
        rank_offsets: [T, R + 1] int32 (vbe_B_offsets_rank_per_feature).
        output_offsets: [R * T + 1] int64, rank by rank (vbe_output_offsets_feature_rank).
        output_size: number of elements of the output (vbe_output_size).
        features: T.
        output: where the output goes, if the caller made it (vbe_output).
        own_offsets: [R, T], places in `output` (vbe_output_offsets).
    """
    if bag_offsets is None:
        return None
    if rank_offsets is None or output_offsets is None:
        raise ValueError("B_offsets came without vbe_B_offsets_rank_per_feature or vbe_output_offsets_feature_rank")
    if (output is None) != (own_offsets is None):
        raise ValueError("vbe_output and vbe_output_offsets must be given both or not at all")
    begin = output_offsets[:-1].view(-1, features) if own_offsets is None else own_offsets.view(-1, features)
    return VariableBatch(bag_offsets, rank_offsets, begin.to(torch.int64), output_size, output)


def output_dtype(number: int) -> torch.dtype:
    """The dtype behind fbgemm's SparseType."""
    if number not in _OUTPUT_DTYPES:
        raise NotImplementedError(
            f"output_dtype {number} is not supported by our lookup, only 0 (fp32), 1 (fp16) and 5 (bf16)"
        )
    return _OUTPUT_DTYPES[number]
