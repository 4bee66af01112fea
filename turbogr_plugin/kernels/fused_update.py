"""One step of an optimizer on some rows of a table, in place: each row exactly once, all others untouched.

With `coalesce_rows` this is the backward pass of a lookup in two parts, between which rows can be exchanged;
`jagged_lookup` does both in one pass. The formulas are those of fused_optimizers.py.

Left out: learning rates on the device, weight decay over the whole table.

Letters: R rows of the table, D width, U rows that are updated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.custom_operator import define_operator
from turbogr_plugin.kernels.fused_optimizers import DECOUPLED, L2, OPTIMIZERS, Settings
from turbogr_plugin.kernels.lookup_call import StochasticRounding, UpdateCall
from turbogr_plugin.kernels.segments import check_indices

TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_optimizer(optimizer: str, settings: Settings, states: int) -> None:
    """Raises ValueError for an optimizer that is not known, or whose settings or number of states do not fit."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(sorted(OPTIMIZERS))}, got {optimizer!r}")
    if optimizer == "rowwise_adagrad" and settings.weight_decay_mode not in (0, L2, DECOUPLED):
        raise ValueError(f"weight_decay_mode must be 0, 1 (L2) or 2 (decoupled), got {settings.weight_decay_mode}")
    if settings.rowwise_bias_correction and optimizer != "adam":
        raise ValueError(f"rowwise_bias_correction is for adam only, got it with {optimizer}")
    needed = len(OPTIMIZERS[optimizer].states) + settings.rowwise_bias_correction
    if states != needed:
        raise ValueError(f"{optimizer} has {needed} state(s), got {states}")
    if settings.iteration < 1 and ("adam" in optimizer or "lamb" in optimizer):
        raise ValueError(f"iteration must be at least 1 with {optimizer}, got {settings.iteration}")


def check_rounding(rounding: StochasticRounding | None) -> None:
    """Raises ValueError for a key that does not fit the bits of a random number's counter."""
    if rounding is None:
        return
    for name, value in (("seed", rounding.seed), ("step", rounding.step)):
        if not 0 <= value < 1 << 32:
            raise ValueError(f"the {name} of stochastic_rounding must be in [0, 2^32), got {value}")


def _check(call: UpdateCall) -> None:
    weights = call.weights
    if weights.dim() != 2 or weights.dtype not in TABLE_DTYPES or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous, [R, D], in one of {', '.join(map(str, TABLE_DTYPES))}; got {weights.dtype} "
            f"of shape {tuple(weights.shape)} and strides {weights.stride()}"
        )
    check_optimizer(call.optimizer, call.settings, len(call.states))
    check_rounding(call.stochastic_rounding)
    kinds = (*OPTIMIZERS[call.optimizer].states, "row")
    for number, (kind, state) in enumerate(zip(kinds, call.states, strict=False)):
        shape = weights.shape if kind == "weight" else weights.shape[:1]
        if state.shape != shape or not state.is_floating_point() or not state.is_contiguous():
            raise ValueError(
                f"state {number} of {call.optimizer} must be contiguous, floating point of shape {tuple(shape)}, got "
                f"{state.dtype} of shape {tuple(state.shape)} and strides {state.stride()}"
            )
    check_indices(call.ids, "ids")
    if call.rows.shape != (call.ids.shape[0], weights.shape[1]) or not call.rows.is_floating_point():
        raise ValueError(
            f"rows must be floating point of shape [U, D] with U = {call.ids.shape[0]} and D = {weights.shape[1]}, got "
            f"{call.rows.dtype} of shape {tuple(call.rows.shape)}"
        )
    for name, tensor in (("ids", call.ids), ("rows", call.rows), *(("state", state) for state in call.states)):
        if tensor.device != weights.device:
            raise ValueError(f"{name} must be on the device of weights ({weights.device}), got {tensor.device}")


def _check_different(ids: Tensor, rows: int) -> None:
    """Raises ValueError for an id that comes twice: it would be updated twice. On a device ids are not read."""
    if ids.device.type != "cpu" or bool((ids[1:] > ids[:-1]).all()):  # what coalesce_rows returns is ascending
        return
    ordered = ids.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    twice = twice[(twice >= 0) & (twice < rows)]  # others are left out
    if twice.numel():
        raise ValueError(f"ids must all be different, got {int(twice[0])} twice; coalesce_rows sums duplicates")


def _call(
    weights: Tensor,
    states: Sequence[Tensor],
    ids: Tensor,
    rows: Tensor,
    optimizer: str,
    learning_rate: float,
    iteration: int,
    numbers: Sequence[float],
    weight_decay_mode: int,
    rowwise_bias_correction: bool,
    rounding: Sequence[int] | None = None,
) -> UpdateCall:
    settings = Settings(
        learning_rate=learning_rate,
        iteration=iteration,
        weight_decay_mode=weight_decay_mode,
        rowwise_bias_correction=rowwise_bias_correction,
        **dict(zip(_NUMBERS, numbers, strict=True)),
    )
    key = None if rounding is None else StochasticRounding(*rounding)
    call = UpdateCall(weights, tuple(states), ids, rows, optimizer, settings, key)
    _check(call)
    return call


_NUMBERS = ("eps", "beta1", "beta2", "weight_decay", "max_norm", "eta", "momentum")


def _body(
    weights: Tensor,
    states: Sequence[Tensor],
    ids: Tensor,
    rows: Tensor,
    optimizer: str,
    learning_rate: float,
    iteration: int,
    numbers: Sequence[float],
    weight_decay_mode: int,
    rowwise_bias_correction: bool,
    rounding: Sequence[int] | None = None,
    nan_guard: str | None = None,
    *,
    implementation: str | None = None,
) -> None:
    call = _call(
        *(weights, states, ids, rows, optimizer, learning_rate, iteration, numbers, weight_decay_mode),
        *(rowwise_bias_correction, rounding),
    )
    _check_different(ids, weights.shape[0])
    module = dispatch.serve("fused_update", call, implementation)
    if nan_guard is not None and not bool(rows.isfinite().all()):
        place = tuple((~rows.isfinite()).nonzero()[0].tolist())
        raise ValueError(
            f"rows must be finite, got {float(rows[place])} for id {int(ids[place[0]])} of table {nan_guard!r}; "
            "nothing has been updated"
        )
    module.update(call)
    torch.autograd.graph.increment_version((weights, *states))


def _shapes(*arguments: object, implementation: str | None = None) -> None:
    _call(*arguments[:11])  # type: ignore[arg-type]


_operator = define_operator(
    "fused_update",
    "(Tensor(a!) weights, Tensor(b!)[] states, Tensor ids, Tensor rows, str optimizer, float learning_rate, "
    "int iteration, float[] numbers, int weight_decay_mode, bool rowwise_bias_correction, int[]? rounding=None, "
    "str? nan_guard=None, *, str? implementation=None) -> ()",
    _body,
    _shapes,
)


def fused_update(
    weights: Tensor,
    state: Tensor | Sequence[Tensor] | None,
    ids: Tensor,
    rows: Tensor,
    optimizer: str,
    *,
    learning_rate: float,
    iteration: int = 1,
    eps: float = 1e-8,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
    weight_decay_mode: int = 0,
    max_norm: float = 0.0,
    eta: float = 0.001,
    momentum: float = 0.9,
    rowwise_bias_correction: bool = False,
    stochastic_rounding: StochasticRounding | None = None,
    nan_guard: str | None = None,
    implementation: str | None = None,
) -> None:
    """Applies one step of an optimizer to the rows that `ids` names, in place.

    Args:
        weights: [R, D] float32, float16, bfloat16 or float64, contiguous.
        state: of the optimizer, contiguous: none for sgd; [R, D] for adagrad; [R] for rowwise_adagrad; two [R, D] for
            adam (and [R] with `rowwise_bias_correction`); see fused_optimizers.OPTIMIZERS for the others.
        ids: [U] int32 or int64, all different, as `coalesce_rows` returns them; those outside of [0, R) are left out.
        rows: [U, D] floating point, any strides: the sum of the gradients of each.
        optimizer: a name of fused_optimizers.OPTIMIZERS.
        learning_rate: of this step.
        iteration: number of this step, 1 in the first (Adam and LAMB).
        eps: added to the root of the second moment.
        beta1: of Adam and LAMB.
        beta2: of Adam and LAMB.
        weight_decay: of row-wise Adagrad (by `weight_decay_mode`), Adam, LAMB and LARS.
        weight_decay_mode: of row-wise Adagrad: 0 none, 1 L2, 2 decoupled.
        max_norm: row-wise Adagrad scales longer rows of weights to this norm; 0: it does not.
        eta: of LARS.
        momentum: of LARS.
        rowwise_bias_correction: Adam counts the updates of each row instead of the steps.
        stochastic_rounding: key of the draws that round to float16 and bfloat16; None: to nearest.
        nan_guard: the name of the table: `rows` that are not finite are refused before anything is changed, in a
            message with this name; reading them waits for a device. None: they are not looked at.
        implementation: reference, cpu or triton; None: the fastest that serves the call.

    Raises:
        ValueError: an argument that does not fit, ids that are not different (looked at on CPU), or an
            `implementation` that does not serve the call.
    """
    states = [] if state is None else [state] if isinstance(state, Tensor) else list(state)
    _operator(
        weights.detach(),
        [each.detach() for each in states],
        ids,
        rows.detach(),
        optimizer,
        learning_rate,
        iteration,
        [eps, beta1, beta2, weight_decay, max_norm, eta, momentum],
        weight_decay_mode,
        rowwise_bias_correction,
        None if stochastic_rounding is None else [stochastic_rounding.seed, stochastic_rounding.step],
        nan_guard,
        implementation=implementation,
    )
