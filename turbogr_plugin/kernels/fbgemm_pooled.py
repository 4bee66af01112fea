"""fbgemm's permutations and regroupings of pooled embeddings [B, sum of D], for `npu`: permutations of columns.

Permutations arrive as tensors on the device. The source of each output column is computed there; only sizes that the
shapes tell are used on the host, so that nothing waits for the device.

`permute_pooled_embs_auto_grad`, `permute_multi_embedding` and `regroup_keyed_tensor` have their autograd in fbgemm (key
Autograd). `permute_pooled_embs_auto_grad_split` has one for CPU and CUDA only and gets one here.

Left out: the `permute_duplicate_pooled_embs` operators, whose result has a size that only values tell; TorchRec calls
none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel, with_autograd
from turbogr_plugin.kernels.segments import (
    check_count,
    check_indices,
    copied_from,
    gather,
    numbers_on,
    segments_of,
)


def permute_pooled_embs(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """Features of pooled embeddings in another order.

    Args:
        pooled_embs: [B, D_1 + ... + D_T, ...].
        offset_dim_list: [T + 1] int64, where each feature's columns begin; the last feature takes the rest.
        permute_list: [T] int64, the feature that comes at each place, each once.
        inv_offset_dim_list: of the inverse, for backward.
        inv_permute_list: of the inverse, for backward.

    Returns:
        Of the shape of `pooled_embs`.

    Raises:
        ValueError: for other dimensions or dtypes, or offsets that do not fit the permutation.
    """
    if pooled_embs.dim() < 2:
        raise ValueError(f"pooled_embs must have at least two dimensions, got shape {tuple(pooled_embs.shape)}")
    for name, tensor in {"offset_dim_list": offset_dim_list, "permute_list": permute_list}.items():
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {tensor.dtype}")
    features = permute_list.numel()
    if offset_dim_list.numel() not in (features, features + 1):
        raise ValueError(f"offset_dim_list must have {features} + 1 elements, got {offset_dim_list.numel()}")
    if pooled_embs.numel() == 0:
        return pooled_embs.clone()
    columns = pooled_embs.size(1)
    last = torch.full((1,), columns, dtype=torch.int64, device=offset_dim_list.device)
    begins = torch.cat([offset_dim_list[:features], last])
    source = copied_from(gather(begins, permute_list), gather(begins.diff(), permute_list), columns)
    return pooled_embs.index_select(1, source.clamp_(0, columns - 1))


class PermutePooled(torch.autograd.Function):
    """`permute_pooled_embs`, whose backward is the inverse permutation."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, pooled: Tensor, *lists: Tensor) -> Tensor:
        """See `permute_pooled_embs`."""
        ctx.save_for_backward(*lists)
        return permute_pooled_embs(pooled, *lists)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The inverse permutation of the gradient."""
        offsets, order, inverse_offsets, inverse_order = ctx.saved_tensors  # type: ignore[attr-defined]
        return permute_pooled_embs(grad, inverse_offsets, inverse_order, offsets, order), None, None, None, None


def permute_pooled_embs_auto_grad_split(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """`permute_pooled_embs` with a gradient."""
    lists = (offset_dim_list, permute_list, inv_offset_dim_list, inv_permute_list)
    permuted: Tensor = PermutePooled.apply(pooled_embs, *lists)
    return permuted


def permute_multi_embedding_function(
    pooled_embs: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[int],
    reverse: bool = False,
) -> list[Tensor]:
    """Features moved between groups of pooled embeddings.

    Args:
        pooled_embs: the groups, each [B, D_i].
        permutes: [P, 6] int32, per moved feature: input group, output group, its first column in the input, in the
            output, its number of columns, and the next move of the same feature (unused here).
        in_shapes: [groups] int32, columns of each input.
        out_shapes: [groups] int32, columns of each output.
        out_lengths: the same as numbers.
        reverse: the backward: input and output of each move are exchanged, and what several moves bring to the same
            columns is added.

    Returns:
        The output groups, each [B, D_o]. Columns that no move brings are zero (fbgemm's CPU kernel leaves them, and
        the gradient of features that are left out, uninitialised).

    Raises:
        ValueError: for no groups, other dimensions, or sizes that contradict each other.
    """
    _check_groups(pooled_embs, permutes, in_shapes, out_shapes, out_lengths)
    groups_in, groups_out, begins_in, begins_out, sizes, _ = permutes.to(torch.int64).unbind(1)
    joined = pooled_embs[0] if len(pooled_embs) == 1 else torch.cat(list(pooled_embs), 1)
    rows, width = joined.size(0), sum(out_lengths)
    if reverse:
        # in_shapes describes what comes in now: the gradients of the outputs
        base_in, base_out = _bases(out_shapes), _bases(in_shapes)
    else:
        base_in, base_out = _bases(in_shapes), _bases(out_shapes)
    start_in = gather(base_in, groups_in) + begins_in
    start_out = gather(base_out, groups_out) + begins_out
    if reverse:
        target, moved = _sources(start_out, start_in, sizes, joined.size(1))
        # a spare column, cut off below, takes what goes nowhere
        target.masked_fill_(~moved | (target < 0) | (target > width), width)
        result = joined.new_zeros(rows, width + 1).index_add_(1, target, joined)[:, :width]
    elif joined.size(1) == 0:
        result = joined.new_zeros(rows, width)
    else:
        source, moved = _sources(start_out, start_in, sizes, width)
        result = joined.index_select(1, source.clamp_(0, joined.size(1) - 1)).masked_fill_(~moved, 0)
    return [part.contiguous() for part in result.split(list(out_lengths), 1)]


def permute_multi_embedding(
    pooled_embs: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[int],
) -> list[Tensor]:
    """`permute_multi_embedding_function`, forward."""
    return permute_multi_embedding_function(pooled_embs, permutes, in_shapes, out_shapes, out_lengths)


def kt_regroup_arguments(
    embs: Tensor, keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]]
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The arguments of `permute_multi_embedding` that regroup keyed tensors.

    Args:
        embs: any tensor on the device the arguments are for.
        keys: features of each input.
        lengths: columns of each of them.
        groups: features of each output; a feature may come several times.

    Returns:
        (permutes [P, 6], in_shapes, out_shapes, out_lengths), the tensors int32. They are copied to the device from
        pinned memory without waiting.

    Raises:
        ValueError: for a feature of `groups` that no input has, or lengths that do not fit `keys`.
    """
    place: dict[str, tuple[int, int, int]] = {}
    widths: list[int] = []
    for number, (names, sizes) in enumerate(zip(keys, lengths, strict=True)):
        if len(names) != len(sizes):
            raise ValueError(f"lengths must be one per key, got {len(sizes)} for the {len(names)} keys {names}")
        width = 0
        for name, size in zip(names, sizes, strict=True):
            place.setdefault(name, (number, width, size))  # as in fbgemm, the first of equal names counts
            width += size
        widths.append(width)
    moves: list[list[int]] = []
    out_lengths: list[int] = []
    total = sum(map(len, groups))
    latest: dict[str, int] = {}
    for number, group in enumerate(groups):
        width = 0
        for name in group:
            if name not in place:
                raise ValueError(f"groups name a feature {name!r} that is not among the keys {sorted(place)}")
            source, column, size = place[name]
            # `next` links the moves of one feature: positive at the first, negative at later ones, -total at the last
            moves.append([source, number, column, width, size, -total if name in latest else 0])
            if name in latest:
                before = latest[name]
                moves[before][5] = len(moves) - 1 if moves[before][5] == 0 else -(len(moves) - 1)
            latest[name] = len(moves) - 1
            width += size
        out_lengths.append(width)
    permutes = numbers_on(embs.device, [number for move in moves for number in move], torch.int32).view(-1, 6)
    in_shapes = numbers_on(embs.device, widths, torch.int32)
    return permutes, in_shapes, numbers_on(embs.device, out_lengths, torch.int32), out_lengths


def regroup_keyed_tensor(
    pooled_embs: Sequence[Tensor], keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]]
) -> list[Tensor]:
    """Keyed tensors regrouped: one tensor [B, D_o] per group.

    Raises:
        ValueError: as `kt_regroup_arguments` and `permute_multi_embedding_function` do.
    """
    if not pooled_embs:
        raise ValueError("pooled_embs must have at least one tensor, got none")
    return permute_multi_embedding(pooled_embs, *kt_regroup_arguments(pooled_embs[0], keys, lengths, groups))


def _bases(shapes: Tensor) -> Tensor:
    """Where each group's columns begin in the joined tensor: [groups] int64."""
    return torch.cumsum(shapes, 0, dtype=torch.int64) - shapes


def _sources(starts: Tensor, sources: Tensor, sizes: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For each of `width` columns the column it is copied from, and whether one is: both [width].

    Args:
        starts: [P], where each move's columns begin here, in any order.
        sources: [P], where they begin there.
        sizes: [P], how many they are.
        width: columns here.
    """
    column = torch.arange(width, device=starts.device)
    if starts.numel() == 0:
        return torch.zeros_like(column), torch.zeros_like(column, dtype=torch.bool)
    # Moves of no columns begin where another does; sorted before it, they are never found.
    order = torch.argsort(starts * 2 + (sizes > 0))
    starts = gather(starts, order)
    move = segments_of(torch.cat([starts, starts.new_full((1,), width)]), column)
    step, move = column - gather(starts, move), gather(order, move)
    return gather(sources, move) + step, (step >= 0) & (step < gather(sizes, move))


def _check_groups(
    pooled: Sequence[Tensor], permutes: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: Sequence[int]
) -> None:
    if not pooled:
        raise ValueError("pooled_embs must have at least one tensor, got none")
    if any(tensor.dim() != 2 or tensor.size(0) != pooled[0].size(0) for tensor in pooled):
        raise ValueError(f"pooled_embs must all be [B, D], got shapes {[tuple(tensor.shape) for tensor in pooled]}")
    check_indices(permutes, "permutes", dim=2)
    if permutes.size(1) != 6:
        raise ValueError(f"permutes must have 6 columns, got {permutes.size(1)}")
    if in_shapes.numel() != len(pooled) or out_shapes.numel() != len(out_lengths):
        raise ValueError(
            f"in_shapes and out_shapes must have {len(pooled)} and {len(out_lengths)} elements,"
            f" got {in_shapes.numel()} and {out_shapes.numel()}"
        )
    for length in out_lengths:
        check_count(length, "out_lengths")


_LISTS = (
    "(Tensor pooled_embs, Tensor offset_dim_list, Tensor permute_list, Tensor inv_offset_dim_list,"
    " Tensor inv_permute_list) -> Tensor"
)
_MULTI = "Tensor[] pooled_embs, Tensor permutes, Tensor in_shapes, Tensor out_shapes, SymInt[] out_lengths"
_REGROUP = "str[][] keys, int[][] lengths, str[][] groups"

KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(schema=f"fbgemm::permute_pooled_embs{_LISTS}", function=permute_pooled_embs),
    NpuKernel(schema=f"fbgemm::permute_pooled_embs_auto_grad{_LISTS}", function=permute_pooled_embs),
    NpuKernel(schema=f"fbgemm::permute_pooled_embs_split{_LISTS}", function=permute_pooled_embs),
    *with_autograd(f"fbgemm::permute_pooled_embs_auto_grad_split{_LISTS}", permute_pooled_embs_auto_grad_split),
    NpuKernel(
        schema=f"fbgemm::permute_multi_embedding_function({_MULTI}, bool reverse=False) -> Tensor[]",
        function=permute_multi_embedding_function,
    ),
    NpuKernel(schema=f"fbgemm::permute_multi_embedding({_MULTI}) -> Tensor[]", function=permute_multi_embedding),
    NpuKernel(
        schema=f"fbgemm::kt_regroup_arguments(Tensor embs, {_REGROUP}) -> (Tensor, Tensor, Tensor, int[])",
        function=kt_regroup_arguments,
    ),
    NpuKernel(
        schema=f"fbgemm::regroup_keyed_tensor(Tensor[] pooled_embs, {_REGROUP}) -> Tensor[]",
        function=regroup_keyed_tensor,
    ),
)
