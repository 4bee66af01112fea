"""Tables one behind the other in one buffer, given as numbers on the host: checks, and the record of a lookup in them.

Left out: fbgemm's way of saying the same with tensors (fbgemm_lookup.py).

Letters: N ids, F features, T tables, B rows of the batch, E elements of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.kernels.fused_update import TABLE_DTYPES
from turbogr_plugin.kernels.lookup_call import MEAN, SEQUENCE, SUM, Lookup
from turbogr_plugin.kernels.segments import check_indices, check_offsets_shape, numbers_on
from turbogr_plugin.kernels.table_rows import FlatTables, Tables

POOLING = {"none": SEQUENCE, "sum": SUM, "mean": MEAN}
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in TABLE_DTYPES}


class LookupArguments(NamedTuple):
    """The arguments of torch.ops.turbogr.jagged_lookup, in its order."""

    weights: Tensor
    """[E], all tables, each row after row; contiguous."""
    ids: Tensor
    """[N] int32 or int64, grouped by feature, then by bag."""
    offsets: Tensor
    """[F + 1] without pooling, else [F * B + 1]; int32 or int64, from 0 to N."""
    id_weights: Tensor | None
    """[N] float32 (float64 with tables in float64), with pooling only."""
    rows: Sequence[int]
    """[T]."""
    dims: Sequence[int]
    """[T]: widths."""
    feature_tables: Sequence[int]
    """[F]: the table of each feature."""
    pooling: str
    """A name of POOLING."""
    output_dtypes: Sequence[str]
    """One for all features, or without pooling one for each: float32, float16, bfloat16 or float64."""
    feature_lengths: Sequence[int] | None = None
    """[F]: number of ids of each feature, there if and only if there is an output dtype for each."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The output dtypes."""
        return tuple(_DTYPE_NAMES[name] for name in self.output_dtypes)

    @property
    def feature_dims(self) -> list[int]:
        """[F]: width of each feature."""
        return [self.dims[table] for table in self.feature_tables]

    @property
    def batch(self) -> int:
        """B: rows of the batch of a pooled lookup."""
        return (self.offsets.shape[0] - 1) // len(self.feature_tables)


def check_arguments(given: LookupArguments) -> None:
    """Raises ValueError for shapes, dtypes, devices and numbers that do not fit. Reads no value of a tensor."""
    _check_tables(given)
    check_indices(given.ids, "ids")
    features = len(given.feature_tables)
    if given.pooling not in POOLING:
        raise ValueError(f"pooling must be one of {', '.join(POOLING)}, got {given.pooling!r}")
    if given.pooling == "none":
        check_offsets_shape(given.offsets, "table_offsets", segments=features)
        if len(set(given.feature_dims)) > 1:
            raise ValueError(f'with pooling="none" all features must have one width, got {given.feature_dims}')
        if given.id_weights is not None:
            raise ValueError('id_weights need pooling "sum" or "mean", got pooling "none"')
    else:
        check_offsets_shape(given.offsets, "bag_offsets")
        if (given.offsets.shape[0] - 1) % features:
            raise ValueError(
                f"bag_offsets must be [F * B + 1] with F = {features}, got {given.offsets.shape[0]} elements"
            )
    _check_outputs(given)
    if given.id_weights is not None:
        wanted = torch.float64 if given.weights.dtype == torch.float64 else torch.float32
        if given.id_weights.shape != given.ids.shape or given.id_weights.dtype != wanted:
            raise ValueError(
                f"id_weights must be {wanted} of shape [N] with N = {given.ids.shape[0]}, got {given.id_weights.dtype} "
                f"of shape {tuple(given.id_weights.shape)}"
            )
    for name, tensor in (("ids", given.ids), ("offsets", given.offsets), ("id_weights", given.id_weights)):
        if tensor is not None and tensor.device != given.weights.device:
            raise ValueError(f"{name} must be on the device of weights ({given.weights.device}), got {tensor.device}")


def _check_tables(given: LookupArguments) -> None:
    if not given.rows or len(given.rows) != len(given.dims):
        raise ValueError(f"rows and dims must have one number for each table, got {given.rows} and {given.dims}")
    if min(given.rows) < 0 or min(given.dims) < 1:
        raise ValueError(f"rows must be at least 0 and dims at least 1, got {given.rows} and {given.dims}")
    if not given.feature_tables or not all(0 <= table < len(given.rows) for table in given.feature_tables):
        raise ValueError(
            f"feature_tables must name a table in 0 to {len(given.rows) - 1} for each feature, got "
            f"{given.feature_tables}"
        )
    elements = sum(rows * dim for rows, dim in zip(given.rows, given.dims, strict=True))
    weights = given.weights
    if weights.dtype not in TABLE_DTYPES or weights.dim() != 1 or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous, [E], in one of {', '.join(map(str, TABLE_DTYPES))}; got {weights.dtype} of "
            f"shape {tuple(weights.shape)}"
        )
    if weights.shape[0] != elements:
        raise ValueError(
            f"weights must have {elements} elements for rows {given.rows} and dims {given.dims}, got {weights.shape[0]}"
        )


def _check_outputs(given: LookupArguments) -> None:
    features = len(given.feature_tables)
    if len(given.output_dtypes) not in (1, features) or not set(given.output_dtypes) <= set(_DTYPE_NAMES):
        raise ValueError(
            f"output_dtype must be one or {features} of {', '.join(_DTYPE_NAMES)}, got {list(given.output_dtypes)}"
        )
    each = given.feature_lengths is not None
    if each and given.pooling != "none":
        raise ValueError(f'feature_lengths need pooling "none", got pooling {given.pooling!r}')
    if len(given.output_dtypes) != (features if each else 1):
        raise ValueError("feature_lengths must be there if and only if there is an output_dtype for each feature")
    if given.feature_lengths is not None and (
        len(given.feature_lengths) != features or sum(given.feature_lengths) != given.ids.shape[0]
    ):
        raise ValueError(
            f"feature_lengths must be {features} numbers whose sum is the number of ids, {given.ids.shape[0]}; got "
            f"{list(given.feature_lengths)}"
        )


def lookup_of(given: LookupArguments) -> Lookup:
    """The record of a checked call."""
    placed = layout_of(given)
    each = given.feature_lengths is not None
    return Lookup(
        weights=FlatTables(given.weights.detach(), placed.begin),
        tables=placed.tables,
        indices=given.ids,
        offsets=given.offsets,
        pooling=POOLING[given.pooling],
        indice_weights=given.id_weights,
        feature_requires_grad=None,
        output_dtype=given.dtypes[0],
        variable=None,
        output_dtypes=given.dtypes if each else None,
        feature_lengths=None if given.feature_lengths is None else tuple(given.feature_lengths),
    )


class Layout(NamedTuple):
    """Where the tables of features lie."""

    tables: Tables
    begin: Tensor
    """[F] int64: in a buffer with a value for each weight."""
    row_begin: Tensor
    """[F] int64: in a buffer with a value for each row."""


def layout_of(given: LookupArguments) -> Layout:
    """Where the tables of the features of a checked call lie."""
    device = given.weights.device
    # What is kept must not go from one stream to another unseen.
    stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
    return _layout(device, stream, tuple(given.rows), tuple(given.dims), tuple(given.feature_tables))


@lru_cache(maxsize=256)
def _layout(
    device: torch.device, stream: int, rows: tuple[int, ...], dims: tuple[int, ...], features: tuple[int, ...]
) -> Layout:
    """Kept by device and stream, since models make the same call again.

    `Tables` tells the heights of tables by their first rows, as fbgemm does. So only rows of tables that are read are
    numbered, and a table without rows, which could not be told from the next one, is put behind all others.
    """
    elements = [0, *accumulate(height * width for height, width in zip(rows, dims, strict=True))]
    first_rows = [0, *accumulate(rows)]
    numbered = [0, *accumulate(height if table in features else 0 for table, height in enumerate(rows))]
    order = [table if rows[table] else len(rows) for table in features]
    widths = [dims[table] for table in features]

    def numbers(values: list[int]) -> Tensor:
        return numbers_on(device, values, torch.int64)

    with torch.inference_mode(False):
        tables = Tables(
            d_offsets=numbers([0, *accumulate(widths)]),
            first_row=numbers([*(numbered[table] for table in order), numbered[-1]]),
            total_d=sum(widths),
            max_d=max(widths),
            unit=math.gcd(*dims),
            aligned=all(elements[table] % max(widths) == 0 for table in (*order, len(rows))),
        )
        begin, row_begin = ([begins[table] for table in order] for begins in (elements, first_rows))
        return Layout(tables, numbers(begin), numbers(row_begin))


def output_shapes(given: LookupArguments) -> list[Tensor]:
    """Uninitialised outputs of a checked call."""
    if given.pooling != "none":
        return [given.weights.new_empty(given.batch, sum(given.feature_dims), dtype=given.dtypes[0])]
    width = given.feature_dims[0]
    if given.feature_lengths is None:
        return [given.weights.new_empty(given.ids.shape[0], width, dtype=given.dtypes[0])]
    found: list[tuple[torch.dtype, Any]] = []
    for dtype, length in zip(given.dtypes, given.feature_lengths, strict=True):
        if found and found[-1][0] == dtype:
            found[-1] = (dtype, found[-1][1] + length)
        else:
            found.append((dtype, length))
    return [given.weights.new_empty(length, width, dtype=dtype) for dtype, length in found]
