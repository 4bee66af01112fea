"""fbgemm's table lookup with dense gradients (data-parallel tables), for `npu`.

fbgemm has this operator for CPU and CUDA only. Two faults of its CPU kernel are not copied: it pools although
PoolingMode.NONE was asked for, and it ignores output_dtype and variable batch sizes.

fbgemm checks no ids here, in any mode: CUDA reads outside of the tables. Ids that no table has give zeros here and get
no gradient, and are logged as those of the fused tables are in mode WARNING (fbgemm_bounds_check.py).

What runs is the family jagged_lookup. The gradient has the size of the tables. It is summed in float32, in the order of
the batch (a chip that adds with atomics keeps it under torch.use_deterministic_algorithms(True) only), and rounded once
to the tables' dtype.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.fbgemm_bounds_check import PRUNED, report_later
from turbogr_plugin.kernels.lookup_call import Lookup
from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.table_bags import resolve_values
from turbogr_plugin.kernels.table_pooling import check_lookup, variable_batch
from turbogr_plugin.kernels.table_pooling import output_dtype as dtype_of
from turbogr_plugin.kernels.table_rows import FlatTables, Tables

_LEFT_OUT = "give zeros and get no gradient; data-parallel tables have no bounds_check_mode that names them"


class _DenseLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, indice_weights: Tensor | None, call: Lookup, module: ModuleType) -> Tensor:
        (output,), kept = module.forward(call)
        ctx.call, ctx.module = call, module
        # What the backward pass reads again is saved, too: autograd then notices if it was changed in between.
        ctx.save_for_backward(call.indices, call.offsets, call.indice_weights, *kept)
        result: Tensor = output
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, indice_weights, *kept = ctx.saved_tensors
        call: Lookup = ctx.call._replace(indices=indices, offsets=offsets, indice_weights=indice_weights)
        wanted = call.indice_weights is not None and ctx.needs_input_grad[1]
        weights_gradient, indice_gradient = ctx.module.dense_backward(call, tuple(kept), (gradient,), wanted)
        return weights_gradient if ctx.needs_input_grad[0] else None, indice_gradient, None, None


def _report_absent(call: Lookup) -> None:
    """Counts the ids that no table has."""
    values = resolve_values(call.tables, call.indices, call.offsets, call.variable)
    report_later((values.absent & (call.indices != PRUNED)).sum(), _LEFT_OUT)


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
    module = dispatch.serve("jagged_lookup", call, None)
    _report_absent(call)
    output: Tensor = _DenseLookup.apply(dev_weights, indice_weights, call, module)
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
