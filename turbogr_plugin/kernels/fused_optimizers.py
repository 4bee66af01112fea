"""The optimizers that fbgemm fuses into the backward pass of a table lookup, on a block of touched rows.

Each is a function of rows of weights, their summed gradients and the rows of its states; it knows neither tables nor
ids. Arithmetic is in float32 whatever the tables' dtype is (float64 for tables in float64).

Source: fbgemm_gpu 1.8.0, codegen/genscript/optimizers.py, the variants for accelerators: they honour weight decay and
max_norm, which the CPU kernel ignores in its fast path. Left out: global weight decay, counters and CowClip
(rowwise_adagrad_with_counter), rowwise_rmsprop_ar, and OptimType.NONE, whose gradients are sparse tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

L2, DECOUPLED, DECOUPLED_GLOBAL = 1, 2, 5  # fbgemm_gpu.tbe.config.optimizer_config.WeightDecayMode


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of the optimizers; each reads those it knows."""

    learning_rate: float | Tensor
    """A number, or a scalar on the device."""
    iteration: int = 0
    """1 in the first step (Adam and LAMB)."""
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: int = 0
    max_norm: float = 0.0
    """Row-wise Adagrad scales a longer row of weights to this norm; 0 switches it off."""
    eta: float = 0.001
    momentum: float = 0.9
    rowwise_bias_correction: bool = False
    """Adam counts the updates of each row instead of the steps."""


@dataclass(frozen=True)
class RowShape:
    """Which columns of a block of rows count."""

    columns: Tensor | None
    """[N, D] bool, or None if all do."""
    width: Tensor | int
    """Number of columns that count: [N, 1], or one number for all rows."""

    def sum(self, block: Tensor) -> Tensor:
        """[N, 1]: sum over the columns that count."""
        return (block if self.columns is None else block.masked_fill(~self.columns, 0.0)).sum(1, keepdim=True)

    def norm(self, block: Tensor) -> Tensor:
        """[N, 1]: Euclidean norm of each row."""
        return self.sum(block * block).sqrt()


Update = Callable[[Tensor, Tensor, list[Tensor], RowShape, Settings], tuple[Tensor, list[Tensor]]]
"""(weights [N, D], gradients [N, D], states, shape, settings) -> (new weights, new states); nothing is in place."""


@dataclass(frozen=True)
class Optimizer:
    """One of fbgemm's fused optimizers."""

    states: tuple[Literal["weight", "row"], ...]
    """One value per weight or one per row, for each state."""
    update: Update


def sgd(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """w - lr g."""
    return weight - given.learning_rate * gradient, []


def adagrad(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """s + g², then w - lr g / (√s + eps)."""
    total = states[0] + gradient * gradient
    return weight - given.learning_rate * gradient / (total.sqrt() + given.eps), [total]


def rowwise_adagrad(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """s + mean(g²) over the row, then c w - lr g / (√s + eps), c from the weight decay."""
    decayed = gradient + given.weight_decay * weight if given.weight_decay_mode == L2 else gradient
    total = states[0] + shape.sum(decayed * decayed) / shape.width
    rate = given.learning_rate / (total.sqrt() + given.eps)
    if given.weight_decay_mode == L2:
        new = (1.0 - rate * given.weight_decay) * weight - rate * gradient
    elif given.weight_decay_mode in (DECOUPLED, DECOUPLED_GLOBAL):
        new = (1.0 - given.learning_rate * given.weight_decay) * weight - rate * gradient
    else:
        new = weight - rate * gradient
    if given.max_norm > 0.0:
        norm = shape.norm(new)
        new = torch.where(norm > given.max_norm, new * (given.max_norm / norm), new)
    return new, [total]


def adam(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """Adam with decoupled weight decay; with `rowwise_bias_correction` the third state counts a row's updates."""
    first = _average(states[0], gradient, given.beta1)
    second = _average(states[1], gradient * gradient, given.beta2)
    counter: list[Tensor] = []
    correction1: float | Tensor = 1.0 - given.beta1**given.iteration
    correction2: float | Tensor = 1.0 - given.beta2**given.iteration
    if given.rowwise_bias_correction:
        counter = [states[2] + 1.0]
        # 1 - beta^n without the cancellation that costs three digits at beta = 0.999 in float32
        correction1 = -torch.expm1(counter[0] * math.log(given.beta1))
        correction2 = -torch.expm1(counter[0] * math.log(given.beta2))
    step = first / correction1 / ((second / correction2).sqrt() + given.eps) + given.weight_decay * weight
    return weight - given.learning_rate * step, [first, second, *counter]


def partial_rowwise_adam(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """Adam whose second moment is the mean over the row."""
    first = _average(states[0], gradient, given.beta1)
    second = _average(states[1], shape.sum(gradient * gradient) / shape.width, given.beta2)
    root = (second / (1.0 - given.beta2**given.iteration)).sqrt() + given.eps
    step = first / (1.0 - given.beta1**given.iteration) / root + given.weight_decay * weight
    return weight - given.learning_rate * step, [first, second]


def lamb(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """Adam's step scaled by the ratio of the norms of weights and step, by row."""
    first = _average(states[0], gradient, given.beta1)
    second = _average(states[1], gradient * gradient, given.beta2)
    root = (second / (1.0 - given.beta2**given.iteration)).sqrt() + given.eps
    step = first / (1.0 - given.beta1**given.iteration) / root + given.weight_decay * weight
    return weight - given.learning_rate * (shape.norm(weight) / shape.norm(step)) * step, [first, second]


def partial_rowwise_lamb(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """LAMB whose second moment is the mean over the row."""
    second = _average(states[1], shape.sum(gradient * gradient) / shape.width, given.beta2)
    first = _average(states[0], gradient, given.beta1)
    root = (second / (1.0 - given.beta2**given.iteration)).sqrt() + given.eps
    step = first / (1.0 - given.beta1**given.iteration) / root + given.weight_decay * weight
    return weight - given.learning_rate * (shape.norm(weight) / shape.norm(step)) * step, [first, second]


def lars_sgd(
    weight: Tensor, gradient: Tensor, states: list[Tensor], shape: RowShape, given: Settings
) -> tuple[Tensor, list[Tensor]]:
    """SGD with momentum whose rate follows the norms of weights and gradient, by row."""
    norm = shape.norm(weight)
    rate = given.learning_rate * given.eta * norm / (shape.norm(gradient) + given.weight_decay * norm)
    momentum = given.momentum * states[0] + rate * (gradient + given.weight_decay * weight)
    return weight - momentum, [momentum]


OPTIMIZERS = {
    "sgd": Optimizer((), sgd),
    "adagrad": Optimizer(("weight",), adagrad),
    "rowwise_adagrad": Optimizer(("row",), rowwise_adagrad),
    "adam": Optimizer(("weight", "weight"), adam),
    "partial_rowwise_adam": Optimizer(("weight", "row"), partial_rowwise_adam),
    "lamb": Optimizer(("weight", "weight"), lamb),
    "partial_rowwise_lamb": Optimizer(("weight", "row"), partial_rowwise_lamb),
    "lars_sgd": Optimizer(("weight",), lars_sgd),
}
"""By the name that fbgemm's operators carry."""


def round_stochastically(block: Tensor, dtype: torch.dtype, draw: Tensor) -> Tensor:
    """Rounds to fp16 or bf16, upwards with the probability of the rounded-off part.

    Args:
        block: float32.
        dtype: torch.float16 or torch.bfloat16.
        draw: int32 of the same shape, uniform in [0, 2^31).

    Returns:
        float32 whose lower mantissa bits are zero; what is not finite as it is. Below fp16's normal range (6e-5) the
        later conversion rounds to nearest.
    """
    dropped = {torch.float16: 13, torch.bfloat16: 16}[dtype]  # float32 has 23 bits of mantissa, these have 10 and 7
    bits = block.view(torch.int32)
    rounded = torch.bitwise_and(bits + torch.bitwise_and(draw, (1 << dropped) - 1), -(1 << dropped))
    # A draw would carry some NaN (0x7FFFFFFF) over to -0.
    return torch.where(block.isfinite(), rounded, bits).view(torch.float32)


def _average(state: Tensor, value: Tensor, beta: float) -> Tensor:
    return beta * state + (1.0 - beta) * value
