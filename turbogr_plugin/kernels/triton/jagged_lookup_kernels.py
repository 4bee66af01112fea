"""Lookup of many tables on the device: rows of ids, pooled bags, and the backward pass in one go.

Ids come by table, and the programs work on one table at a time: each takes an even share of its ids (of a pooled
lookup: of its bags, cut so that ids and bags together are even). There are no lengths to check and no padding; a
program knows its share from two numbers. An id that its table lacks copies no element.

The backward pass gets the positions sorted by row (row_segments.py). A program takes the rows that begin in its even
share of the positions, sums each row's gradients and updates the row at once: neither the sums nor the number of
different rows leave the core.
"""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from turbogr_plugin.kernels.triton.row_kernels import (
    gradient_place,
    load_row,
    output_gradient,
    row_width,
    summed_gradient,
    update_row,
)


@triton.jit(do_not_specialize=["begin", "end", "features", "first_feature", "last_feature", "batch"])
def sequence_kernel(
    Weights,
    Ids,
    Offsets,
    TableBegin,
    TableRows,
    Out,
    begin,
    end,
    features,
    first_feature,
    last_feature,
    batch,
    width,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Out [end - begin, width]: the rows of the ids at the positions from begin to end, one block of the output.

    Positions before the first bag and behind the last one count to the first and the last feature, and are absent.
    """
    column = tl.arange(0, WIDTH)
    inside = column < width
    claimed = tl.load(Offsets).to(tl.int32)
    unclaimed = tl.load(Offsets + features * batch).to(tl.int32)
    for feature in range(first_feature, last_feature):
        table = tl.load(TableBegin + feature)
        rows = tl.load(TableRows + feature)
        first = tl.load(Offsets + feature * batch).to(tl.int32)
        last = tl.load(Offsets + (feature + 1) * batch).to(tl.int32)
        first = tl.where(feature == first_feature, begin, tl.minimum(tl.maximum(first, begin), end))
        last = tl.where(feature == last_feature - 1, end, tl.minimum(tl.maximum(last, begin), end))
        share = (last - first + tl.num_programs(0) - 1) // tl.num_programs(0)
        own = first + tl.program_id(0) * share
        own_end = tl.minimum(own + share, last)
        for ahead in range(own, own_end, ROWS):
            for row in tl.static_range(ROWS):
                # The last rows of a share are copied again where ROWS does not divide it.
                position = tl.minimum(ahead + row, own_end - 1)
                index = tl.load(Ids + position).to(tl.int64)
                present = (index >= 0) & (index < rows) & (position >= claimed) & (position < unclaimed)
                place = tl.multiple_of(table + tl.where(present, index, 0) * width, UNIT)
                found = load_row(Weights, place, column, inside & present)
                where = Out + (position - begin).to(tl.int64) * width + column
                tl.store(where, found.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["features", "batch"])
def pooled_kernel(
    Weights,
    Ids,
    Offsets,
    IdWeights,
    TableBegin,
    TableRows,
    OutOffsets,
    Shares,
    Out,
    features,
    batch,
    out_row,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Out [batch, out_row]: the bags, added up in the order of their ids.

    Shares [features, programs + 1]: the bags of each feature at which the programs begin.
    """
    column = tl.arange(0, WIDTH)
    for feature in range(features):
        table = tl.load(TableBegin + feature)
        rows = tl.load(TableRows + feature)
        width = row_width(OutOffsets, feature, UNIT)
        inside = column < width
        share = Shares + feature * (tl.num_programs(0) + 1) + tl.program_id(0)
        for bag in range(tl.load(share).to(tl.int32), tl.load(share + 1).to(tl.int32)):
            first = tl.load(Offsets + bag).to(tl.int32)
            last = tl.load(Offsets + bag + 1).to(tl.int32)
            total = tl.zeros((WIDTH,), dtype=tl.float32)
            for ahead in range(first, last, ROWS):
                for row in tl.static_range(ROWS):
                    position = tl.minimum(ahead + row, last - 1)
                    index = tl.load(Ids + position).to(tl.int64)
                    present = (index >= 0) & (index < rows) & (ahead + row < last)
                    place = tl.multiple_of(table + tl.where(present, index, 0) * width, UNIT)
                    found = load_row(Weights, place, column, inside & present)
                    if WEIGHTED:
                        # The mask again, because zero times an infinite weight is NaN.
                        weight = tl.load(IdWeights + position).to(tl.float32)
                        found = tl.where(inside & present, found * weight, 0.0)
                    total += found
            if MEAN:
                total = total / tl.maximum(last - first, 1).to(tl.float32)
            sample = (bag - feature * batch).to(tl.int64)
            place = tl.multiple_of(sample * out_row + tl.load(OutOffsets + feature).to(tl.int64), UNIT)
            tl.store(Out + place + column, total.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "batch", "second_begin", "seed", "step"])
def update_kernel(
    Weights,
    State0,
    State1,
    Grad,
    SecondGrad,
    Ids,
    Order,
    Begins,
    Heads,
    Feature,
    Bag,
    Offsets,
    IdWeights,
    GradOffsets,
    TableBegin,
    State0Begin,
    State1Begin,
    FirstRow,
    Rate,
    count,
    batch,
    grad_row,
    second_begin,
    second_row,
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
    POOLED: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums the gradients of each row and updates it; see `RowSegments` for Order, Begins and Heads."""
    column = tl.arange(0, WIDTH)
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.load(Heads + tl.minimum(tl.program_id(0) * share, count))
    last = tl.load(Heads + tl.minimum((tl.program_id(0) + 1) * share, count))
    for segment in range(first, last):
        begin = tl.load(Begins + segment)
        end = tl.load(Begins + segment + 1)
        position = tl.load(Order + begin)
        feature = tl.load(Feature + position).to(tl.int32)
        index = tl.load(Ids + position).to(tl.int64)
        width = row_width(GradOffsets, feature, UNIT)
        inside = column < width
        grad = summed_gradient(
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
            POOLED,
            MEAN,
            WEIGHTED,
            SPLIT,
            UNIT,
            ROWS,
            WIDTH,
        )
        place = tl.multiple_of(tl.load(TableBegin + feature) + index * width, UNIT)
        state1_place = place
        if OPTIMIZER == "rowwise_adagrad":
            state0_place = tl.load(State0Begin + feature) + index
        else:
            state0_place = tl.multiple_of(tl.load(State0Begin + feature) + index * width, UNIT)
            state1_place = tl.multiple_of(tl.load(State1Begin + feature) + index * width, UNIT)
        update_row(
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
            tl.load(FirstRow + feature) + index,
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
            OPTIMIZER,
            DECAY,
            RATE_ON_DEVICE,
            DROPPED,
            WIDTH,
        )


@triton.jit(do_not_specialize=["count", "batch", "second_begin"])
def dense_gradient_kernel(
    Out,
    Grad,
    SecondGrad,
    Ids,
    Order,
    Begins,
    Heads,
    Feature,
    Bag,
    Offsets,
    IdWeights,
    GradOffsets,
    TableBegin,
    count,
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
    """Out, the gradient of the tables, zeros before: each row that has gradients gets their sum, rounded once."""
    column = tl.arange(0, WIDTH)
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.load(Heads + tl.minimum(tl.program_id(0) * share, count))
    last = tl.load(Heads + tl.minimum((tl.program_id(0) + 1) * share, count))
    for segment in range(first, last):
        begin = tl.load(Begins + segment)
        end = tl.load(Begins + segment + 1)
        position = tl.load(Order + begin)
        feature = tl.load(Feature + position).to(tl.int32)
        width = row_width(GradOffsets, feature, UNIT)
        inside = column < width
        grad = summed_gradient(
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
            POOLED,
            MEAN,
            WEIGHTED,
            SPLIT,
            UNIT,
            ROWS,
            WIDTH,
        )
        place = tl.load(TableBegin + feature) + tl.load(Ids + position).to(tl.int64) * width
        place = tl.multiple_of(place, UNIT)
        tl.store(Out + place + column, grad.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "batch"])
def id_weights_gradient_kernel(
    Out,
    Weights,
    Grad,
    Ids,
    Feature,
    Bag,
    Offsets,
    GradOffsets,
    TableBegin,
    Wanted,
    count,
    batch,
    grad_row,
    MEAN: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Out [count]: the product of each id's row with the gradient of its bag; zero where Wanted [count] is zero."""
    column = tl.arange(0, WIDTH)
    one = tl.arange(0, 1)
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    own = tl.program_id(0) * share
    for position in range(own, tl.minimum(own + share, count)):
        feature = tl.load(Feature + position).to(tl.int32)
        wanted = tl.load(Wanted + position) != 0
        width = row_width(GradOffsets, feature, UNIT)
        there = (column < width) & wanted
        index = tl.where(wanted, tl.load(Ids + position).to(tl.int64), 0)
        place = tl.multiple_of(tl.load(TableBegin + feature) + index * width, UNIT)
        row = load_row(Weights, place, column, there)
        place = gradient_place(position, Feature, Bag, GradOffsets, batch, grad_row, True, UNIT)
        grad = output_gradient(Grad, position, place, column, there, Bag, Offsets, MEAN)
        product = tl.sum(row * grad, 0)
        tl.store(Out + position + one, (tl.zeros((1,), dtype=tl.float32) + product).to(Out.dtype.element_ty))
