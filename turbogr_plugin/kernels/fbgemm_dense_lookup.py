"""fbgemm's table lookup with dense gradients (data-parallel tables), for `npu`.

fbgemm has this operator for CPU and CUDA only. Two faults of its CPU kernel are not copied: it pools although
PoolingMode.NONE was asked for, and it ignores output_dtype and variable batch sizes.

fbgemm checks no ids here, in any mode: CUDA reads outside of the tables. Ids that no table has give zeros here and get
no gradient, and are logged as those of the fused tables are in mode WARNING (fbgemm_bounds_check.py).

The gradient has the size of the tables. It is summed in float32, in the order of the batch (see `sum_by_row` in
coalesce_rows.py for chips that add with atomics), and rounded once to the tables' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turbogr_plugin.kernels.fbgemm_bounds_check import PRUNED, report_later
from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.table_bags import Values, resolve_values
from turbogr_plugin.kernels.table_pooling import (
    Lookup,
    check_lookup,
    forward_lookup,
    gradient_by_bag,
    gradient_by_value,
    indice_weights_gradient,
    variable_batch,
)
from turbogr_plugin.kernels.table_pooling import (
    output_dtype as dtype_of,
)
from turbogr_plugin.kernels.table_rows import FlatTables, Rows, Tables, add_rows

_LEFT_OUT = "give zeros and get no gradient; data-parallel tables have no bounds_check_mode that names them"


class _DenseLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, indice_weights: Tensor | None, call: Lookup) -> Tensor:
        values = resolve_values(call.tables, call.indices, call.offsets, call.variable)
        report_later((values.absent & (call.indices != PRUNED)).sum(), _LEFT_OUT)
        ctx.call = call
        ctx.save_for_backward(values.rows.feature, values.rows.index, values.bag, values.absent)
        return forward_lookup(call, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: Lookup = ctx.call
        feature, index, bag, absent = ctx.saved_tensors
        values = Values(Rows(feature, index), bag, absent)
        by_bag = gradient_by_bag(call, output_gradient)
        indice_gradient = None
        if call.indice_weights is not None and ctx.needs_input_grad[1]:
            indice_gradient = indice_weights_gradient(call, values, by_bag).to(call.indice_weights.dtype)
        weights_gradient = None
        if ctx.needs_input_grad[0]:
            by_value = gradient_by_value(call, values, by_bag).masked_fill(absent.unsqueeze(1), 0.0)
            weights_gradient = add_rows(call.weights, call.tables, values.rows, by_value).to(call.weights.values.dtype)
        return weights_gradient, indice_gradient, None


def dense_embedding_codegen_lookup_function(
    dev_weights: Tensor,
    weights_offsets: Tensor,
    D_offsets: Tensor,
    total_D: int,
    max_D: int,
    hash_size_cumsum: Tensor,
    total_hash_size_bits: int,
    indices: Tensor,
    offsets: Tensor,
    pooling_mode: int,
    indice_weights: Tensor | None,
    feature_requires_grad: Tensor | None,
    output_dtype: int = 0,
    B_offsets: Tensor | None = None,
    vbe_output_offsets_feature_rank: Tensor | None = None,
    vbe_B_offsets_rank_per_feature: Tensor | None = None,
    max_B: int = -1,
    max_B_feature_rank: int = -1,
    vbe_output_size: int = -1,
    mixed_D: bool = True,
) -> Tensor:
    """fbgemm::dense_embedding_codegen_lookup_function.

    Args:
        dev_weights: [E], all tables.
        weights_offsets: [T] int64, where each feature's table begins.
        D_offsets: [T + 1] int32.
        total_D: sum of the widths.
        max_D: largest width.
        hash_size_cumsum: [T + 1] int64.
        total_hash_size_bits: not used.
        indices: [N] int32 or int64.
        offsets: [bags + 1] int32 or int64.
        pooling_mode: 0 (SUM), 1 (MEAN) or 2 (NONE).
        indice_weights: [N] float32 or None.
        feature_requires_grad: [T] or None.
        output_dtype: 0 (fp32), 1 (fp16) or 5 (bf16).
        B_offsets: [T + 1] int32: variable batch sizes.
        vbe_output_offsets_feature_rank: [R * T + 1] int64.
        vbe_B_offsets_rank_per_feature: [T, R + 1] int32.
        max_B: not used.
        max_B_feature_rank: not used.
        vbe_output_size: elements of the output with variable batch sizes.
        mixed_D: not used.

    Raises:
        ValueError: shapes, dtypes or modes that do not fit together.
        NotImplementedError: dtypes other than fp32, fp16 and bf16; variable batch sizes without pooling.
    """
    tables = Tables(D_offsets, hash_size_cumsum, total_D, max_D)
    call = Lookup(
        weights=FlatTables(dev_weights.detach(), weights_offsets),
        tables=tables,
        indices=indices,
        offsets=offsets,
        pooling=pooling_mode,
        indice_weights=indice_weights,
        feature_requires_grad=feature_requires_grad,
        output_dtype=dtype_of(output_dtype),
        variable=variable_batch(
            B_offsets,
            vbe_B_offsets_rank_per_feature,
            vbe_output_offsets_feature_rank,
            vbe_output_size,
            tables.features,
        ),
    )
    check_lookup(call)
    output: Tensor = _DenseLookup.apply(dev_weights, indice_weights, call)
    return output


_SCHEMA = (
    "fbgemm::dense_embedding_codegen_lookup_function(Tensor dev_weights, Tensor weights_offsets, Tensor D_offsets, "
    "SymInt total_D, SymInt max_D, Tensor hash_size_cumsum, int total_hash_size_bits, Tensor indices, Tensor offsets, "
    "int pooling_mode, Tensor? indice_weights, Tensor? feature_requires_grad, int output_dtype=0, "
    "Tensor? B_offsets=None, Tensor? vbe_output_offsets_feature_rank=None, "
    "Tensor? vbe_B_offsets_rank_per_feature=None, SymInt max_B=-1, SymInt max_B_feature_rank=-1, "
    "SymInt vbe_output_size=-1, bool mixed_D=True) -> Tensor"
)

KERNELS = tuple(
    NpuKernel(schema=_SCHEMA, function=dense_embedding_codegen_lookup_function, key=key)
    for key in ("AutogradPrivateUse1", "PrivateUse1")
)
