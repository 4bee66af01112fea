"""fbgemm's products and softmax over jagged rows, for `npu`.

fbgemm's own autograd (key Autograd) calls the `_forward` and `_backward` operators and stays. A row counts up to
`max_L` values; behind that, results are zeros (fbgemm's CPU softmax leaves them uninitialised).

Each operator pads its rows to `max_L` and works on the padded tensor: batched matrix products are what the chips are
fast at. Memory is therefore B * max_L * D, whatever the rows hold.

Letters: T values, B rows, L = max_L, H heads, D, K, M, N columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.jagged_padding import to_jagged, to_padded
from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.segments import check_count, check_offsets_shape


def jagged_softmax_forward(values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """Softmax of values [T, D] over each row, column by column: [T, D].

    Raises:
        ValueError: for other shapes, or a negative `max_L`.
    """
    _check(max_L, x_offsets, values=values)
    padded = to_padded(values, [x_offsets], [max_L], float("-inf"))
    return to_jagged(torch.softmax(padded, 1), [x_offsets], values.size(0))


def jagged_softmax_backward(grad_output: Tensor, output: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """The gradient (g - sum(g * output)) * output of the values [T, D], the sum over each row."""
    _check(max_L, x_offsets, grad_output=grad_output, output=output)
    product = to_padded(grad_output * output, [x_offsets], [max_L], 0.0)
    sums = product.sum(1, keepdim=True).expand(-1, max_L, -1)
    # `output` is zero behind max_L, and so is the gradient there
    return (grad_output - to_jagged(sums, [x_offsets], grad_output.size(0))) * output


def jagged_softmax(values: Tensor, x_offsets: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    """As its `_forward`, with the offsets."""
    return jagged_softmax_forward(values, x_offsets, max_L), x_offsets


def jagged_dense_bmm_forward(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> Tensor:
    """Each row of jagged x [T, K] times its matrix of y [B, K, N]: [T, N].

    Raises:
        ValueError: for other shapes, or a negative `max_L`.
    """
    _check(max_L, x_offsets, x_values=x_values)
    rows = x_offsets.numel() - 1
    if y.dim() != 3 or y.size(0) != rows or y.size(1) != x_values.size(1):
        raise ValueError(f"y must be [{rows}, {x_values.size(1)}, N], got shape {tuple(y.shape)}")
    return to_jagged(torch.bmm(to_padded(x_values, [x_offsets], [max_L], 0.0), y), [x_offsets], x_values.size(0))


def jagged_dense_bmm(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    """As its `_forward`, with the offsets."""
    return jagged_dense_bmm_forward(x_values, x_offsets, y, max_L), x_offsets


def jagged_jagged_bmm_forward(x_values: Tensor, y_values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """The transpose of each row of jagged x [T, M] times the same row of jagged y [T, N]: [B, M, N].

    Raises:
        ValueError: for other shapes, or a negative `max_L`.
    """
    _check(max_L, x_offsets, x_values=x_values, y_values=y_values)
    x = to_padded(x_values, [x_offsets], [max_L], 0.0)
    return torch.bmm(x.transpose(1, 2), to_padded(y_values, [x_offsets], [max_L], 0.0))


def batched_dense_vec_jagged_2d_mul_forward(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> Tensor:
    """A vector per row and head times the row's matrix: output[b H + h] = sum_l v[b H + h, l] a[b, l, h].

    Args:
        v: [B H, L].
        a_values: [T, H D].
        a_offsets: [B + 1].

    Returns:
        [B H, D].

    Raises:
        ValueError: for shapes that contradict each other.
    """
    heads, columns = _heads(v, a_values, a_offsets)
    matrices = _matrices(a_values, a_offsets, v.size(1), heads, columns)
    return torch.bmm(v.unsqueeze(1), matrices).squeeze(1)


def batched_dense_vec_jagged_2d_mul_backward(
    grad_output: Tensor, v: Tensor, a_values: Tensor, a_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients (of v [B H, L], of a [T, H D]) for the gradient [B H, D] of the output."""
    heads, columns = _heads(v, a_values, a_offsets)
    rows, room = a_offsets.numel() - 1, v.size(1)
    matrices = _matrices(a_values, a_offsets, room, heads, columns)
    of_v = torch.bmm(matrices, grad_output.unsqueeze(2)).squeeze(2)
    outer = torch.bmm(v.unsqueeze(2), grad_output.unsqueeze(1)).view(rows, heads, room, columns)
    of_a = to_jagged(outer.transpose(1, 2).reshape(rows, room, heads * columns), [a_offsets], a_values.size(0))
    return of_v, of_a


def _heads(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> tuple[int, int]:
    """The numbers (H, D) that the shapes tell."""
    check_offsets_shape(a_offsets, "a_offsets")
    if v.dim() != 2 or a_values.dim() != 2:
        raise ValueError(f"v and a_values must be matrices, got shapes {tuple(v.shape)} and {tuple(a_values.shape)}")
    rows = a_offsets.numel() - 1
    heads = v.size(0) // rows if rows else 1
    if heads * rows != v.size(0) or (heads and a_values.size(1) % heads):
        raise ValueError(
            f"v must be [B H, L] and a_values [T, H D] with B = {rows} by a_offsets,"
            f" got shapes {tuple(v.shape)} and {tuple(a_values.shape)}"
        )
    return heads, a_values.size(1) // heads if heads else 0


def _matrices(a_values: Tensor, a_offsets: Tensor, room: int, heads: int, columns: int) -> Tensor:
    """Jagged a [T, H D] padded: [B H, L, D]."""
    rows = a_offsets.numel() - 1
    padded = to_padded(a_values, [a_offsets], [room], 0.0).view(rows, room, heads, columns)
    return padded.transpose(1, 2).reshape(rows * heads, room, columns)


def _check(max_L: int, offsets: Tensor, **values: Tensor) -> None:
    check_count(max_L, "max_L")
    check_offsets_shape(offsets, "x_offsets")
    total: int | None = None
    for name, value in values.items():
        if value.dim() != 2 or (total is not None and value.size(0) != total):
            raise ValueError(f"{name} must be [{'T' if total is None else total}, D], got shape {tuple(value.shape)}")
        total = value.size(0)


_V = "Tensor v, Tensor a_values, Tensor a_offsets) -> "
_XY = "Tensor x_values, Tensor y_values, Tensor x_offsets, int max_L) -> Tensor"
_X_Y = "Tensor x_values, Tensor x_offsets, Tensor y, int max_L) -> "

KERNELS: tuple[NpuKernel, ...] = (
    NpuKernel(
        schema="fbgemm::jagged_softmax_forward(Tensor values, Tensor x_offsets, int max_L) -> Tensor",
        function=jagged_softmax_forward,
    ),
    NpuKernel(
        schema="fbgemm::jagged_softmax_backward(Tensor grad_output, Tensor output, Tensor x_offsets, int max_L)"
        " -> Tensor",
        function=jagged_softmax_backward,
    ),
    NpuKernel(
        schema="fbgemm::jagged_softmax(Tensor values, Tensor x_offsets, int max_L) -> (Tensor, Tensor)",
        function=jagged_softmax,
    ),
    NpuKernel(schema=f"fbgemm::jagged_dense_bmm_forward({_X_Y}Tensor", function=jagged_dense_bmm_forward),
    NpuKernel(schema=f"fbgemm::jagged_dense_bmm({_X_Y}(Tensor, Tensor)", function=jagged_dense_bmm),
    NpuKernel(schema=f"fbgemm::jagged_jagged_bmm_forward({_XY}", function=jagged_jagged_bmm_forward),
    NpuKernel(schema=f"fbgemm::jagged_jagged_bmm({_XY}", function=jagged_jagged_bmm_forward),
    NpuKernel(
        schema=f"fbgemm::batched_dense_vec_jagged_2d_mul_forward({_V}Tensor",
        function=batched_dense_vec_jagged_2d_mul_forward,
    ),
    NpuKernel(
        schema=f"fbgemm::batched_dense_vec_jagged_2d_mul({_V}Tensor",
        function=batched_dense_vec_jagged_2d_mul_forward,
    ),
    NpuKernel(
        schema=f"fbgemm::batched_dense_vec_jagged_2d_mul_backward(Tensor grad_output, {_V}(Tensor, Tensor)",
        function=batched_dense_vec_jagged_2d_mul_backward,
    ),
)
