"""fbgemm's selections of rows of dense tensors, for `npu`.

fbgemm has autograd for these under AutogradCPU and AutogradCUDA only, for `index_select_dim0` under AutogradCUDA alone.
Here they are written with differentiable operators and registered above autograd too.

`group_index_select_dim0_gpu_impl` has its autograd in fbgemm and is there for who calls it directly.

Left out: the `batch_index_select_dim0_*_impl` operators, inner parts of fbgemm's own autograd, which nothing calls any
more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel, with_autograd
from turbogr_plugin.kernels.segments import check_indices


def index_select_dim0(
    input: Tensor,
    indices: Tensor,
    consecutive_range_start: int | None = 0,
    consecutive_range_length: int | None = 0,
    skip_indices_sorting_fwd: bool | None = None,
) -> Tensor:
    """Rows `indices` [R] (int32 or int64) of `input` [T, ...]: [R, ...]; the other arguments are hints for CUDA.

    Raises:
        ValueError: for indices of other shape or dtype.
    """
    check_indices(indices, "indices")
    return input.index_select(0, indices)


def group_index_select_dim0(input_group: Sequence[Tensor], indices_group: Sequence[Tensor]) -> list[Tensor]:
    """Rows of several tensors: output i is rows `indices_group[i]` of `input_group[i]`.

    Raises:
        ValueError: for other than one indices tensor per input.
    """
    if len(input_group) != len(indices_group):
        raise ValueError(f"indices_group must have {len(input_group)} tensors, got {len(indices_group)}")
    return [rows.index_select(0, indices) for rows, indices in zip(input_group, indices_group, strict=True)]


def group_index_select_dim0_gpu_impl(inputs: Sequence[Tensor], group_size: int) -> list[Tensor]:
    """`group_index_select_dim0` as fbgemm's autograd calls it.

    Args:
        inputs: `group_size` indices tensors, then as many inputs.
        group_size: number of inputs.

    Returns:
        The outputs, and two empty int64 tensors that CUDA keeps its arguments in.

    Raises:
        ValueError: for other than two tensors per input.
    """
    if group_size < 1 or len(inputs) != 2 * group_size:
        raise ValueError(f"inputs must be two tensors for each of {group_size} inputs, got {len(inputs)}")
    outputs = group_index_select_dim0(inputs[group_size:], inputs[:group_size])
    empty = inputs[0].new_empty(0, dtype=torch.int64)
    return [*outputs, empty, torch.empty_like(empty)]


def group_index_select_dim0_gpu_backward(inputs: Sequence[Tensor], output_shape_group: Sequence[int]) -> list[Tensor]:
    """The backward of `group_index_select_dim0_gpu_impl`.

    Args:
        inputs: G gradients of the outputs, G indices tensors, the two tensors of the forward, and its first input.
        output_shape_group: shapes of the G inputs, one behind the other.

    Returns:
        G empty tensors in place of gradients of the indices, and the gradients of the inputs.

    Raises:
        ValueError: for another number of tensors or of sizes.
    """
    groups = (len(inputs) - 3) // 2
    if groups < 1 or len(inputs) != 2 * groups + 3 or len(output_shape_group) % groups:
        raise ValueError(f"inputs must be 2 * G + 3 tensors with G shapes, got {len(inputs)}, {output_shape_group}")
    dims = len(output_shape_group) // groups
    shapes = [output_shape_group[i * dims : (i + 1) * dims] for i in range(groups)]
    gradients = [
        gradient.new_zeros(shape).index_add_(0, indices, gradient)
        for gradient, indices, shape in zip(inputs[:groups], inputs[groups : 2 * groups], shapes, strict=True)
    ]
    return [*(gradient.new_empty(0, dtype=torch.int64) for gradient in gradients), *gradients]


def batch_index_select_dim0(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: Sequence[int],
    input_rows: Sequence[int],
    input_columns: Sequence[int],
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """Rows of several matrices that lie one behind the other in one flat tensor.

    Args:
        inputs: [sum of rows_i * columns_i].
        indices: [sum of num_indices_i] int32 or int64, the rows of each matrix.
        input_num_indices: rows to take of each matrix.
        input_rows: rows of each matrix.
        input_columns: columns of each matrix.
        permute_output_dim_0_1: results side by side instead of one behind the other; all num_indices are then equal.

    Returns:
        [sum of num_indices_i * columns_i]. An empty `inputs` gives an empty result, as in fbgemm.

    Raises:
        ValueError: for lists of different lengths, numbers that are not positive, or sizes that contradict the tensors.
    """
    check_indices(indices, "indices")
    counts, rows, columns = list(input_num_indices), list(input_rows), list(input_columns)
    if not len(counts) == len(rows) == len(columns):
        raise ValueError(
            "input_num_indices, input_rows and input_columns must have one number per matrix,"
            f" got {len(counts)}, {len(rows)} and {len(columns)}"
        )
    if inputs.numel() == 0:
        return inputs.new_empty(0)
    if min((*counts, *rows, *columns), default=1) < 1:
        raise ValueError(
            f"input_num_indices {counts}, input_rows {rows} and input_columns {columns} must all be positive"
        )
    if permute_output_dim_0_1 and len(set(counts)) > 1:
        raise ValueError(f"input_num_indices must be equal with permute_output_dim_0_1, got {counts}")
    sizes = [row * column for row, column in zip(rows, columns, strict=True)]
    if inputs.numel() != sum(sizes) or indices.numel() != sum(counts):
        raise ValueError(
            f"inputs and indices must have {sum(sizes)} and {sum(counts)} elements,"
            f" got {inputs.numel()} and {indices.numel()}"
        )
    matrices = inputs.reshape(-1).split(sizes)
    parts = [
        matrix.view(-1, width).index_select(0, chosen)
        for matrix, width, chosen in zip(matrices, columns, indices.split(counts), strict=True)
    ]
    if permute_output_dim_0_1:
        return torch.cat(parts, 1).view(-1)
    return torch.cat([part.view(-1) for part in parts])


def batch_index_select_dim0_tensor(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: Tensor,
    input_rows: Tensor,
    input_columns: Tensor,
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """`batch_index_select_dim0` with its sizes in tensors; the host waits for them where they are not on the CPU."""
    sizes = (input_num_indices.tolist(), input_rows.tolist(), input_columns.tolist())
    return batch_index_select_dim0(inputs, indices, *sizes, permute_output_dim_0_1)


_INPUTS = "Tensor inputs, Tensor indices, "

KERNELS: tuple[NpuKernel, ...] = (
    *with_autograd(
        "fbgemm::index_select_dim0(Tensor input, Tensor indices, SymInt? consecutive_range_start=0,"
        " SymInt? consecutive_range_length=0, bool? skip_indices_sorting_fwd=None) -> Tensor",
        index_select_dim0,
    ),
    *with_autograd(
        "fbgemm::group_index_select_dim0(Tensor[] input_group, Tensor[] indices_group) -> Tensor[]",
        group_index_select_dim0,
    ),
    NpuKernel(
        schema="fbgemm::group_index_select_dim0_gpu_impl(Tensor[] inputs, int group_size) -> Tensor[]",
        function=group_index_select_dim0_gpu_impl,
    ),
    NpuKernel(
        schema="fbgemm::group_index_select_dim0_gpu_backward(Tensor[] inputs, SymInt[] output_shape_group) -> Tensor[]",
        function=group_index_select_dim0_gpu_backward,
    ),
    *with_autograd(
        f"fbgemm::batch_index_select_dim0({_INPUTS}SymInt[] input_num_indices, SymInt[] input_rows,"
        " SymInt[] input_columns, bool permute_output_dim_0_1=False) -> Tensor",
        batch_index_select_dim0,
    ),
    *with_autograd(
        f"fbgemm::batch_index_select_dim0_tensor({_INPUTS}Tensor input_num_indices, Tensor input_rows,"
        " Tensor input_columns, bool permute_output_dim_0_1=False) -> Tensor",
        batch_index_select_dim0_tensor,
    ),
)
