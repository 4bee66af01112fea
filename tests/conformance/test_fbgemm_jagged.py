"""Inputs that jagged operators of fbgemm have failed on, with the results that are right.

Each test names the upstream issue (pytorch/FBGEMM). Where fbgemm's CPU kernel is still wrong, the CPU half holds ours,
and a test beside it says what fbgemm's does, so that it tells when upstream is mended.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.fbgemm_cases import normal, offsets_of
from turbogr_plugin.kernels.fbgemm_jagged import dense_to_jagged_forward
from turbogr_plugin.kernels.jagged_padding import cells_of_values, to_jagged, to_padded, values_of_cells

fbgemm = torch.ops.fbgemm
pytestmark = pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")


def test_item_2_values_without_rows_become_padding_and_get_an_empty_gradient(device: torch.device) -> None:
    # 1187
    values = torch.zeros(0, 3, device=device, requires_grad=True)
    padded = fbgemm.jagged_to_padded_dense(values, [torch.zeros(3, dtype=torch.int64, device=device)], [2], 1.5)
    assert padded.tolist() == [[[1.5] * 3] * 2] * 2
    (gradient,) = torch.autograd.grad(padded.sum(), values)
    assert gradient.shape == (0, 3)


@pytest.mark.parametrize(("rows", "columns"), [(0, 2), (0, 0), (3, 0)])
def test_item_3_no_rows_or_no_columns_are_legal(device: torch.device, rows: int, columns: int) -> None:
    # 998
    lengths = [2, 0, 1][:rows]
    offsets = [offsets_of(lengths).to(device)]
    x = torch.ones(sum(lengths), columns, device=device, requires_grad=True)
    y = torch.ones(rows, 4, columns, device=device, requires_grad=True)
    assert fbgemm.jagged_to_padded_dense(x, offsets, [4], 0.0).shape == (rows, 4, columns)
    assert fbgemm.jagged_2d_to_dense(x, offsets[0], 4).shape == (rows, 4, columns)
    assert fbgemm.jagged_dense_elementwise_add(x, offsets, y).shape == (rows, 4, columns)
    for operator in (fbgemm.jagged_dense_elementwise_add_jagged_output, fbgemm.jagged_dense_elementwise_mul):
        result, _ = operator(x, offsets, y)
        assert result.shape == x.shape
        assert [part.shape for part in torch.autograd.grad(result.sum(), [x, y])] == [x.shape, y.shape]
    assert fbgemm.dense_to_jagged(y, offsets, sum(lengths))[0].shape == x.shape
    assert fbgemm.dense_to_jagged(y, offsets)[0].shape == x.shape
    assert fbgemm.jagged_softmax(x, offsets[0], 4)[0].shape == x.shape
    assert fbgemm.jagged_jagged_bmm(x, x, offsets[0], 4).shape == (rows, columns, columns)
    matrices = torch.ones(rows, columns, 2, device=device)
    assert fbgemm.jagged_dense_bmm(x, offsets[0], matrices, 4)[0].shape == (sum(lengths), 2)


def test_item_4_one_dimensional_values_have_a_gradient(device: torch.device) -> None:
    # 1267
    values = torch.tensor([5.0, 3.0, 7.0, 1.0], device=device, requires_grad=True)
    padded = fbgemm.jagged_to_padded_dense(values, [torch.tensor([0, 1, 4], device=device)], [3], 0.0)
    assert padded.tolist() == [[5, 0, 0], [3, 7, 1]]
    (gradient,) = torch.autograd.grad(padded, values, torch.arange(6.0, device=device).view(2, 3))
    assert gradient.tolist() == [0, 3, 4, 5]


class TestItem5RowsLongerThanTheirRoom:
    """1013: rows of 3, 0 and 1 values with room for 2."""

    @staticmethod
    def inputs(device: torch.device) -> tuple[Tensor, list[Tensor], Tensor]:
        values = torch.tensor([[1.0], [2.0], [3.0], [4.0]], device=device, requires_grad=True)
        dense = torch.tensor([[[10.0], [20.0]], [[30.0], [40.0]], [[50.0], [60.0]]], device=device, requires_grad=True)
        return values, [torch.tensor([0, 3, 3, 4], device=device)], dense

    def test_padding_cuts_the_tail_and_its_gradient_is_zero(self, device: torch.device) -> None:
        values, offsets, _ = self.inputs(device)
        padded = fbgemm.jagged_to_padded_dense(values, offsets, [2], -1.0)
        assert padded.squeeze(2).tolist() == [[1, 2], [-1, -1], [4, -1]]
        assert torch.autograd.grad(padded.sum(), values)[0].flatten().tolist() == [1, 1, 0, 1]

    def test_a_sum_passes_the_tail_through(self, device: torch.device) -> None:
        values, offsets, dense = self.inputs(device)
        for operator, denses in (
            (fbgemm.jagged_dense_elementwise_add_jagged_output, (dense,)),
            (fbgemm.jagged_dense_dense_elementwise_add_jagged_output, (dense, torch.zeros_like(dense))),
        ):
            result, _ = operator(values, offsets, *denses)
            assert result.flatten().tolist() == [11, 22, 3, 54]
            of_values, of_dense = torch.autograd.grad(result.sum(), [values, dense])
            assert of_values.flatten().tolist() == [1, 1, 1, 1]
            assert of_dense.squeeze(2).tolist() == [[1, 1], [0, 0], [1, 0]]

    def test_a_product_makes_the_tail_zero(self, device: torch.device) -> None:
        values, offsets, dense = self.inputs(device)
        result, _ = fbgemm.jagged_dense_elementwise_mul(values, offsets, dense)
        assert result.flatten().tolist() == [10, 40, 0, 200]
        of_values, of_dense = torch.autograd.grad(result.sum(), [values, dense])
        assert of_values.flatten().tolist() == [10, 20, 0, 50]
        assert of_dense.squeeze(2).tolist() == [[1, 2], [0, 0], [4, 0]]

    def test_a_padded_tensor_gives_the_tail_zeros(self, device: torch.device) -> None:
        _, offsets, dense = self.inputs(device)
        for total in (4, None):
            result, _ = fbgemm.dense_to_jagged(dense, offsets, total)
            assert result.flatten().tolist() == [10, 20, 0, 50]
            assert torch.autograd.grad(result.sum(), dense)[0].squeeze(2).tolist() == [[1, 1], [0, 0], [1, 0]]


class TestItem6PaddedTensorsOfMoreThan2To31Elements:
    """5755. A padded result of that size takes 2 GB even in bytes: the first test makes one, on one device for that
    reason; the others hold the indices it is made with. The other direction reads such a tensor: 2^33 elements that
    overlap in 17 MB of memory."""

    @pytest.mark.full
    def test_rows_behind_2_to_31_are_padded_where_they_belong(self) -> None:
        rows, columns = (1 << 11) + 1, 1 << 20
        assert (rows - 1) * columns > (1 << 31) - 1
        values = torch.tensor([[7], [9]], dtype=torch.uint8).expand(2, columns)
        lengths = [1, *[0] * (rows - 2), 1]
        padded = to_padded(values, [offsets_of(lengths)], [1], 5)
        assert [padded[row, 0, column].item() for row in (0, 1, -2, -1) for column in (0, -1)] == [7, 7, *[5] * 4, 9, 9]

    def test_cells_show_values_behind_2_to_31(self, device: torch.device) -> None:
        behind = (1 << 31) + 5
        offsets = torch.tensor([0, behind, behind + 3], device=device)
        index, present = values_of_cells([offsets], [4])
        assert index[:, :3].tolist() == [[0, 1, 2], [behind, behind + 1, behind + 2]]
        assert present.tolist() == [[True] * 4, [True, True, True, False]]

    def test_values_are_read_from_cells_behind_2_to_31(self) -> None:
        rows, room, columns = 1 << 12, 1 << 10, 1 << 11
        memory = torch.arange(rows * room + columns, dtype=torch.int32)
        dense = memory.as_strided((rows, room, columns), (room, 1, 1))  # dense[b, l, d] is b * room + l + d
        assert (rows - 1) * room * columns > (1 << 31) - 1
        lengths = torch.zeros(rows, dtype=torch.int64)
        lengths[0], lengths[-1] = 2, 3
        offsets = offsets_of(lengths.tolist())
        first = torch.tensor([0, 1, (rows - 1) * room, (rows - 1) * room + 1, (rows - 1) * room + 2])
        expected = first.unsqueeze(1) + torch.arange(columns)
        assert torch.equal(dense_to_jagged_forward(dense, [offsets], 5).long(), expected)

    def test_cells_behind_2_to_31_are_numbered_right(self, device: torch.device) -> None:
        rows, room = 3, (1 << 31) - 1
        offsets = torch.tensor([0, 1, 1, 3], device=device, dtype=torch.int32)
        cell, present = cells_of_values([offsets], [room], 3)
        assert cell.tolist() == [0, (rows - 1) * room, (rows - 1) * room + 1]
        assert present.tolist() == [True] * 3


class TestItem7ATotalThatIsCorrupted:
    """5891."""

    @pytest.mark.parametrize("total", [-1, -(1 << 40)])
    def test_a_negative_total_is_refused(self, device: torch.device, total: int) -> None:
        dense, offsets = torch.ones(2, 3, 1, device=device), [torch.tensor([0, 1, 4], device=device)]
        with pytest.raises(ValueError, match=f"total_L.*{total}"):
            fbgemm.dense_to_jagged(dense, offsets, total)

    def test_a_total_that_no_tensor_can_have_is_refused_with_its_number(self, device: torch.device) -> None:
        # fbgemm on CPU raises RuntimeError "Storage size calculation overflowed", so that its half holds ours.
        dense, offsets = torch.ones(2, 3, 4, device=device), [torch.tensor([0, 1, 4], device=device)]
        operator = dense_to_jagged_forward if device.type == "cpu" else fbgemm.dense_to_jagged
        with pytest.raises(ValueError, match=f"total_L = {1 << 60} values of 4 columns"):
            operator(dense, offsets, 1 << 60)

    def test_a_total_beside_the_offsets_cuts_values_or_adds_zeros(self, device: torch.device) -> None:
        # fbgemm's CPU kernel writes behind its result when the total is too small, so that its half holds ours.
        dense, offsets = torch.ones(2, 3, 1, device=device), [torch.tensor([0, 1, 4], device=device)]
        forward = dense_to_jagged_forward if device.type == "cpu" else fbgemm.dense_to_jagged_forward
        assert forward(dense, offsets, 3).flatten().tolist() == [1, 1, 1]
        assert forward(dense, offsets, 6).flatten().tolist() == [1, 1, 1, 1, 0, 0]

    @pytest.mark.full
    def test_totals_whose_elements_pass_2_to_31_are_written_where_they_belong(self) -> None:
        # A result of 2^31 + 2^20 bytes, the least there is: 2 GB and some seconds, on one device for that reason.
        columns = (1 << 30) + (1 << 19)
        dense = torch.tensor([7, 9], dtype=torch.uint8).as_strided((1, 2, columns), (2, 1, 0))
        result = to_jagged(dense, [torch.tensor([0, 2])], 2)
        assert [int(result[row, column]) for row, column in itertools.product((0, 1), (0, -1))] == [7, 7, 9, 9]


def test_item_12_every_input_of_a_sum_gets_the_gradient_of_the_output(device: torch.device) -> None:
    # 2327: registered without autograd under one key; 1005: a gradient that was not multiplied by the output's
    offsets = [torch.tensor([0, 1, 4], device=device)]
    values, dense = (normal(*shape).to(device).requires_grad_() for shape in ((4, 2), (2, 2, 2)))
    for result in (
        fbgemm.jagged_dense_elementwise_add_jagged_output(values, offsets, dense)[0],
        fbgemm.jagged_dense_dense_elementwise_add_jagged_output(values, offsets, dense, dense.detach())[0],
    ):
        given = torch.full_like(result, 3.0)
        of_values, of_dense = torch.autograd.grad(result, [values, dense], given)
        assert of_values.tolist() == [[3, 3]] * 4
        assert of_dense.tolist() == [[[3, 3], [0, 0]], [[3, 3], [3, 3]]]
    result = fbgemm.jagged_dense_elementwise_add(values, offsets, dense)
    of_values, of_dense = torch.autograd.grad(result, [values, dense], torch.full_like(result, 3.0))
    assert of_values.tolist() == [[3, 3], [3, 3], [3, 3], [0, 0]]
    assert of_dense.tolist() == [[[3, 3]] * 2] * 2
