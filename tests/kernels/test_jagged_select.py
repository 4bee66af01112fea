"""Joining, splitting and picking parts of jagged tensors against lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from turbogr_plugin.kernels.jagged_select import (
    age_buckets,
    concat_2d_jagged,
    jagged_dense_broadcast_add,
    last_tokens,
    split_2d_jagged,
    target_tokens,
)
from turbogr_plugin.kernels.offsets import lengths_to_offsets

ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5)
SHAPES = st.sampled_from([(), (3,), (2, 3)])
INDEX = st.sampled_from([torch.int32, torch.int64])
any_rows = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def _values(total: int, shape: tuple[int, ...], first: int = 0) -> Tensor:
    numbers = torch.arange(first, first + total * math.prod(shape), dtype=torch.float64)
    return numbers.view(total, *shape).requires_grad_()


def _rows(values: Tensor, lengths: list[int]) -> list[list[Any]]:
    return [part.tolist() for part in values.split(lengths)] if lengths else []


def _offsets(lengths: list[int], dtype: torch.dtype) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=dtype))


@any_rows
@given(ROWS, SHAPES, INDEX)
def test_joined_rows_are_those_of_the_left_followed_by_those_of_the_right(
    rows: list[tuple[int, int]], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    first, second = [a for a, _ in rows], [b for _, b in rows]
    left, right = _values(sum(first), shape), _values(sum(second), shape, 1000)
    offsets = _offsets(first, dtype), _offsets(second, dtype)
    joined, joined_offsets = concat_2d_jagged(left, right, *offsets)
    lengths = [a + b for a, b in rows]
    expected = [a + b for a, b in zip(_rows(left, first), _rows(right, second), strict=True)]
    assert _rows(joined, lengths) == expected
    assert joined_offsets.tolist() == _offsets(lengths, dtype).tolist()
    again = split_2d_jagged(joined, *offsets, left_total=sum(first))
    assert torch.equal(again[0], left)
    assert torch.equal(again[1], right)
    grads = torch.autograd.grad((joined * joined.detach()).sum(), [left, right])
    assert torch.equal(grads[0], left)
    assert torch.equal(grads[1], right)


@any_rows
@given(ROWS, SHAPES, INDEX)
def test_each_rows_vector_is_added_to_all_its_tokens(
    rows: list[tuple[int, int]], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    lengths = [a for a, _ in rows]
    values, dense = _values(sum(lengths), shape), _values(len(lengths), shape, 1000)
    found = jagged_dense_broadcast_add(values, _offsets(lengths, dtype), dense)
    token = [row for row, length in enumerate(lengths) for _ in range(length)]
    assert torch.equal(found, values + dense[token])
    (gradient,) = torch.autograd.grad(found.sum(), dense, allow_unused=True, materialize_grads=True)
    assert [g.flatten().tolist() for g in gradient] == [[n] * math.prod(shape) for n in lengths]


@any_rows
@given(ROWS, SHAPES, INDEX)
def test_the_last_token_of_each_row_is_picked_and_zeros_where_there_is_none(
    rows: list[tuple[int, int]], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    lengths = [a for a, _ in rows]
    values = _values(sum(lengths), shape, 1)
    found = last_tokens(values, _offsets(lengths, dtype))
    zeros = torch.zeros(shape).tolist()
    assert found.tolist() == [row[-1] if row else zeros for row in _rows(values, lengths)]
    (gradient,) = torch.autograd.grad(found.sum(), values)
    picked = [place == length - 1 for length in lengths for place in range(length)]
    assert gradient.flatten(1).bool().all(1).tolist() == picked if gradient.dim() > 1 else True


@any_rows
@given(ROWS, SHAPES, INDEX)
def test_targets_are_the_ends_of_the_rows(
    rows: list[tuple[int, int]], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    lengths, targets = [a for a, _ in rows], [min(a, b) for a, b in rows]
    values, total = _values(sum(lengths), shape), sum(targets)
    found, offsets = target_tokens(values, _offsets(lengths, dtype), torch.tensor(targets, dtype=dtype), total=total)
    expected = [row[len(row) - n :] for row, n in zip(_rows(values, lengths), targets, strict=True)]
    assert _rows(found, targets) == expected
    assert offsets.tolist() == _offsets(targets, torch.int64).tolist()


@any_rows
@given(ROWS, st.booleans(), st.booleans(), st.integers(0, 99))
def test_ages_are_counted_back_from_the_request(
    rows: list[tuple[int, int]], requested: bool, borders: bool, seed: int
) -> None:
    lengths = [a for a, _ in rows]
    generator = torch.Generator().manual_seed(seed)
    times = torch.randint(0, 5000, (sum(lengths),), generator=generator)
    requests = torch.randint(0, 5000, (len(lengths),), generator=generator) if requested else None
    edges = torch.tensor([3.0, 60.0, 900.0])
    found = age_buckets(
        times,
        _offsets(lengths, torch.int64),
        4 if borders else 16,
        request_times=requests,
        time_buckets=edges if borders else None,
    )
    expected = []
    for row, own in enumerate(_rows(times, lengths)):
        at = int(requests[row]) if requests is not None else (own[-1] if own else 0)
        for time in own:
            gap = abs(at - time)
            expected.append(
                sum(edge <= gap for edge in edges.tolist())
                if borders
                else min(math.floor(math.log(max(gap, 1)) / 0.301), 15)
            )
    assert found.tolist() == expected
    assert found.dtype == torch.int64


THREE = torch.tensor([0, 1, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: concat_2d_jagged(x, x, THREE, THREE[:2]), r"must be alike.*\(3,\).*\(2,\)"),
        (lambda x: concat_2d_jagged(x, x, THREE, THREE.int()), "must be alike.*int64.*int32"),
        (lambda x: concat_2d_jagged(x, x[:2], THREE, THREE), "right_offsets must run from 0 to.*2, got 0 to 3"),
        (lambda x: concat_2d_jagged(x, x[:, :1], THREE, THREE), r"alike but for their length.*\(3, 2\).*\(3, 1\)"),
        (lambda x: concat_2d_jagged(x, x.double(), THREE, THREE), "float32.*float64"),
        (lambda x: split_2d_jagged(x, THREE, THREE, left_total=4), "left_total must be between 0 and.*3, got 4"),
        (lambda x: split_2d_jagged(x, THREE, THREE, left_total=3), "right_offsets.*values 0, got 0 to 3"),
        (lambda x: jagged_dense_broadcast_add(x, THREE, x), r"dense must be \[B, ...\] = \(2, 2\), got \(3, 2\)"),
        (lambda x: jagged_dense_broadcast_add(x, THREE[:2], x[:1]), "got 0 to 1"),
        (lambda x: last_tokens(x, THREE + 1), "got 1 to 4"),
        (lambda x: target_tokens(x, THREE, torch.tensor([2, 0]), total=2), r"num_targets\[0\].*length 1, got 2"),
        (lambda x: target_tokens(x, THREE, torch.tensor([1, 1]), total=3), "total must be the sum.*2, got 3"),
        (lambda x: target_tokens(x, THREE, torch.tensor([1]), total=1), "num_targets must be.*B = 2"),
        (lambda x: age_buckets(x[:, 0].long(), THREE, 0), "num_buckets must be at least 1, got 0"),
        (
            lambda x: age_buckets(x[:, 0].long(), THREE, 4, request_times=THREE),
            r"request_times.*B = 2, got torch.int64 \(3,\)",
        ),
        (lambda x: age_buckets(x[:, 0].long(), THREE, 4, time_buckets=torch.ones(4)), "4 - 1 borders"),
        (lambda x: age_buckets(x[:, 0], THREE, 4), "timestamps must be int32 or int64.*float32"),
        (lambda x: age_buckets(x.long(), THREE, 4), r"timestamps must be int32 or int64 \[T\].*\(3, 2\)"),
        (lambda x: age_buckets(x[:, 0].long(), THREE, 4, request_times=x[:2, 0]), "request_times.*float32"),
        (lambda x: age_buckets(x[:, 0].long(), THREE, 3, time_buckets=torch.tensor([2.0, 1.0])), "ascending borders"),
        (lambda x: age_buckets(x[:, 0].long(), THREE, 2, time_buckets=torch.tensor([torch.nan])), "ascending borders"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3, 2))


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "concat_2d_jagged": lambda x, offsets: concat_2d_jagged(x, x, offsets, offsets),
    "split_2d_jagged": lambda x, offsets: split_2d_jagged(torch.cat([x, x]), offsets, offsets, left_total=3),
    "jagged_dense_broadcast_add": lambda x, offsets: jagged_dense_broadcast_add(x, offsets, x[:2]),
    "last_tokens": last_tokens,
    "target_tokens": lambda x, offsets: target_tokens(x, offsets, torch.tensor([0, 2]), total=2),
    "age_buckets": lambda x, offsets: age_buckets(x[:, 0].long(), offsets, 16),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_are_compiled_as_one_graph_and_know_their_shapes_without_data(name: str) -> None:
    function, x = _FUNCTIONS[name], torch.arange(6.0).view(3, 2)
    expected = tree_leaves(function(x, THREE))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for found, want in zip(tree_leaves(compiled(x, THREE)), expected, strict=True):
        assert torch.equal(found, want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shapes = tree_leaves(function(mode.from_tensor(x), mode.from_tensor(THREE)))
    assert [(s.shape, s.dtype) for s in shapes] == [(want.shape, want.dtype) for want in expected]
