"""Inputs that fbgemm's selections and its deduplication have failed on, with the results that are right.

Each test names the upstream issue (pytorch/FBGEMM). fbgemm has no CPU kernel for keyed_jagged_index_select_dim1 and
jagged_unique_indices; the CPU half of their tests holds ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turbogr_plugin.kernels.fbgemm_dedup import jagged_unique_indices
from turbogr_plugin.kernels.fbgemm_jagged_select import keyed_jagged_index_select_dim1

fbgemm = torch.ops.fbgemm


class TestItem10SelectedRows:
    def test_strided_inputs_are_read_with_their_strides(self, device: torch.device) -> None:
        # 2060
        values = torch.arange(24.0, device=device).view(4, 6)[:, ::2]
        lengths = torch.tensor([1, 9, 3, 9], device=device)[::2]
        indices = torch.tensor([1, 7, 0, 7], device=device)[::2]
        selected, selected_lengths = fbgemm.jagged_index_select(values, lengths, indices)
        assert selected.tolist() == [[6, 8, 10], [12, 14, 16], [18, 20, 22], [0, 2, 4]]
        assert selected_lengths.tolist() == [3, 1]

    def test_offsets_that_overflowed_are_refused(self, device: torch.device) -> None:
        # 5880
        values, ends = torch.ones(4, 2, device=device), torch.tensor([1, 4], device=device)
        index, selected_ends = torch.tensor([1], device=device), torch.tensor([-3], device=device)
        with pytest.raises(ValueError, match=r"num_dense_output_rows.*-3"):
            fbgemm.jagged_index_select_2d_forward_v2(values, index, ends, selected_ends)

    def test_rows_behind_2_to_31_are_read_where_they_are(self, device: torch.device) -> None:
        # 2^31 + 3 rows that overlap in memory.
        rows = (1 << 31) + 3
        values = torch.zeros(1, 1, device=device).expand(rows, 1)
        ends = torch.tensor([rows - 2, rows], device=device)
        index, selected_ends = torch.tensor([1], device=device), torch.tensor([2], device=device)
        result = fbgemm.jagged_index_select_2d_forward(values, index, ends, selected_ends, 2)
        assert result.tolist() == [[0], [0]]


class TestItem10And11KeyedSelection:
    @staticmethod
    def operator(device: torch.device) -> Any:
        return keyed_jagged_index_select_dim1 if device.type == "cpu" else fbgemm.keyed_jagged_index_select_dim1

    def test_samples_of_every_feature_are_taken_with_weights_and_gradients(self, device: torch.device) -> None:
        values = torch.arange(7.0, device=device, requires_grad=True)
        lengths = torch.tensor([1, 2, 0, 0, 3, 1], device=device)
        offsets, indices = fbgemm.asynchronous_complete_cumsum(lengths), torch.tensor([1, 1, 0], device=device)
        for size in (11, None):
            taken, taken_lengths, weights = self.operator(device)(
                values, lengths, offsets, indices, 3, values.detach() + 10, size
            )
            assert taken.tolist() == [1, 2, 1, 2, 0, 3, 4, 5, 3, 4, 5]
            assert taken_lengths.tolist() == [2, 2, 1, 3, 3, 0]
            assert weights.tolist() == (taken + 10).tolist()
        (gradient,) = torch.autograd.grad(taken.sum(), values)
        assert gradient.tolist() == [1, 2, 2, 2, 2, 2, 0]

    def test_no_samples_give_nothing(self, device: torch.device) -> None:
        # 1554
        none = torch.zeros(0, dtype=torch.int64, device=device)
        lengths = torch.tensor([1, 2], device=device)
        offsets = fbgemm.asynchronous_complete_cumsum(lengths)
        for size in (0, None):
            results = self.operator(device)(torch.ones(3, device=device), lengths, offsets, none, 1, None, size)
            assert [result.shape for result in results] == [(0,), (0,)]

    def test_lengths_behind_2_to_31_are_read_where_they_are(self, device: torch.device) -> None:
        # 5544: features * samples past 2^31. As many results take 16 GB; here as many inputs, which overlap in memory.
        features, batch = 2, (1 << 30) + 1
        lengths = torch.ones(1, dtype=torch.int64, device=device).expand(features * batch)
        offsets = torch.zeros(1, dtype=torch.int64, device=device).expand(features * batch + 1)
        last = torch.tensor([batch - 1], device=device)
        values = torch.tensor([5.0], device=device)
        taken, taken_lengths = self.operator(device)(values, lengths, offsets, last, batch, None, 2)
        assert (taken.tolist(), taken_lengths.tolist()) == ([5, 5], [1, 1])


class TestItem13IdsOutsideTheirTable:
    """5799: what is sent to other ranks must add up, whatever the ids."""

    @staticmethod
    def operator(device: torch.device) -> Any:
        return jagged_unique_indices if device.type == "cpu" else fbgemm.jagged_unique_indices

    @pytest.mark.parametrize("outside", [0, 1])
    def test_lengths_add_up_to_the_unique_ids(self, device: torch.device, outside: int) -> None:
        cumsum, tables = torch.tensor([0, 4, 8], device=device), torch.tensor([0, 1, 2], device=device)
        ids = torch.tensor([3, 1, 3, 2, 2, 0], device=device)
        ids[2 + 3 * outside] = 99  # beyond the table of 4 rows: of the first feature, then of the last
        offsets = torch.tensor([0, 2, 3, 5, 6], device=device)
        lengths, ends, unique, reverse = self.operator(device)(cumsum, tables, offsets, ids)
        expected = [[1, 3, 99], [0, 2]] if outside == 0 else [[1, 3], [2, 99]]
        assert unique.tolist() == [*expected[0], *expected[1]]
        assert lengths.view(2, 2).sum(1).tolist() == [len(part) for part in expected]
        assert ends.tolist() == [0, *lengths.cumsum(0).tolist()]
        assert torch.equal(unique[reverse], ids)
