"""Inputs that fbgemm's permutations, bucketization and prefix sums have failed on, with the results that are right.

Each test names the upstream issue (pytorch/FBGEMM). Where fbgemm's CPU kernel is still wrong, the CPU half holds ours,
and a test beside it says what fbgemm's does, so that it tells when upstream is mended.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turbogr_plugin.kernels import fbgemm_permute
from turbogr_plugin.kernels.segments import complete_offsets, copied_from

fbgemm = torch.ops.fbgemm


def permutation(name: str, device: torch.device) -> Any:
    """Ours on CPU, the operator (also ours) on npu: for inputs that fbgemm's CPU kernel gets wrong."""
    return getattr(fbgemm_permute if device.type == "cpu" else fbgemm, name)


@pytest.mark.parametrize("bags", [0, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_item_1_no_ids_go_into_empty_buckets(device: torch.device, bags: int, dtype: torch.dtype) -> None:
    # 3750
    lengths, ids = torch.zeros(bags, dtype=dtype, device=device), torch.zeros(0, dtype=dtype, device=device)
    sizes = torch.tensor([5, 5], dtype=dtype, device=device)
    results = fbgemm.block_bucketize_sparse_features(lengths, ids, True, True, sizes, 3, torch.zeros(0, device=device))
    assert [result.tolist() for result in results] == [[0] * (3 * bags), [], [], [], []]
    assert [result.dtype for result in results] == [dtype, dtype, torch.float32, dtype, dtype]


class TestItem8PermutationsOfManyRuns:
    def test_more_than_2_to_31_lengths_are_permuted_right(self, device: torch.device) -> None:
        # 6081. 2^31 lengths take 16 GB: here they overlap in memory, one number per feature. fbgemm's CPU kernel copies
        # its input first, so that its half holds ours. permute_1D_sparse_data sums the lengths, which cannot overlap;
        # it shares the copy of the values (`copied_from`), whose sources behind 2^31 item 14 holds.
        features, batch = (1 << 16) + 1, 1 << 15
        of_feature = torch.zeros(features, dtype=torch.int64, device=device)
        of_feature[-1] = 1
        lengths = of_feature.as_strided((features, batch), (1, 0))
        assert lengths.numel() > (1 << 31) - 1
        values = torch.arange(batch, device=device)
        permute = torch.tensor([features - 1, 0], dtype=torch.int32, device=device)
        operator = permutation("permute_2D_sparse_data", device)
        permuted_lengths, permuted, _ = operator(permute, lengths, values, None, batch)
        assert permuted_lengths.sum(1).tolist() == [batch, 0]
        assert torch.equal(permuted, values)

    @pytest.mark.parametrize("name", ["permute_1D_sparse_data", "permute_2D_sparse_data"])
    def test_an_int64_permutation_is_taken(self, device: torch.device, name: str) -> None:
        # 6029
        lengths = torch.tensor([1, 2], device=device)
        lengths = lengths if "1D" in name else lengths.unsqueeze(1)
        operator = permutation(name, device)
        permuted_lengths, permuted, _ = operator(
            torch.tensor([1, 0], device=device), lengths, lengths.new_tensor([5, 6, 7])
        )
        assert permuted_lengths.flatten().tolist() == [2, 1]
        assert permuted.tolist() == [6, 7, 5]

    def test_fbgemm_on_cpu_refuses_an_int64_permutation(self) -> None:
        with pytest.raises(RuntimeError, match="expected scalar type Int but found Long"):
            fbgemm.permute_1D_sparse_data(torch.tensor([1, 0]), torch.tensor([1, 2]), torch.tensor([5, 6, 7]))


class TestItem9AStridedPermutation:
    """4593: lengths 1, 2 and 3 in the order 2, 0, 1."""

    def test_it_is_read_with_its_strides(self, device: torch.device) -> None:
        permute = torch.tensor([2, 9, 0, 9, 1, 9], dtype=torch.int32, device=device)[::2]
        lengths = torch.tensor([[1], [2], [3]], device=device)
        operator = permutation("permute_2D_sparse_data", device)
        permuted_lengths, permuted, _ = operator(permute, lengths, torch.arange(6, device=device))
        assert permuted_lengths.flatten().tolist() == [3, 1, 2]
        assert permuted.tolist() == [3, 4, 5, 0, 1, 2]

    def test_fbgemm_on_cpu_reads_it_without_them(self) -> None:
        permute = torch.tensor([2, 0, 0, 0, 1, 0], dtype=torch.int32)[::2]
        lengths, _, _ = fbgemm.permute_2D_sparse_data(permute, torch.tensor([[1], [2], [3]]), torch.arange(6))
        assert lengths.flatten().tolist() == [3, 1, 1]


class TestItem14SumsPast2To31:
    """5994."""

    def test_int32_lengths_are_summed_in_int64(self, device: torch.device) -> None:
        lengths = torch.tensor([(1 << 31) - 1, 5, 7], dtype=torch.int32, device=device)
        offsets = complete_offsets(lengths)
        assert offsets.tolist() == [0, (1 << 31) - 1, (1 << 31) + 4, (1 << 31) + 11]
        # The runs 2 and 1 in this order: the source of each value, since 2^31 values do not fit in memory.
        order = torch.tensor([2, 1], device=device)
        source = copied_from(offsets[:-1][order], lengths[order], 12)
        first, second = (1 << 31) + 4, (1 << 31) - 1
        assert source.tolist() == [*range(first, first + 7), *range(second, second + 5)]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
    def test_complete_sums_keep_the_dtype_floats_included(self, device: torch.device, dtype: torch.dtype) -> None:
        # 2383
        sums = fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 0, 3], dtype=dtype, device=device))
        assert sums.dtype == dtype
        assert sums.tolist() == [0, 2, 2, 5]

    def test_complete_sums_of_two_dimensions_are_summed_by_row(self, device: torch.device) -> None:
        # 1707
        sums = fbgemm.asynchronous_complete_cumsum(torch.tensor([[2, 0], [3, 4]], device=device))
        assert sums.tolist() == [[0, 2, 2], [0, 3, 7]]
