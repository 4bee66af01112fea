"""fbgemm's jagged tensors against padded ones, for `npu`: conversions and element-wise sums and products.

fbgemm's own autograd (key Autograd) works for any device and stays: it calls the `_forward` and `_backward` operators
below. Two operators have no autograd there for other devices than CPU or CUDA; they get one (key AutogradPrivateUse1).

Sizes: `dense_to_jagged` without `total_L` waits for the device, as on CUDA. Where jagged values are an argument their
number is known, and nothing waits; offsets that end elsewhere then give zeros or cut rows instead of an error.

Rows longer than the padded tensor has room for: the tail is dropped by conversions, passes through sums unchanged
(it meets zeros), becomes zero in products, and gets a zero gradient (pytorch/FBGEMM#1013).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turbogr_plugin.kernels.jagged_padding import ToPadded, check_rows, to_jagged, to_padded
from turbogr_plugin.kernels.npu_operators import NpuKernel, with_autograd
from turbogr_plugin.kernels.segments import check_count, check_offsets_shape, complete_offsets


def jagged_to_padded_dense_forward(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0
) -> Tensor:
    """Values [T] or [T, D] as a padded tensor [B, L_1, ..., L_k] or [B, L_1, ..., L_k, D].

    Args:
        values: [T] or [T, D].
        offsets: one [rows + 1] tensor, int32 or int64, per jagged dimension, outermost first.
        max_lengths: room per row in each of them.
        padding_value: what cells without a value show; integers cut its fraction.

    Raises:
        ValueError: for shapes or dtypes that contradict each other, or negative lengths.
    """
    return to_padded(values, offsets, max_lengths, padding_value)


def jagged_to_padded_dense_backward(grad_output: Tensor, offsets: Sequence[Tensor], total_L: int) -> Tensor:
    """The gradient [total_L] or [total_L, D] of the values; zeros for values that had no room.

    Raises:
        ValueError: for shapes or dtypes that contradict each other, or a negative `total_L`.
    """
    return to_jagged(grad_output, offsets, total_L)


def dense_to_jagged_forward(dense: Tensor, offsets: Sequence[Tensor], total_L: int | None = None) -> Tensor:
    """Values [total_L, D] of a padded tensor [B, L_1, ..., L_k, D]; zeros for values without a cell.

    Args:
        dense: the padded tensor.
        offsets: one [rows + 1] tensor per jagged dimension, outermost first.
        total_L: number of values; without it the host waits for the device. One that is smaller or larger than the
            offsets say cuts values or adds rows of zeros (fbgemm writes outside its result, pytorch/FBGEMM#5891).

    Raises:
        ValueError: for shapes or dtypes that contradict each other, or a total that is negative or cannot exist.
    """
    if dense.dim() != len(offsets) + 2:
        raise ValueError(f"dense must have {len(offsets)} + 2 dimensions, got shape {tuple(dense.shape)}")
    if total_L is None:
        for level in offsets:
            check_offsets_shape(level, "offsets")
        total_L = int(offsets[-1].max())
    return to_jagged(dense, offsets, total_L)


def jagged_2d_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: int) -> Tensor:
    """Values [T, D] as [B, max_sequence_length, D], padded with zeros."""
    return to_padded(values, [offsets], [max_sequence_length], 0.0)


def jagged_1d_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: int, padding_value: int) -> Tensor:
    """Values [T] as [B, max_sequence_length].

    Raises:
        ValueError: for values that are not one-dimensional, or no room.
    """
    if values.dim() != 1:
        raise ValueError(f"values must have one dimension, got shape {tuple(values.shape)}")
    if max_sequence_length < 1:
        raise ValueError(f"max_sequence_length must be positive, got {max_sequence_length}")
    return to_padded(values, [offsets], [max_sequence_length], padding_value)


def stacked_jagged_1d_to_dense(
    values: Tensor, lengths: Tensor, offset_per_key: list[int], max_lengths_per_key: list[int], padding_value: int
) -> list[Tensor]:
    """Values [N] of T features, one behind the other, as T tensors [B, L_t].

    Args:
        values: [N].
        lengths: [T, B], int32 or int64.
        offset_per_key: T + 1 numbers, where each feature's values begin and end.
        max_lengths_per_key: T numbers, the room per row.
        padding_value: what cells without a value show.

    Raises:
        ValueError: for shapes that contradict each other.
    """
    return _stacked(values, lengths, offset_per_key, max_lengths_per_key, padding_value, dim=1)


def stacked_jagged_2d_to_dense(
    values: Tensor, lengths: Tensor, offset_per_key: list[int], max_lengths_per_key: list[int], padding_value: int = 0
) -> list[Tensor]:
    """`stacked_jagged_1d_to_dense` for values [N, D]: T tensors [B, L_t, D]."""
    return _stacked(values, lengths, offset_per_key, max_lengths_per_key, padding_value, dim=2)


def _stacked(
    values: Tensor, lengths: Tensor, starts: list[int], room: list[int], padding_value: int, *, dim: int
) -> list[Tensor]:
    if values.dim() != dim or lengths.dim() != 2:
        raise ValueError(
            f"values must have {dim} and lengths two dimensions, got {tuple(values.shape)} and {tuple(lengths.shape)}"
        )
    if len(starts) != lengths.size(0) + 1 or len(room) != lengths.size(0):
        raise ValueError(
            f"offset_per_key and max_lengths_per_key must have {lengths.size(0)} + 1 and {lengths.size(0)} numbers,"
            f" got {len(starts)} and {len(room)}"
        )
    return [
        ToPadded.apply(values[begin:end], [longest], padding_value, complete_offsets(row))
        for begin, end, longest, row in zip(starts[:-1], starts[1:], room, lengths, strict=True)
    ]


def jagged_dense_elementwise_add(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> Tensor:
    """Jagged x plus padded y as a padded tensor: [B, L_1, ..., L_k, D], and y itself where x has no value."""
    _check_dense(x_values, x_offsets, y)
    padded: Tensor = ToPadded.apply(x_values, y.shape[1:-1], 0.0, *x_offsets)
    return padded + y


def jagged_dense_elementwise_add_jagged_output(
    x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Jagged x [T, D] plus padded y [B, L_1, ..., L_k, D] at x's values: (sums [T, D], offsets)."""
    _check_dense(x_values, x_offsets, y)
    return x_values + to_jagged(y, x_offsets, x_values.size(0)), list(x_offsets)


def jagged_dense_dense_elementwise_add_jagged_output_forward(
    x_values: Tensor, x_offsets: Sequence[Tensor], y_0: Tensor, y_1: Tensor
) -> Tensor:
    """Jagged x [T, D] plus two padded tensors at x's values: [T, D]."""
    _check_dense(x_values, x_offsets, y_0)
    _check_dense(x_values, x_offsets, y_1)
    total = x_values.size(0)
    return x_values + to_jagged(y_0, x_offsets, total) + to_jagged(y_1, x_offsets, total)


def jagged_dense_dense_elementwise_add_jagged_output(
    x_values: Tensor, x_offsets: Sequence[Tensor], y_0: Tensor, y_1: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """As its `_forward`, with the offsets."""
    return jagged_dense_dense_elementwise_add_jagged_output_forward(x_values, x_offsets, y_0, y_1), list(x_offsets)


def jagged_dense_elementwise_mul_forward(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> Tensor:
    """Jagged x [T, D] times padded y [B, L_1, ..., L_k, D] at x's values: [T, D]."""
    _check_dense(x_values, x_offsets, y)
    return x_values * to_jagged(y, x_offsets, x_values.size(0))


def jagged_dense_elementwise_mul(
    x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """As its `_forward`, with the offsets."""
    return jagged_dense_elementwise_mul_forward(x_values, x_offsets, y), list(x_offsets)


def jagged_dense_elementwise_mul_backward(
    grad_output: Tensor, x_offsets: Sequence[Tensor], y: Tensor, x_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients (of x [T, D], of y [B, L_1, ..., L_k, D]); zero for cut values and for cells without a value."""
    _check_dense(x_values, x_offsets, y)
    of_x = grad_output * to_jagged(y, x_offsets, x_values.size(0))
    return of_x, to_padded(grad_output * x_values, x_offsets, y.shape[1:-1], 0.0)


def _check_dense(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> None:
    if y.dim() != len(x_offsets) + 2:
        raise ValueError(f"y must have {len(x_offsets)} + 2 dimensions, got shape {tuple(y.shape)}")
    if x_values.dim() != 2 or x_values.size(1) != y.size(-1):
        raise ValueError(f"x_values must be [T, {y.size(-1)}] as y has columns, got shape {tuple(x_values.shape)}")
    for dimension, level in enumerate(x_offsets):
        check_offsets_shape(level, f"x_offsets[{dimension}]")
    check_rows(y, x_offsets, "y")
    check_count(x_values.size(0), "x_values")


_X = "Tensor x_values, Tensor[] x_offsets, "
_STACKED = "Tensor values, Tensor lengths, int[] offset_per_key, int[] max_lengths_per_key, int padding_value"
KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(
        schema="fbgemm::jagged_to_padded_dense_forward(Tensor values, Tensor[] offsets, SymInt[] max_lengths,"
        " float padding_value=0.) -> Tensor",
        function=jagged_to_padded_dense_forward,
    ),
    NpuKernel(
        schema="fbgemm::jagged_to_padded_dense_backward(Tensor grad_output, Tensor[] offsets, SymInt total_L)"
        " -> Tensor",
        function=jagged_to_padded_dense_backward,
    ),
    NpuKernel(
        schema="fbgemm::dense_to_jagged_forward(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) -> Tensor",
        function=dense_to_jagged_forward,
    ),
    NpuKernel(
        schema="fbgemm::jagged_2d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length) -> Tensor",
        function=jagged_2d_to_dense,
    ),
    NpuKernel(
        schema="fbgemm::jagged_1d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length,"
        " int padding_value) -> Tensor",
        function=jagged_1d_to_dense,
    ),
    *with_autograd(f"fbgemm::stacked_jagged_1d_to_dense({_STACKED}) -> Tensor[]", stacked_jagged_1d_to_dense),
    *with_autograd(f"fbgemm::stacked_jagged_2d_to_dense({_STACKED}=0) -> Tensor[]", stacked_jagged_2d_to_dense),
    *with_autograd(f"fbgemm::jagged_dense_elementwise_add({_X}Tensor y) -> Tensor", jagged_dense_elementwise_add),
    NpuKernel(
        schema=f"fbgemm::jagged_dense_elementwise_add_jagged_output({_X}Tensor y) -> (Tensor, Tensor[])",
        function=jagged_dense_elementwise_add_jagged_output,
    ),
    NpuKernel(
        schema=f"fbgemm::jagged_dense_dense_elementwise_add_jagged_output_forward({_X}Tensor y_0, Tensor y_1)"
        " -> Tensor",
        function=jagged_dense_dense_elementwise_add_jagged_output_forward,
    ),
    NpuKernel(
        schema=f"fbgemm::jagged_dense_dense_elementwise_add_jagged_output({_X}Tensor y_0, Tensor y_1)"
        " -> (Tensor, Tensor[])",
        function=jagged_dense_dense_elementwise_add_jagged_output,
    ),
    NpuKernel(
        schema=f"fbgemm::jagged_dense_elementwise_mul_forward({_X}Tensor y) -> Tensor",
        function=jagged_dense_elementwise_mul_forward,
    ),
    NpuKernel(
        schema=f"fbgemm::jagged_dense_elementwise_mul({_X}Tensor y) -> (Tensor, Tensor[])",
        function=jagged_dense_elementwise_mul,
    ),
    NpuKernel(
        schema="fbgemm::jagged_dense_elementwise_mul_backward(Tensor grad_output, Tensor[] x_offsets, Tensor y,"
        " Tensor x_values) -> (Tensor, Tensor)",
        function=jagged_dense_elementwise_mul_backward,
    ),
)
