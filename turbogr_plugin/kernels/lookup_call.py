"""What the lookup of embedding tables and its parts hand to their implementations: one record per call, checked.

Four families, each with one module of its name in reference/, cpu/ and triton/ as far as they are written:

    jagged_lookup   refuses(call: Lookup) -> str | None
                    refuses_update(call, update: FusedUpdate) -> str | None      asked besides, before a fused forward
                    forward(call) -> (output of each block, kept)                kept: tensors for the backward pass
                    fused_backward(call, kept, grads, update, indice_weights_gradient: bool) -> Tensor | None
                    dense_backward(call, kept, grads, indice_weights_gradient: bool) -> (Tensor, Tensor | None)
    jagged_unique   refuses(call: UniqueCall), unique(call) -> (ids, offsets or None, inverse)
    coalesce_rows   refuses(call: CoalesceCall), coalesce(call) -> (ids, rows)
    fused_update    refuses(call: UpdateCall), update(call) -> None

`kept` is what `forward` returned, or empty: then it is found again. The gradient of `indice_weights` is [N] in its
dtype, computed from the tables before they are updated, zeros for absent ids and for features that do not want it.
The dense gradient is [E] in the dtype of the tables. `refuses` builds nothing and reads no value of a tensor.

A fused backward changes every row that a present id names exactly once, with the sum of its gradients over all
features that share its table: float32, ascending positions, starting from the first (float64 where the tables are).

Left out: checks of what callers give (lookup_layout.py, table_pooling.py); autograd (lookup_autograd.py).

Letters: N ids, F features, B rows of the batch, D width, U unique ids, E elements of the flat buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.kernels.fused_optimizers import Settings
from turbogr_plugin.kernels.table_bags import VariableBatch
from turbogr_plugin.kernels.table_rows import FlatTables, Tables

SUM, MEAN, SEQUENCE = 0, 1, 2  # fbgemm's PoolingMode


class Block(NamedTuple):
    """Consecutive features of a sequence lookup whose rows are returned in one tensor."""

    begin: int
    """First position."""
    end: int
    """Behind the last one."""
    dtype: torch.dtype
    """Of the rows returned."""


class Lookup(NamedTuple):
    """What a lookup reads, whether its optimizer is fused or not.

    Ids are grouped by feature, the bags of a feature by row of the batch: bag f * B + b. Features that share a table
    have equal `tables.first_row` and `weights.begin`. An id that its table does not have, or that no bag claims, is
    absent: it gives zeros and gets no gradient.
    """

    weights: FlatTables
    tables: Tables
    indices: Tensor
    """[N] int32 or int64."""
    offsets: Tensor
    """[F * B + 1] int32 or int64, non-decreasing. Of a sequence lookup only offsets[0], offsets[B], ... matter."""
    pooling: int
    """SUM, MEAN or SEQUENCE."""
    indice_weights: Tensor | None
    """[N] float32 (float64 with float64 tables), pooled lookups only."""
    feature_requires_grad: Tensor | None
    """[F]: for which features the gradient of `indice_weights` is wanted; None: for all."""
    output_dtype: torch.dtype
    variable: VariableBatch | None
    """Batch sizes by feature and rank, pooled lookups only."""
    output_dtypes: tuple[torch.dtype, ...] | None = None
    """By feature, sequence lookups only; None: `output_dtype` for all."""
    feature_lengths: tuple[int, ...] | None = None
    """Ids of each feature, known on the host; given if and only if `output_dtypes` is."""

    @property
    def accumulation(self) -> torch.dtype:
        """The dtype in which is summed and updated."""
        return torch.float64 if self.weights.values.dtype == torch.float64 else torch.float32

    @property
    def bags(self) -> int:
        """Number of bags of all features."""
        return self.offsets.numel() - 1

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The tensors that a sequence lookup returns; of a pooled one, whose rows are its bags, the only one."""
        if self.output_dtypes is None or self.feature_lengths is None:
            return (Block(0, self.indices.numel(), self.output_dtype),)
        found: list[Block] = []
        begin = 0
        for dtype, length in zip(self.output_dtypes, self.feature_lengths, strict=True):
            if found and found[-1].dtype == dtype:
                found[-1] = found[-1]._replace(end=begin + length)
            else:
                found.append(Block(begin, begin + length, dtype))
            begin += length
        return tuple(found)


@dataclass(frozen=True)
class StochasticRounding:
    """How an update rounds to tables in fp16 and bf16: up with the probability of the part that is rounded off.

    The draw for a row and a column is word `column % 4` of keyed_random.keyed_words(Purpose.ROUNDING, seed=seed,
    step=step, samples=row, lanes=0, blocks=column // 4), where `row` is the number of the row over all tables that are
    read (`Tables.first_row` plus the id; for `fused_update` the id itself): the same for every implementation and any
    number of threads, and for all replicas of a table. Its lower 13 (fp16) or 16 (bf16) bits are added to the bits of
    the float32, which are then cut off; see fused_optimizers.round_stochastically.
    """

    seed: int
    """In [0, 2^32)."""
    step: int
    """In [0, 2^32): another one for each update of a table."""


@dataclass(frozen=True, kw_only=True)
class FusedUpdate:
    """What the backward pass does to the tables."""

    optimizer: str
    """A name of fused_optimizers.OPTIMIZERS."""
    states: tuple[FlatTables, ...]
    """Those that the optimizer has in OPTIMIZERS; then, for Adam with `rowwise_bias_correction`, a counter by row."""
    settings: Settings
    max_gradient: float | None = None
    """Gradients of the output are clamped to this magnitude."""
    stochastic_rounding: StochasticRounding | None = None
    """Of tables in fp16 and bf16; None: they are rounded to nearest."""


class UniqueCall(NamedTuple):
    """What `jagged_unique` is asked."""

    ids: Tensor
    """[N] int32 or int64, any values."""
    table_offsets: Tensor | None
    """[F + 1] int32 or int64, from 0 to N: the ids of each table; None: there is one."""


class CoalesceCall(NamedTuple):
    """What `coalesce_rows` is asked."""

    ids: Tensor
    """[N] int32 or int64, any values."""
    grads: Tensor
    """[N, D] floating point, any strides."""


class UpdateCall(NamedTuple):
    """What `fused_update` is asked to change."""

    weights: Tensor
    """[R, D] fp32, fp16, bf16 or float64, rows contiguous; changed in place."""
    states: tuple[Tensor, ...]
    """Each [R, D] or [R], as OPTIMIZERS says; then Adam's counter by row. Changed in place."""
    ids: Tensor
    """[U] int32 or int64, all different; those outside of [0, R) are left out."""
    rows: Tensor
    """[U, D] floating point: the sum of the gradients of each row."""
    optimizer: str
    """A name of fused_optimizers.OPTIMIZERS."""
    settings: Settings
    stochastic_rounding: StochasticRounding | None
