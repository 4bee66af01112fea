"""Device functions on one row of a table: its gradient, its update, its rounding to fp16 and bf16.

A row is loaded and stored by itself, at a scalar address: an Ascend core copies it in one piece of its exact length.
A gathered tile of rows would be read whole, and masked only afterwards, past the end of the last row.

Arithmetic is in float32, in the order of kernels/fused_optimizers.py. Letters: N ids, D width.
"""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from turbogr_plugin.kernels.triton.random_kernels import philox4x32


@triton.jit
def load_row(Buffer, place, column, there):
    """float32 [WIDTH]: the columns of a row that are there, zeros elsewhere."""
    return tl.load(Buffer + place + column, mask=there, other=0.0).to(tl.float32)


@triton.jit
def row_width(GradOffsets, feature, UNIT: tl.constexpr):
    """Columns of a feature's rows, which UNIT divides: with it a CUDA thread loads several elements at once."""
    width = (tl.load(GradOffsets + feature + 1) - tl.load(GradOffsets + feature)).to(tl.int32)
    return tl.multiple_of(width, UNIT)


@triton.jit
def gradient_place(position, Feature, Bag, GradOffsets, batch, grad_row, POOLED: tl.constexpr, UNIT: tl.constexpr):
    """Element of the output's gradient where that of the id at a position begins: of its row, or of its bag."""
    if POOLED:
        feature = tl.load(Feature + position).to(tl.int32)
        sample = tl.load(Bag + position).to(tl.int64) - feature.to(tl.int64) * batch
        place = sample * grad_row + tl.load(GradOffsets + feature).to(tl.int64)
    else:
        place = position.to(tl.int64) * grad_row
    return tl.multiple_of(place, UNIT)


@triton.jit
def bag_length(position, Bag, Offsets):
    """float32: ids of the bag of a position, at least 1."""
    bag = tl.load(Bag + position)
    length = (tl.load(Offsets + bag + 1) - tl.load(Offsets + bag)).to(tl.int32)
    return tl.maximum(length, 1).to(tl.float32)


@triton.jit
def output_gradient(Grad, position, place, column, there, Bag, Offsets, MEAN: tl.constexpr):
    """float32 [WIDTH]: the gradient of a row of the output, or of the sum of a bag."""
    grad = load_row(Grad, place, column, there)
    if MEAN:
        grad = grad / bag_length(position, Bag, Offsets)
    return grad


@triton.jit
def summed_gradient(
    Grad,
    SecondGrad,
    Order,
    begin,
    end,
    column,
    inside,
    Feature,
    Bag,
    GradOffsets,
    Offsets,
    IdWeights,
    batch,
    grad_row,
    second_begin,
    second_row,
    POOLED: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """float32 [WIDTH]: the gradients of the ids at Order[begin:end], added one after the other.

    ROWS of them are on their way at a time. If SPLIT, those of positions from `second_begin` on are in SecondGrad, a
    tensor of another dtype.
    """
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(begin, end, ROWS):
        for ahead in tl.static_range(ROWS):
            position = tl.load(Order + tl.minimum(first + ahead, end - 1))
            there = inside & (first + ahead < end)
            if SPLIT:
                # Of the two copies one has no element; a branch would be dearer.
                second = position >= second_begin
                place = tl.where(second, 0, position) * grad_row
                grad = load_row(Grad, tl.multiple_of(place, UNIT), column, there & (position < second_begin))
                place = tl.where(second, position - second_begin, 0) * second_row
                grad += load_row(SecondGrad, tl.multiple_of(place, UNIT), column, there & second)
            else:
                place = gradient_place(position, Feature, Bag, GradOffsets, batch, grad_row, POOLED, UNIT)
                grad = output_gradient(Grad, position, place, column, there, Bag, Offsets, MEAN)
            if WEIGHTED:
                # The mask again, because zero times an infinite weight is NaN.
                grad = tl.where(there, grad * tl.load(IdWeights + position).to(tl.float32), 0.0)
            total += grad
    return total


@triton.jit
def rounded_stochastically(row, number, seed, step, DROPPED: tl.constexpr, WIDTH: tl.constexpr):
    """A row whose last DROPPED bits are rounded up with the probability of their value; see StochasticRounding."""
    zeros = tl.zeros((WIDTH // 4,), dtype=tl.int32)
    block = tl.arange(0, WIDTH // 4).to(tl.uint32, bitcast=True)
    lane = zeros.to(tl.uint32, bitcast=True)
    low = (zeros + number.to(tl.int32)).to(tl.uint32, bitcast=True)
    # 4 is Purpose.ROUNDING of kernels/keyed_random.py.
    high = (zeros + ((number >> 32).to(tl.int32) + (4 << 24))).to(tl.uint32, bitcast=True)
    key0, key1 = seed.to(tl.uint32, bitcast=True), step.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = philox4x32(block, lane, low, high, key0, key1)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    noise = words.to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
    bits = row.to(tl.int32, bitcast=True)
    rounded = (bits + noise) & -(1 << DROPPED)
    # A draw would carry some NaN (0x7FFFFFFF) over to -0.
    return tl.where((bits & 0x7F800000) == 0x7F800000, bits, rounded).to(tl.float32, bitcast=True)


@triton.jit
def update_row(
    Weights,
    State0,
    State1,
    place,
    state0_place,
    state1_place,
    grad,
    column,
    inside,
    width,
    number,
    Rate,
    rate,
    eps,
    beta1,
    beta2,
    correction1,
    correction2,
    weight_decay,
    seed,
    step,
    OPTIMIZER: tl.constexpr,
    DECAY: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Applies an optimizer to one row and its states in place.

    Args:
        Weights: the buffer of the rows.
        State0: adagrad's sums by weight, Adam's first moment, or row-wise Adagrad's sums by row.
        State1: Adam's second moment.
        place: element of Weights where the row begins.
        state0_place: element of State0 where the row's begin.
        state1_place: element of State1 where the row's begin.
        grad: float32 [WIDTH], zeros where not `inside`.
        column: [WIDTH].
        inside: [WIDTH], the columns that the row has.
        width: number of these.
        number: int64, what the draws of the rounding belong to.
        Rate: float32 [1], the learning rate, if it is on the device.
        rate: the learning rate, if it is not.
        eps: as the optimizers know it.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        correction1: 1 - beta1^iteration.
        correction2: 1 - beta2^iteration.
        weight_decay: as the optimizers know it.
        seed: of the rounding.
        step: of the rounding.
        OPTIMIZER: its name in fused_optimizers.OPTIMIZERS.
        DECAY: 0 without weight decay, 1 (L2), 2 (decoupled); of row-wise Adagrad.
        RATE_ON_DEVICE: whether `Rate` counts.
        DROPPED: bits of float32's mantissa to round off stochastically; 0: what is stored is rounded to nearest.
        WIDTH: a power of two, no less than the row is wide.
    """
    if RATE_ON_DEVICE:
        rate = tl.load(Rate).to(tl.float32)
    weight = load_row(Weights, place, column, inside)
    if OPTIMIZER == "sgd":
        new = weight - rate * grad
    elif OPTIMIZER == "adagrad":
        total = load_row(State0, state0_place, column, inside) + grad * grad
        tl.store(State0 + state0_place + column, total.to(State0.dtype.element_ty), mask=inside)
        new = weight - rate * grad / (tl.sqrt(total) + eps)
    elif OPTIMIZER == "rowwise_adagrad":
        decayed = grad
        if DECAY == 1:
            decayed = grad + weight_decay * weight
        # One element as a row of one, so that it is copied as rows are: what a core writes by its scalar unit lies in
        # a cache line that it shares with the rows of other cores.
        one = tl.arange(0, 1)
        total = tl.load(State0 + state0_place + one).to(tl.float32) + tl.sum(decayed * decayed, 0) / width
        tl.store(State0 + state0_place + one, total.to(State0.dtype.element_ty))
        factor = rate / (tl.sqrt(total) + eps)
        if DECAY == 1:
            new = (1.0 - factor * weight_decay) * weight - factor * grad
        elif DECAY == 2:
            new = (1.0 - rate * weight_decay) * weight - factor * grad
        else:
            new = weight - factor * grad
    else:
        tl.static_assert(OPTIMIZER == "adam")
        first = beta1 * load_row(State0, state0_place, column, inside) + (1.0 - beta1) * grad
        second = beta2 * load_row(State1, state1_place, column, inside) + (1.0 - beta2) * (grad * grad)
        tl.store(State0 + state0_place + column, first.to(State0.dtype.element_ty), mask=inside)
        tl.store(State1 + state1_place + column, second.to(State1.dtype.element_ty), mask=inside)
        moved = first / correction1 / (tl.sqrt(second / correction2) + eps) + weight_decay * weight
        new = weight - rate * moved
    if DROPPED > 0:
        new = rounded_stochastically(new, number, seed, step, DROPPED, WIDTH)
    tl.store(Weights + place + column, new.to(Weights.dtype.element_ty), mask=inside)
