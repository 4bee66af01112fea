"""Lookups of a small group of tables with everything that ids can have wrong, and optimizers with their states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, Settings
from turbogr_plugin.kernels.lookup_call import SEQUENCE, FusedUpdate, Lookup, StochasticRounding
from turbogr_plugin.kernels.table_rows import FlatTables, Tables

SETTINGS = Settings(learning_rate=0.5, iteration=3, eps=1e-3, beta1=0.875, beta2=0.96875, weight_decay=0.0625)
ROWS = (7, 0, 3, 11)
"""Of each table; the second one has none."""
FEATURES = (0, 1, 2, 0, 3)
"""Which table each feature reads: the first one is shared."""
BATCH = 6
# Ids of each bag: the third feature has none in the whole batch.
LENGTHS = ((2, 0, 1, 5, 0, 3), (1, 0, 0, 2, 0, 0), (0,) * 6, (0, 4, 1, 1, 9, 0), (3, 3, 0, 0, 1, 2))


def dyadic(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Multiples of 1/8 in [-1, 1], float32: their sums and products are exact."""
    return torch.randint(-8, 9, tuple(shape), generator=generator) / 8


def lookup_call(
    pooling: int,
    *,
    dtype: torch.dtype = torch.float32,
    output_dtype: torch.dtype = torch.float32,
    output_dtypes: tuple[torch.dtype, ...] | None = None,
    widths: Sequence[int] = (20, 20, 20, 20),
    unit: int = 4,
    weighted: bool = False,
    ids: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> Lookup:
    """A lookup whose ids are one too small or one too large for their table now and then.

    Args:
        pooling: SUM, MEAN or SEQUENCE.
        dtype: of the tables.
        output_dtype: of the output.
        output_dtypes: the same by feature.
        widths: of each table.
        unit: what divides the widths.
        weighted: whether ids have weights.
        ids: instead of random ones.
        index_dtype: of ids and offsets.
        seed: of all numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    elements = torch.tensor([rows * width for rows, width in zip(ROWS, widths, strict=True)])
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), elements.cumsum(0)])
    first_row = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(ROWS).cumsum(0)])
    features = torch.tensor(FEATURES)
    of_features = torch.tensor(widths)[features]
    columns = torch.cat([torch.zeros(1, dtype=torch.int64), of_features.cumsum(0)]).to(torch.int32)
    lengths = torch.tensor(LENGTHS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    if ids is None:
        counts = lengths.sum(1).tolist()
        random = [
            torch.randint(-1, ROWS[table] + 1, (count,), generator=generator)
            for table, count in zip(FEATURES, counts, strict=True)
        ]
        ids = torch.cat(random)
    return Lookup(
        weights=FlatTables(dyadic((int(begin[-1]),), generator).to(dtype), begin[features]),
        tables=Tables(
            columns,
            torch.cat([first_row[features], first_row[-1:]]),
            int(columns[-1]),
            int(of_features.max()),
            unit,
        ),
        indices=ids.to(index_dtype),
        offsets=offsets.to(index_dtype),
        pooling=pooling,
        indice_weights=dyadic(ids.shape, generator) if weighted else None,
        feature_requires_grad=torch.tensor([1, 1, 1, 0, 1]) if weighted else None,
        output_dtype=output_dtype,
        variable=None,
        output_dtypes=output_dtypes,
        feature_lengths=tuple(lengths.sum(1).tolist()) if output_dtypes is not None else None,
    )


def gradients(call: Lookup, generator: torch.Generator, *, exact: bool = True) -> tuple[Tensor, ...]:
    """Of the output, by block: dyadic, or normal."""
    if call.pooling == SEQUENCE:
        shapes = [(block.end - block.begin, call.tables.max_d) for block in call.blocks]
    else:
        shapes = [(call.bags // call.tables.features, call.tables.total_d)]
    draw = dyadic if exact else (lambda shape, generator: torch.randn(*shape, generator=generator))
    return tuple(draw(shape, generator).to(block.dtype) for shape, block in zip(shapes, call.blocks, strict=True))


def new_update(
    call: Lookup,
    optimizer: str,
    settings: Settings = SETTINGS,
    rounding: StochasticRounding | None = None,
    max_gradient: float | None = None,
) -> FusedUpdate:
    """An optimizer with states of zeros."""
    buffers = {
        "weight": (call.weights.values.numel(), call.weights.begin),
        "row": (int(call.tables.first_row[-1]), call.tables.first_row[:-1]),
    }
    states = [FlatTables(torch.zeros(buffers[kind][0]), buffers[kind][1]) for kind in OPTIMIZERS[optimizer].states]
    return FusedUpdate(
        optimizer=optimizer,
        states=tuple(states),
        settings=settings,
        max_gradient=max_gradient,
        stochastic_rounding=rounding,
    )


def copied(call: Lookup, update: FusedUpdate, dtype: torch.dtype | None = None) -> tuple[Lookup, FusedUpdate]:
    """A call and an update with tables, weights of ids and states of their own, in another dtype if one is given."""
    values = call.weights.values.clone()
    factors = call.indice_weights
    call = call._replace(weights=FlatTables(values if dtype is None else values.to(dtype), call.weights.begin))
    if dtype is not None and factors is not None:
        call = call._replace(indice_weights=factors.to(dtype))
    states = [FlatTables(state.values.to(dtype or torch.float32, copy=True), state.begin) for state in update.states]
    return call, FusedUpdate(
        optimizer=update.optimizer,
        states=tuple(states),
        settings=update.settings,
        max_gradient=update.max_gradient,
        stochastic_rounding=update.stochastic_rounding,
    )
