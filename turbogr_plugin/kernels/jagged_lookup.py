"""Lookup of jagged ids in many tables at once: only ids that are there, pooled or as sequences.

Tables lie behind one another in one buffer. Ids come with explicit offsets, grouped by feature, so that no length is
looked at and no position is padding (TurboGR, section on jagged embedding lookup). Features may share a table, and in a
sequence lookup have outputs of different dtypes: positives in float32 and negatives in float16 from one table.

Without `update` the lookup is differentiable in the weights, whose gradient is as large as they are. With it the
backward pass updates every row that was looked up, once, with the sum of its gradients, in one pass over the ids.

Left out: weights in int8; caches; variable batch sizes (fbgemm's operators have them, see fbgemm_lookup.py).

Letters: N ids, F features, T tables, B rows of the batch, D width, E elements of the buffer, R rows of all tables.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from turbogr_plugin.kernels import dispatch, lookup_autograd
from turbogr_plugin.kernels.custom_operator import define_operator
from turbogr_plugin.kernels.fbgemm_bounds_check import describe, repair_input, report_later
from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, Settings
from turbogr_plugin.kernels.fused_update import check_optimizer, check_rounding
from turbogr_plugin.kernels.jagged_unique import check_offset_values
from turbogr_plugin.kernels.lookup_call import FusedUpdate, StochasticRounding
from turbogr_plugin.kernels.lookup_layout import LookupArguments, check_arguments, layout_of, lookup_of, output_shapes
from turbogr_plugin.kernels.segments import numbers_on
from turbogr_plugin.kernels.table_rows import FlatTables

BOUNDS_CHECKS = ("none", "ignore", "warning", "fatal")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TableUpdate:
    """What the backward pass of a lookup does to the tables."""

    optimizer: str
    """A name of fused_optimizers.OPTIMIZERS: sgd, adagrad, rowwise_adagrad, adam, ..."""
    states: Sequence[Tensor] = ()
    """Of the optimizer, as OPTIMIZERS names them: E values as the weights lie, or R values, one for each row of all
    tables; then, with `rowwise_bias_correction`, R counters. Contiguous, changed in place."""
    settings: Settings
    max_gradient: float | None = None
    """Gradients of the output are clamped to this magnitude."""
    stochastic_rounding: StochasticRounding | None = None
    """Key of the draws that round to float16 and bfloat16; None: to nearest."""
    nan_guard: Sequence[str] | None = None
    """Names of the tables: gradients of the output that are not finite are refused before anything is changed, in a
    message with the name. Reading them waits for a device. Not looked at are `id_weights` and what sums of finite
    gradients come to. None: nothing is looked at."""


def _arguments(given: tuple[Any, ...]) -> LookupArguments:
    arguments = LookupArguments(*given)
    check_arguments(arguments)
    return arguments


def _check_values(given: LookupArguments) -> None:
    """Raises ValueError for offsets that contradict themselves or the ids; on a device they are not read."""
    name = "table_offsets" if given.pooling == "none" else "bag_offsets"
    check_offset_values(name, given.offsets, given.ids.shape[0])
    lengths = given.feature_lengths
    if lengths is not None and given.offsets.device.type == "cpu" and given.offsets.diff().tolist() != list(lengths):
        raise ValueError(f"feature_lengths must be those of table_offsets, got {list(lengths)}")


def _forward(*given: Any, implementation: str | None = None) -> list[Tensor]:
    arguments = _arguments(given)
    _check_values(arguments)
    call = lookup_of(arguments)
    outputs, _ = dispatch.serve("jagged_lookup", call, implementation).forward(call)
    return list(outputs)


def _forward_shapes(*given: Any, implementation: str | None = None) -> list[Tensor]:
    return output_shapes(_arguments(given))


def _backward(
    grads: Sequence[Tensor], id_weights_gradient: bool, *given: Any, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    call = lookup_of(_arguments(given))
    module = dispatch.serve("jagged_lookup", call, implementation)
    weights, id_weights = module.dense_backward(call, (), tuple(grads), id_weights_gradient)
    return weights, call.weights.values.new_empty(0) if id_weights is None else id_weights


def _backward_shapes(
    grads: Sequence[Tensor], id_weights_gradient: bool, *given: Any, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    arguments = _arguments(given)
    weights, id_weights = arguments.weights, arguments.id_weights
    if not id_weights_gradient or id_weights is None:
        return weights.new_empty(weights.shape), weights.new_empty(0)
    return weights.new_empty(weights.shape), id_weights.new_empty(id_weights.shape)


def _setup(ctx: Any, given: tuple[Any, ...], implementation: str | None, output: Any) -> None:
    ctx.save_for_backward(*given[:4])
    ctx.numbers, ctx.implementation = given[4:], implementation


def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    id_weights = ctx.saved_tensors[3]
    wanted = id_weights is not None and ctx.needs_input_grad[4]  # the first of its inputs is the implementation
    found = _backward_operator(list(grads), wanted, *ctx.saved_tensors, *ctx.numbers, implementation=ctx.implementation)
    return (found[0], None, None, found[1] if wanted else None, *(None for _ in ctx.numbers))


_KEYWORDS = (
    "Tensor weights, Tensor ids, Tensor offsets, Tensor? id_weights, int[] rows, int[] dims, int[] feature_tables, "
    "str pooling, str[] output_dtypes, SymInt[]? feature_lengths=None, *, str? implementation=None"
)
_backward_operator = define_operator(
    "jagged_lookup_backward",
    f"(Tensor[] grads, bool id_weights_gradient, {_KEYWORDS}) -> (Tensor, Tensor)",
    _backward,
    _backward_shapes,
)
_operator = define_operator(
    "jagged_lookup",
    f"({_KEYWORDS}) -> Tensor[]",
    _forward,
    _forward_shapes,
    setup=_setup,
    gradients=_gradients,
)


def jagged_lookup(
    weights: Tensor,
    ids: Tensor,
    table_offsets: Tensor | None,
    *,
    rows: int | Sequence[int],
    dim: int | Sequence[int],
    feature_tables: Sequence[int] | None = None,
    pooling: Literal["none", "sum", "mean"] = "none",
    bag_offsets: Tensor | None = None,
    id_weights: Tensor | None = None,
    output_dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    feature_lengths: Sequence[int] | None = None,
    bounds_check: Literal["none", "ignore", "warning", "fatal"] = "none",
    update: TableUpdate | None = None,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Looks up rows of tables, and sums or averages those of each bag if asked.

    An id that its table does not have gives zeros (adds nothing to its bag) and gets no gradient, or is dealt with as
    `bounds_check` says. The mean divides by the number of all ids of the bag.

    Args:
        weights: [E] (or [R, D] of tables of one width) float32, float16, bfloat16 or float64, contiguous: all tables.
        ids: [N] int32 or int64, grouped by feature, and by row of the batch within it.
        table_offsets: [F + 1] int32 or int64: where the ids of each feature begin, from 0 to N. With pooling it may be
            None and is not read: `bag_offsets` says the same.
        rows: of each table, 0 or more; one number: there is one table.
        dim: width of each table, or one for all.
        feature_tables: the table of each feature; None: feature f reads table f.
        pooling: none: one row of output for each id; sum, mean: one for each bag.
        bag_offsets: [F * B + 1] int32 or int64, with pooling: where the ids of bag f * B + b begin, from 0 to N.
        id_weights: [N] float32 (float64 with tables in float64), with pooling: factor of each row. Differentiable.
        output_dtype: float32, float16 or bfloat16 (or float64), or without pooling one for each feature; None: float32
            (float64 with tables in float64).
        feature_lengths: [F], with an output dtype for each feature: number of ids of each; None: read from
            `table_offsets`, which waits for a device and breaks a compiled graph.
        bounds_check: of ids and offsets, as fbgemm's modes: none: of offsets, and on CPU only; ignore: an id that its
            table does not have becomes 0, except -1, and offsets are repaired; warning: the same, and it is logged;
            fatal: ValueError, for which a device is waited for.
        update: what the backward pass does to the tables. `weights` then gets no gradient, and a compiled graph breaks
            here. None: the lookup is differentiable in `weights`.
        implementation: reference, cpu or triton; None: the fastest that serves the call.

    Returns:
        Without pooling [N, D], with it [B, sum of the features' widths]. With an output dtype for each feature a tuple
        of [ids, D], one for each run of features of one dtype. Sums are taken in float32 or wider and rounded once.

    Raises:
        ValueError: an argument that does not fit, offsets (looked at on CPU) that are wrong, ids that are with
            bounds_check="fatal", or an `implementation` that does not serve the call.
    """
    heights = [rows] if isinstance(rows, int) else list(rows)
    dims = [dim] * len(heights) if isinstance(dim, int) else list(dim)
    features = list(range(len(heights))) if feature_tables is None else list(feature_tables)
    offsets = _offsets(table_offsets, bag_offsets, pooling, len(features))
    if bounds_check not in BOUNDS_CHECKS:
        raise ValueError(f"bounds_check must be one of {', '.join(BOUNDS_CHECKS)}, got {bounds_check!r}")
    each = output_dtype is not None and not isinstance(output_dtype, torch.dtype)
    if output_dtype is None:
        output_dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    dtypes = [output_dtype] if isinstance(output_dtype, torch.dtype) else list(output_dtype)
    if each and pooling != "none":
        raise ValueError(f'an output_dtype for each feature needs pooling "none", got pooling {pooling!r}')
    if weights.dim() == 2:
        if set(dims) != {weights.shape[1]} or weights.shape[0] != sum(heights):
            raise ValueError(
                f"weights of two dimensions must be [R, D], R = {sum(heights)} rows of tables that all have D columns; "
                f"got {tuple(weights.shape)} for tables of {dims} columns"
            )
        weights = weights.view(-1) if weights.is_contiguous() else weights
    given = LookupArguments(
        weights=weights,
        ids=ids,
        offsets=offsets,
        id_weights=id_weights,
        rows=heights,
        dims=dims,
        feature_tables=features,
        pooling=pooling,
        output_dtypes=[str(dtype).removeprefix("torch.") for dtype in dtypes],
        feature_lengths=feature_lengths,
    )
    if bounds_check != "none":
        given = _bounds_checked(given, bounds_check)
    if feature_lengths is None and each:
        given = given._replace(feature_lengths=given.offsets.diff().tolist())
    if update is None:
        outputs = _operator(*given, implementation=implementation)
    else:
        outputs = _with_update(given, update, implementation)
    return tuple(outputs) if each else outputs[0]


def _offsets(table_offsets: Tensor | None, bag_offsets: Tensor | None, pooling: str, features: int) -> Tensor:
    """The offsets that the operator takes."""
    if pooling == "none":
        if bag_offsets is not None:
            raise ValueError('bag_offsets need pooling "sum" or "mean", got pooling "none"')
        if table_offsets is None:
            raise ValueError('pooling "none" needs table_offsets, got None')
        return table_offsets
    if bag_offsets is None:
        raise ValueError(f"pooling {pooling!r} needs bag_offsets, got None")
    if table_offsets is not None and table_offsets.shape != (features + 1,):
        raise ValueError(
            f"table_offsets must be [F + 1] with F = {features} features, got shape {tuple(table_offsets.shape)}"
        )
    return bag_offsets


def _bounds_checked(given: LookupArguments, mode: str) -> LookupArguments:
    """The same call with ids and offsets repaired, or ValueError."""
    # The lengths of features are those of the repaired offsets, and not known yet.
    check_arguments(given._replace(output_dtypes=given.output_dtypes[:1], feature_lengths=None))
    heights = numbers_on(given.ids.device, [given.rows[table] for table in given.feature_tables], torch.int64)
    repair = repair_input(heights, given.ids, given.offsets, None)
    if mode == "fatal" and bool(repair.violations()):
        raise ValueError(
            "embedding lookup: " + describe(repair, heights, given.ids, given.offsets) + ' (bounds_check="fatal")'
        )
    if mode == "warning":
        _warn(repair.violations())
    return given._replace(ids=repair.indices, offsets=repair.offsets)


def _warn(violations: Tensor) -> None:
    consequence = 'have been repaired; bounds_check="fatal" names the first one'
    if violations.device.type != "cpu":
        report_later(violations, consequence)
    elif int(violations):
        _logger.warning("embedding lookup: %d ids or offsets were out of range and %s", int(violations), consequence)


@_disable_dynamo
def _with_update(given: LookupArguments, update: TableUpdate, implementation: str | None) -> tuple[Tensor, ...]:
    check_arguments(given)
    _check_values(given)
    call = lookup_of(given)
    names = None
    if update.nan_guard is not None:
        if isinstance(update.nan_guard, str) or len(update.nan_guard) != len(given.rows):
            raise ValueError(
                f"nan_guard must have a name for each of {len(given.rows)} tables, got {update.nan_guard!r}"
            )
        names = [update.nan_guard[table] for table in given.feature_tables]
    return lookup_autograd.fused_lookup(
        call, _fused_update(given, update), table_names=names, implementation=implementation
    )


def _fused_update(given: LookupArguments, update: TableUpdate) -> FusedUpdate:
    check_optimizer(update.optimizer, update.settings, len(update.states))
    check_rounding(update.stochastic_rounding)
    if update.max_gradient is not None and not update.max_gradient > 0:
        raise ValueError(f"max_gradient must be positive, got {update.max_gradient}")
    kinds = (*OPTIMIZERS[update.optimizer].states, "row")
    sizes = {"weight": given.weights.shape[0], "row": sum(given.rows)}
    placed = layout_of(given)
    begins = {"weight": placed.begin, "row": placed.row_begin}
    states = []
    for number, (kind, state) in enumerate(zip(kinds, update.states, strict=False)):
        if state.numel() != sizes[kind] or not state.is_floating_point() or not state.is_contiguous():
            raise ValueError(
                f"state {number} of {update.optimizer} must be contiguous, floating point, of {sizes[kind]} elements; "
                f"got {state.dtype} of shape {tuple(state.shape)} and strides {state.stride()}"
            )
        if state.device != given.weights.device:
            raise ValueError(
                f"state {number} must be on the device of weights ({given.weights.device}), got {state.device}"
            )
        states.append(FlatTables(state.detach().view(-1), begins[kind]))
    return FusedUpdate(
        optimizer=update.optimizer,
        states=tuple(states),
        settings=update.settings,
        max_gradient=update.max_gradient,
        stochastic_rounding=update.stochastic_rounding,
    )
