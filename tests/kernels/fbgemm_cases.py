"""Calls of fbgemm operators that its CPU kernels answer right, to hold ours against on CPU and on npu.

Calls that fbgemm's CPU kernels get wrong, or leave parts of their results uninitialised for, have tests of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fbgemm_gpu  # noqa: F401  (defines the operators)
import torch
from torch import Tensor

from turbogr_plugin.kernels import (
    fbgemm_bucketize,
    fbgemm_cumsum,
    fbgemm_dedup,
    fbgemm_index_select,
    fbgemm_jagged,
    fbgemm_jagged_products,
    fbgemm_jagged_select,
    fbgemm_permute,
    fbgemm_placement,
    fbgemm_pooled,
    fbgemm_reorder,
)

MODULES = (
    fbgemm_bucketize,
    fbgemm_cumsum,
    fbgemm_dedup,
    fbgemm_index_select,
    fbgemm_jagged,
    fbgemm_jagged_products,
    fbgemm_jagged_select,
    fbgemm_permute,
    fbgemm_placement,
    fbgemm_pooled,
    fbgemm_reorder,
)
KERNELS = tuple(kernel for module in MODULES for kernel in module.KERNELS)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    kernel.operator.removeprefix("fbgemm::"): kernel.function for kernel in KERNELS
}


@dataclass(frozen=True)
class Case:
    """One call."""

    operator: str
    name: str
    arguments: tuple[Any, ...]
    gradients: tuple[int, ...] = ()
    """Positions of the arguments that get gradients, tensors or lists of them."""
    exact: bool = True
    """Bit-equal results; else to rounding."""
    waits: bool = False
    """The size of a result is known to values alone, so that the host has to wait for the device."""

    def __str__(self) -> str:
        return f"{self.operator}-{self.name}"


def moved(value: Any, device: torch.device | str) -> Any:
    """Arguments on another device; tensors keep their strides."""
    if isinstance(value, Tensor):
        out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        return out.copy_(value).requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(part, device) for part in value)
    return torch.device(device) if isinstance(value, torch.device) else value


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


def with_gradients(case: Case) -> tuple[Any, ...]:
    """The arguments, those of `gradients` being leaves that require one."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.is_floating_point())
        return [leaf(part) for part in value]

    return tuple(leaf(value) if i in case.gradients else value for i, value in enumerate(case.arguments))


def backward(case: Case, arguments: tuple[Any, ...], results: Any) -> list[Tensor]:
    """Gradients of the leaves for a fixed gradient of every differentiable result, made on its device."""
    outputs = [result for result in tensors(results) if result.requires_grad]
    given = [
        (torch.arange(output.numel(), device=output.device) % 7 + 1).view(output.shape).to(output.dtype)
        for output in outputs
    ]
    leaves = [leaf for i in case.gradients for leaf in tensors(arguments[i]) if leaf.requires_grad]
    return list(torch.autograd.grad(outputs, leaves, given))


def assert_same(ours: Any, theirs: Any, *, exact: bool = True) -> None:
    """Equal structure, dtypes, shapes and values."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor)
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-6, "atol": 1e-6}
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach().cpu(), equal_nan=True, **tolerance)
    elif isinstance(theirs, (tuple, list)):
        assert isinstance(ours, (tuple, list))
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other, exact=exact)
    else:
        assert ours == theirs


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def integers(high: int, *shape: int, seed: int = 0, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


I32, I64 = torch.int32, torch.int64
ROWS = {"no rows": [], "an empty row": [0], "rows": [3, 0, 1, 4], "one row": [5], "empty rows": [0, 0]}


def jagged() -> Iterator[Case]:
    kinds = itertools.product(ROWS.items(), (I32, I64), (0, 1, 3), (2, 4, 6))
    for (name, lengths), dtype, columns, room in kinds:
        if columns == 0 and not (dtype is I64 and room == 4):
            continue
        total, rows, offsets = sum(lengths), len(lengths), [offsets_of(lengths, dtype)]
        ident = f"{name}, {dtype}, D={columns}, L={room}".replace("torch.", "")
        x, y = normal(total, columns), normal(rows, room, columns, seed=1)
        yield Case("jagged_to_padded_dense", ident, (x, offsets, [room], 2.5), (0,))
        yield Case("jagged_to_padded_dense_forward", ident, (x, offsets, [room], -1.0), (0,))
        yield Case("jagged_to_padded_dense_backward", ident, (y, offsets, total))
        yield Case("jagged_2d_to_dense", ident, (x, offsets[0], room), (0,))
        if rows:
            yield Case("dense_to_jagged", ident, (y, offsets, total), (0,))
            yield Case("dense_to_jagged", f"{ident}, no size", (y, offsets), (0,), waits=True)
            yield Case("dense_to_jagged_forward", ident, (y, offsets, total), (0,))
            yield Case("jagged_dense_elementwise_mul_forward", ident, (x, offsets, y))
            yield Case("jagged_dense_elementwise_mul_backward", ident, (normal(total, columns, seed=3), offsets, y, x))
            yield Case("jagged_dense_elementwise_add_jagged_output", ident, (x, offsets, y), (0, 2))
            z = normal(rows, room, columns, seed=2)
            operator = "jagged_dense_dense_elementwise_add_jagged_output"
            yield Case(operator, ident, (x, offsets, y, z), (0, 2, 3))
            yield Case(f"{operator}_forward", ident, (x, offsets, y, z))
            yield Case("jagged_dense_elementwise_mul", ident, (x, offsets, y), (0, 2))
            yield Case("jagged_dense_elementwise_add", ident, (x, offsets, y), (0, 2))
    flat = normal(8)
    offsets = [offsets_of(ROWS["rows"])]
    yield Case("jagged_to_padded_dense", "one column without a dimension", (flat, offsets, [3], 0.5), (0,))
    yield Case("jagged_to_padded_dense_backward", "one column without a dimension", (normal(4, 3), offsets, 8))
    for dtype in (torch.float16, torch.bfloat16, I32, I64):
        values = integers(100, 8, 2, dtype=dtype)
        yield Case(
            "jagged_to_padded_dense_forward", f"{dtype}", (values, offsets, [3], 7.9 if dtype in (I32, I64) else 7.5)
        )
    yield Case("jagged_1d_to_dense", "truncating", (flat, offsets[0], 3, 4), (0,))
    yield Case("jagged_1d_to_dense", "ids", (integers(9, 8), offsets[0], 5, -1))
    deep = [offsets_of([2, 0, 1]), offsets_of([1, 3, 2])]
    for room in ([2, 3], [1, 2], [3, 5]):
        x, y = normal(6, 4), normal(3, *room, 4, seed=1)
        yield Case("jagged_to_padded_dense", f"two jagged dimensions, {room}", (x, deep, room, 1.5), (0,))
        yield Case("dense_to_jagged", f"two jagged dimensions, {room}", (y, deep, 6), (0,))
        yield Case("jagged_dense_elementwise_mul", f"two jagged dimensions, {room}", (x, deep, y), (0, 2))
    three = [offsets_of([2, 1]), offsets_of([1, 0, 2]), offsets_of([2, 1, 3])]
    yield Case("jagged_to_padded_dense", "three jagged dimensions", (normal(6, 2), three, [2, 2, 2], 0.0), (0,))
    lengths = torch.tensor([[2, 0, 1], [0, 3, 1]])
    # its gradient on CPU uses the last feature's offsets for all features
    yield Case("stacked_jagged_1d_to_dense", "two features", (normal(7), lengths, [0, 3, 7], [2, 3], 9))
    yield Case("stacked_jagged_2d_to_dense", "two features", (normal(7, 2), lengths.int(), [0, 3, 7], [1, 4], 9), (0,))
    yield Case("stacked_jagged_2d_to_dense", "no features", (normal(0, 2), lengths[:0], [0], [], 9))


def products() -> Iterator[Case]:
    for (name, lengths), dtype in itertools.product(ROWS.items(), (I32, I64)):
        rows, total, offsets, room = len(lengths), sum(lengths), offsets_of(lengths, dtype), 5
        ident = f"{name}, {dtype}".replace("torch.", "")
        x, y = normal(total, 3), normal(rows, 3, 2, seed=1)
        yield Case("jagged_softmax", ident, (x, offsets, room), (0,), exact=False)
        yield Case("jagged_softmax_forward", ident, (x, offsets, room), exact=False)
        yield Case("jagged_softmax_backward", ident, (x, x.softmax(1), offsets, room), exact=False)
        for longest in (2, room):
            cut = f"{ident}, L={longest}"
            yield Case("jagged_dense_bmm", cut, (x, offsets, y, longest), (0, 2), exact=False)
            yield Case("jagged_dense_bmm_forward", cut, (x, offsets, y, longest), exact=False)
            yield Case("jagged_jagged_bmm_forward", cut, (x, x, offsets, longest), exact=False)
            yield Case("jagged_jagged_bmm", cut, (x, normal(total, 2, seed=1), offsets, longest), (0, 1), exact=False)
            operator, v, a = "batched_dense_vec_jagged_2d_mul", normal(rows * 2, longest), normal(total, 6)
            yield Case(operator, cut, (v, a, offsets), (0, 1), exact=False)
            yield Case(f"{operator}_forward", cut, (v, a, offsets), exact=False)
            yield Case(f"{operator}_backward", cut, (normal(rows * 2, 3 if rows else 6), v, a, offsets), exact=False)


def selects() -> Iterator[Case]:
    lengths = torch.tensor([3, 0, 1, 4])
    for dtype, index_type in itertools.product((torch.float32, I64), (I32, I64)):
        values = normal(8, 3) if dtype.is_floating_point else integers(99, 8, 3)
        grad = (0,) if dtype.is_floating_point else ()
        for name, chosen in {"some": [2, 0, 3], "none": [1], "repeated": [3, 3, 1, 0], "all": [0, 1, 2, 3]}.items():
            indices = torch.tensor(chosen, dtype=index_type)
            ident = f"{name}, {dtype}, {index_type}".replace("torch.", "")
            size = int(lengths[chosen].sum())
            yield Case("jagged_index_select", ident, (values, lengths, indices, size), grad)
            yield Case("jagged_index_select", f"{ident}, no size", (values, lengths, indices), grad, waits=True)
    ends, chosen_ends = lengths.cumsum(0), torch.tensor([4, 7])
    chosen = torch.tensor([3, 0])
    yield Case("jagged_index_select_2d_forward_v2", "no size", (normal(8, 1), chosen, ends, chosen_ends), waits=True)
    yield Case(
        "jagged_index_add_2d_forward",
        "repeated",
        (normal(8, 2), torch.tensor([3, 3]), torch.tensor([4, 8]), ends, 8, 8),
    )
    yield Case(
        "jagged_index_select_2d_forward",
        "repeated",
        (normal(8, 2), torch.tensor([3, 3]), ends, torch.tensor([4, 8]), 8),
    )
    starts, zeros = torch.tensor([1, 0, 0, 2]), torch.zeros(4, dtype=I64)
    yield Case(
        "jagged_slice_forward", "to the front", (normal(8), lengths, starts, lengths - starts, zeros, 5, 9, False)
    )
    yield Case("jagged_slice_forward", "back", (normal(5), lengths - starts, zeros, lengths, starts, 8, 9, True))
    for length in (1, 2, 9):
        arguments = (normal(8), lengths, torch.tensor([1, 0, 0, 2]), length)
        yield Case("jagged_slice", f"up to {length}", arguments, (0,), waits=True)
    for name, (rows, chosen) in {"rows": (5, [4, 0, 0]), "none": (5, []), "one": (1, [0])}.items():
        index = torch.tensor(chosen, dtype=I64)
        yield Case("index_select_dim0", name, (normal(rows, 2, 3), index), (0,))
        yield Case("group_index_select_dim0", name, ([normal(rows, 2), normal(rows, 3)], [index, index.flip(0)]), (0,))
        group = [index, index.flip(0), normal(rows, 2), normal(rows, 3)]
        yield Case("group_index_select_dim0_gpu_impl", name, (group, 2), (0,))
        given = [normal(len(index), 2), normal(len(index), 3), *group[:2], index[:0], index[:0], group[2]]
        yield Case("group_index_select_dim0_gpu_backward", name, (given, [rows, 2, rows, 3]))
    for permute in (False, True):
        arguments = (normal(2 * 3 + 4 * 2), torch.tensor([1, 0, 1, 3, 2, 3]), [3, 3], [2, 4], [3, 2], permute)
        yield Case("batch_index_select_dim0", f"side by side: {permute}", arguments, (0,))
        sizes = tuple(torch.tensor(part) for part in arguments[2:5])
        tensor_arguments = (*arguments[:2], *sizes, permute)
        yield Case("batch_index_select_dim0_tensor", f"side by side: {permute}", tensor_arguments, (0,), waits=True)
    yield Case("batch_index_select_dim0", "empty", (normal(0), torch.zeros(0, dtype=I64), [], [], []))


def cumsums() -> Iterator[Case]:
    for dtype, size in itertools.product((I32, I64, torch.float32, torch.float16), (0, 1, 7)):
        values = integers(9, size, dtype=dtype)
        for kind in ("complete", "inclusive", "exclusive"):
            yield Case(f"asynchronous_{kind}_cumsum", f"{size} of {dtype}".replace("torch.", ""), (values,))
    for shape in ((0, 3), (2, 0), (3, 4)):
        yield Case("asynchronous_complete_cumsum", f"{shape}", (integers(9, *shape),))
        yield Case("asynchronous_batched_complete_cumsum", f"{shape}", (integers(9, *shape),))
    yield Case("asynchronous_inclusive_cumsum", "not contiguous", (integers(9, 8)[::2],))
    yield Case("asynchronous_exclusive_cumsum", "two dimensions", (integers(9, 2, 4),))
    for (name, lengths), dtype in itertools.product(ROWS.items(), (I32, I64)):
        ident = f"{name}, {dtype}".replace("torch.", "")
        offsets = offsets_of(lengths, dtype)
        yield Case("offsets_range", ident, (offsets[:-1] if lengths else offsets[:0], sum(lengths)))
        yield Case("lengths_range", ident, (torch.tensor(lengths, dtype=dtype),), waits=True)
        yield Case("lengths_range", f"{ident}, size", (torch.tensor(lengths, dtype=dtype), [sum(lengths)]))
        yield Case("repeat_arange", ident, (torch.tensor(lengths, dtype=dtype),), waits=True)
        for batch in (1, 3):
            for values in (torch.float32, I32, I64):
                arguments = (batch, offsets, integers(50, sum(lengths) * batch, dtype=values))
                yield Case("segment_sum_csr", f"{ident}, {batch} of {values}".replace("torch.", ""), arguments)


def permutes() -> Iterator[Case]:
    orders = {"all": [2, 0, 1], "some": [1], "repeated": [1, 1, 0, 2, 2], "none": []}
    for (name, order), dtype, batch, sized in itertools.product(orders.items(), (I32, I64), (0, 1, 4), (True, False)):
        lengths, permute = integers(4, 3, batch, dtype=dtype), torch.tensor(order, dtype=I32)
        flat = lengths.reshape(-1)
        values = integers(99, int(flat.sum()), dtype=I64 if dtype is I32 else I32)
        for weights in (None, normal(len(values))):
            ident = f"{name}, {dtype}, B={batch}, size {sized}, weights {weights is not None}".replace("torch.", "")
            rest = (weights, int(lengths[order].sum()) if sized else None)
            yield Case("permute_2D_sparse_data", ident, (permute, lengths, values, *rest), waits=not sized)
            if batch:
                arguments = (permute, flat, values, batch, *rest)
                yield Case("permute_2D_sparse_data_input1D", ident, arguments, waits=not sized)
                size = int(flat[order].sum()) if sized else None
                yield Case("permute_1D_sparse_data", ident, (permute, flat, values, weights, size), waits=not sized)
            if not sized:
                arguments = (permute, lengths, values.to(dtype), weights)
                yield Case("permute_sparse_features", ident, arguments, waits=True)
    lengths = integers(4, 3, 2)
    rows = normal(int(lengths.sum()))
    turned = torch.tensor([2, 0, 1], dtype=I32)
    yield Case("permute_sequence_embeddings", "flat", (turned, lengths, rows), waits=True)
    yield Case("permute_2D_sparse_data", "differentiable", (turned, lengths, rows, rows * 2, None), (2, 3), waits=True)
    yield Case("permute_sparse_data", "alias", (turned[:2], lengths, rows, None, None), waits=True)
    for dtype in (I32, I64):
        permute = torch.tensor([2, 0, 3, 1], dtype=dtype)
        before = torch.tensor([1, 3, 0, 2])
        yield Case("invert_permute", f"{dtype}", (permute,))
        yield Case("invert_permute", f"empty {dtype}", (permute[:0],))
        arguments = (permute, offsets_of(before.tolist(), dtype), offsets_of(before[permute.long()].tolist(), dtype), 6)
        yield Case("expand_into_jagged_permute", f"{dtype}", arguments)


def reorders() -> Iterator[Case]:
    ads = [2, 1, 3]
    batch = offsets_of(ads, I32)
    for features, dtype in itertools.product((1, 3), (I32, I64, torch.float32)):
        ident = f"{features} features of {dtype}".replace("torch.", "")
        lengths = integers(5, features * 6, dtype=dtype)
        yield Case("reorder_batched_ad_lengths", ident, (lengths, batch, 6))
        yield Case("reorder_batched_ad_lengths", f"{ident}, room", (lengths, batch, 6, False, 9))
        few = integers(5, features * 3, dtype=dtype)
        yield Case("reorder_batched_ad_lengths", f"{ident}, broadcast", (few, batch, 6, True))
        if dtype.is_floating_point:
            continue
        reordered = torch.ops.fbgemm.reorder_batched_ad_lengths(lengths, batch, 6)
        offsets, target = (torch.ops.fbgemm.asynchronous_complete_cumsum(part) for part in (lengths, reordered))
        values = integers(99, int(lengths.sum()))
        yield Case("reorder_batched_ad_indices", ident, (offsets, values, target, batch, 6))
        reordered = torch.ops.fbgemm.reorder_batched_ad_lengths(few, batch, 6, True)
        offsets, target = (torch.ops.fbgemm.asynchronous_complete_cumsum(part) for part in (few, reordered))
        values = normal(int(few.sum()))
        yield Case(
            "reorder_batched_ad_indices",
            f"{ident}, broadcast",
            (offsets, values, target, batch, 6, True, int(reordered.sum())),
        )


def buckets() -> Iterator[Case]:
    flags = (False, True)
    for length_type, id_type, ranks, spread in itertools.product((I32, I64), (I32, I64), (1, 3), ("in", "over", "raw")):
        lengths = integers(5, 8, dtype=length_type)
        total = int(lengths.sum())
        high, low = {"in": (30, 0), "over": (99, 0), "raw": (1 << 31, -(1 << 31))}[spread]
        ids = integers(high, total, low=low, dtype=id_type, seed=ranks)
        sizes = torch.tensor([10, 12], dtype=id_type)
        base = (lengths, ids, True, True, sizes, ranks)
        ident = f"{length_type}, {id_type}, W={ranks}, {spread}".replace("torch.", "")
        weights = normal(total)
        operator = "block_bucketize_sparse_features"
        yield Case(operator, ident, (*base, weights))
        yield Case(operator, f"{ident}, kept", (*base, None, None, -1, None, True))
        of_feature = torch.tensor([True, False])
        blocks = torch.tensor([ranks * 2, ranks], dtype=id_type)
        yield Case(operator, f"{ident}, blocks", (*base, None, None, -1, None, False, blocks, of_feature))
        batches = torch.tensor([3, 5], dtype=length_type)
        yield Case(operator, f"{ident}, variable batch", (*base, None, batches, 5))
        bounds = [
            torch.tensor([*[0, 3, 11, 33][:ranks], 33], dtype=id_type),
            torch.tensor([0, *range(4, 4 + ranks)], dtype=id_type),
        ]
        yield Case(operator, f"{ident}, boundaries", (*base, weights, None, -1, bounds))
        none = torch.zeros(2, dtype=id_type)
        if spread != "raw":
            yield Case(
                operator, f"{ident}, only boundaries", (*base[:4], none, ranks, None, None, -1, bounds, False, blocks)
            )
        yield Case(f"{operator}_2d_weights", ident, (*base, normal(total, 3), 3))
        yield Case(f"{operator}_inference", ident, (*base, weights, None, -1, None, True))
        if length_type == id_type:
            yield Case("bucketize_sparse_features", ident, (lengths, ids, True, ranks, weights))
    for positions, sequence in itertools.product(flags, flags):
        base = (integers(5, 6), integers(30, int(integers(5, 6).sum())), positions, sequence, torch.tensor([10, 10]), 4)
        yield Case("block_bucketize_sparse_features", f"positions {positions}, sequence {sequence}", base)
    empty = torch.zeros(0, dtype=I64)
    yield Case(
        "block_bucketize_sparse_features",
        "empty bags",
        (torch.zeros(4, dtype=I64), empty, True, True, torch.tensor([5, 5]), 2, normal(0)),
    )
    # Managed collision splits a range of 2^63 - 1 ids: sizes of blocks and their products pass 2^63.
    ids = torch.tensor([0, 5, (1 << 62) - 1, 1 << 62, (1 << 62) + 7, (1 << 63) - 2])
    for blocks, ranks in ((2, 1), (2, 2), (4, 2)):
        size, count = torch.tensor([-((1 - (1 << 63)) // blocks)]), torch.tensor([blocks])
        for keep in flags:
            split = (torch.tensor([2, 4]), ids, True, True, size, ranks, None, None, -1, None, keep, count)
            yield Case("block_bucketize_sparse_features", f"2^63 ids in {blocks} blocks, W={ranks}, kept {keep}", split)


def pooled() -> Iterator[Case]:
    for name, dims in {"unequal": [2, 0, 3, 1], "one": [4], "equal": [2, 2]}.items():
        order = list(range(len(dims)))[::-1]
        offsets, inverse = offsets_of(dims), offsets_of([dims[i] for i in order])
        lists = (offsets, torch.tensor(order), inverse, torch.argsort(torch.tensor(order)))
        for batch in (0, 3):
            rows = normal(batch, sum(dims))
            for operator in ("permute_pooled_embs", "permute_pooled_embs_split"):
                yield Case(operator, f"{name}, B={batch}", (rows, *lists))
            if batch:
                for operator in ("permute_pooled_embs_auto_grad", "permute_pooled_embs_auto_grad_split"):
                    yield Case(operator, f"{name}, B={batch}", (rows, *lists), (0,))
    keys, lengths = [["a", "b"], ["c", "d"], ["e"]], [[3, 2], [1, 4], [2]]
    for name, groups in {
        "all": [["a", "c"], ["b", "d", "e"]],
        "repeated": [["a", "c", "a"], ["b", "a", "d"], ["e"]],
        "some": [["d"]],
    }.items():
        groups_of = torch.ops.fbgemm.kt_regroup_arguments(normal(1), keys, lengths, groups)
        for batch in (0, 3):
            parts = [normal(batch, sum(sizes), seed=i) for i, sizes in enumerate(lengths)]
            # the gradient of a feature that is left out is uninitialised in fbgemm
            grad = (0,) if name != "some" and batch else ()
            yield Case("kt_regroup_arguments", f"{name}, B={batch}", (parts[0], keys, lengths, groups))
            yield Case("regroup_keyed_tensor", f"{name}, B={batch}", (parts, keys, lengths, groups), grad)
            yield Case("permute_multi_embedding", f"{name}, B={batch}", (parts, *groups_of), grad)
            yield Case("permute_multi_embedding_function", f"{name}, B={batch}", (parts, *groups_of, False))
    here = torch.device("cpu")
    parts = [normal(3, 2), normal(3, 2, seed=1), normal(3, 2, seed=2)]
    yield Case("all_to_one_device", "three", (parts, here), (0,))
    yield Case("sum_reduce_to_one", "three", (parts, here), (0,))
    yield Case("sum_reduce_to_one", "one", (parts[:1], here))
    yield Case("merge_pooled_embeddings", "columns", (parts, 3, here))
    yield Case("merge_pooled_embeddings", "rows", (parts, 2, here, 0))
    yield Case("is_uvm_tensor", "one", (parts[0],))


CASES = tuple(
    case for family in (jagged, products, selects, cumsums, permutes, reorders, buckets, pooled) for case in family()
)
OPERATORS = tuple(dict.fromkeys(case.operator for case in CASES))


@contextmanager
def each(case: Case) -> Iterator[None]:
    """Names the case in which something fails: an operator's cases run in one test."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"in the case {case}: {error}") from error
