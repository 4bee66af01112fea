"""Our kernels where fbgemm's CPU kernels cannot be the measure: wrong, undefined or missing there; and bad input."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.fbgemm_cases import integers, normal, offsets_of
from turbogr_plugin.kernels.fbgemm_bucketize import (
    block_bucketize_sparse_features,
    block_bucketize_sparse_features_2d_weights,
)
from turbogr_plugin.kernels.fbgemm_cumsum import (
    asynchronous_complete_cumsum,
    asynchronous_inclusive_cumsum,
    lengths_range,
    offsets_range,
    segment_sum_csr,
)
from turbogr_plugin.kernels.fbgemm_dedup import jagged_unique_indices
from turbogr_plugin.kernels.fbgemm_index_select import batch_index_select_dim0, group_index_select_dim0
from turbogr_plugin.kernels.fbgemm_jagged import (
    dense_to_jagged_forward,
    jagged_1d_to_dense,
    jagged_dense_elementwise_add_jagged_output,
    jagged_to_padded_dense_forward,
    stacked_jagged_1d_to_dense,
)
from turbogr_plugin.kernels.fbgemm_jagged_products import (
    batched_dense_vec_jagged_2d_mul_forward,
    jagged_dense_bmm_forward,
    jagged_softmax_forward,
)
from turbogr_plugin.kernels.fbgemm_jagged_select import (
    jagged_index_add_2d_forward,
    jagged_index_select_2d_forward,
    jagged_index_select_2d_forward_v2,
    jagged_slice_forward,
    keyed_jagged_index_select_dim1,
)
from turbogr_plugin.kernels.fbgemm_permute import (
    expand_into_jagged_permute,
    invert_permute,
    permute_1D_sparse_data,
    permute_2D_sparse_data,
    permute_2D_sparse_data_input1D,
)
from turbogr_plugin.kernels.fbgemm_placement import merge_pooled_embeddings, sum_reduce_to_one
from turbogr_plugin.kernels.fbgemm_pooled import (
    kt_regroup_arguments,
    permute_multi_embedding_function,
    permute_pooled_embs,
    regroup_keyed_tensor,
)
from turbogr_plugin.kernels.fbgemm_reorder import reorder_batched_ad_indices, reorder_batched_ad_lengths

HERE = torch.device("cpu")
I64 = torch.int64


def longs(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=I64)


def test_softmax_gives_zeros_behind_the_longest_length() -> None:
    # fbgemm leaves them uninitialised
    result = jagged_softmax_forward(torch.zeros(3, 1), longs(0, 3), 2)
    assert result.flatten().tolist() == [0.5, 0.5, 0]


def test_stacked_features_get_gradients_by_their_own_offsets() -> None:
    # fbgemm's CPU kernel reuses one tensor of offsets, so that its backward sees those of the last feature
    values = torch.arange(7.0, requires_grad=True)
    parts = stacked_jagged_1d_to_dense(values, torch.tensor([[2, 0, 1], [0, 3, 1]]), [0, 3, 7], [1, 3], 9)
    assert [part.tolist() for part in parts] == [[[0], [9], [2]], [[9, 9, 9], [3, 4, 5], [6, 9, 9]]]
    (gradient,) = torch.autograd.grad([part.sum() for part in parts], values)
    assert gradient.tolist() == [1, 0, 1, 1, 1, 1, 1]


def test_a_feature_that_is_left_out_gets_a_zero_gradient() -> None:
    # uninitialised in fbgemm
    arguments = kt_regroup_arguments(normal(1), [["a", "b", "c"]], [[2, 1, 2]], [["c", "a", "c"]])
    gradient = torch.arange(12.0).view(2, 6)
    (result,) = permute_multi_embedding_function([gradient], arguments[0], arguments[2], arguments[1], [5], True)
    assert result.tolist() == [[2, 3, 0, 4, 6], [8, 9, 0, 16, 18]]


def test_columns_that_no_move_brings_are_zero_and_moves_may_come_in_any_order() -> None:
    moves = torch.tensor([[0, 1, 2, 1, 1, 0], [0, 0, 0, 0, 2, 0], [0, 1, 0, 0, 0, 0]], dtype=torch.int32)
    rows = torch.tensor([[1.0, 2.0, 3.0]])
    shapes = torch.tensor([3], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    first, second = permute_multi_embedding_function([rows], moves, *shapes, [2, 3])
    assert (first.tolist(), second.tolist()) == ([[1, 2]], [[0, 3, 0]])


def test_merged_embeddings_have_gradients() -> None:
    # fbgemm's CPU kernel raises
    parts = [normal(2, 3).requires_grad_(), normal(2, 1, seed=1).requires_grad_()]
    gradients = torch.autograd.grad(merge_pooled_embeddings(parts, 2, HERE)[:, 2:].sum(), parts)
    assert [gradient.tolist() for gradient in gradients] == [[[0, 0, 1]] * 2, [[1]] * 2]


def test_a_negative_number_of_values_is_not_taken_for_a_size() -> None:
    with pytest.raises(ValueError, match="total_L must not be negative, got -4"):
        dense_to_jagged_forward(torch.ones(1, 2, 1), [longs(-9, -4)])


@pytest.mark.parametrize("seed", range(4))
def test_unique_ids_equal_those_of_python_sets(seed: int) -> None:
    features_of_table, batch = [[1], [2, 1], [1, 3, 1], [2]][seed], 3
    features = sum(features_of_table)
    lengths = integers(4, features * batch, seed=seed)
    ids = integers(6, int(lengths.sum()), seed=seed)
    tables = [0, *torch.tensor(features_of_table).cumsum(0).tolist()]
    offsets = offsets_of(lengths.tolist())
    # as EmbeddingCollection gives them: a table's size at its last feature, its features at its first
    cumsum, table_offsets = [0], [0]
    for size in features_of_table:
        cumsum += [cumsum[-1]] * (size - 1) + [cumsum[-1] + 6]
        table_offsets += [table_offsets[-1] + size] * size
    out, ends, unique, reverse = jagged_unique_indices(longs(*cumsum), longs(*table_offsets), offsets, ids)
    expected: list[int] = []
    for begin, end in pairwise(tables):
        here = sorted(set(ids[offsets[begin * batch] : offsets[end * batch]].tolist()))
        expected += here
        shares = out[begin * batch : end * batch]
        assert int(shares.sum()) == len(here)
        assert shares.tolist() == sorted(shares.tolist(), reverse=True)
        assert int(shares.max() - shares.min()) <= 1
    assert unique.tolist() == expected
    assert torch.equal(unique[reverse], ids)
    assert ends.tolist() == offsets_of(out.tolist()).tolist()


def test_tables_of_managed_collision_collections_are_found_behind_empty_groups() -> None:
    # ManagedCollisionCollection repeats a table's start for each of its features: [0, 0, 2] instead of [0, 2, 2]
    out, _, unique, reverse = jagged_unique_indices(longs(0, 0, 9), longs(0, 0, 2), longs(0, 2, 3), longs(5, 4, 5))
    assert (out.tolist(), unique.tolist(), reverse.tolist()) == ([1, 1], [4, 5], [1, 0, 1])


@pytest.mark.parametrize("bags", [0, 2])
def test_no_ids_are_no_unique_ids(bags: int) -> None:
    out, ends, unique, reverse = jagged_unique_indices(longs(0, 9), longs(0, 1), longs(*[0] * (bags + 1)), longs())
    assert out.tolist() == [0] * bags
    assert ends.tolist() == [0] * (bags + 1)
    assert unique.tolist() == reverse.tolist() == []


def test_no_rows_are_selected_without_a_size() -> None:
    # fbgemm raises IndexError
    assert jagged_index_select_2d_forward_v2(normal(3, 2), longs(), longs(3), longs()).shape == (0, 2)


def test_a_permutation_of_no_runs_expands_to_nothing() -> None:
    # fbgemm refuses it; a rank without features has it
    assert expand_into_jagged_permute(longs(), longs(0), longs(0), 0).tolist() == []


def test_weights_of_several_columns_move_with_their_ids() -> None:
    # as in fbgemm's CUDA kernels; its CPU kernels take one column
    weights = torch.arange(6.0).view(3, 2)
    _, _, one = permute_1D_sparse_data(longs(1, 0), longs(1, 2), longs(7, 8, 9), weights, 3)
    _, _, two = permute_2D_sparse_data(longs(1, 0), longs(1, 2).view(2, 1), longs(7, 8, 9), weights, 3)
    assert one is not None
    assert two is not None
    assert one.tolist() == two.tolist() == [[2, 3], [4, 5], [0, 1]]


class TestContentThatContradictsItselfGivesDefinedResults:
    """It shows in values only, which would have to be waited for."""

    def test_decreasing_offsets_read_inside_the_values(self) -> None:
        values, offsets = normal(4, 2), [longs(0, 3, 1, 4)]
        padded = jagged_to_padded_dense_forward(values, offsets, [3], -1.0)
        assert torch.equal(padded[0], values[:3])
        assert (padded[1] == -1).all()
        assert torch.equal(padded[2], values[1:])
        assert dense_to_jagged_forward(padded, offsets, 4).isfinite().all()

    def test_offsets_behind_the_values_read_inside_them(self) -> None:
        padded = jagged_to_padded_dense_forward(torch.ones(2, 1), [longs(0, 1, 9)], [4], 0.0)
        assert padded.flatten().tolist() == [1, 0, 0, 0, 1, 1, 1, 1]

    def test_permutations_outside_the_features_take_the_nearest(self) -> None:
        lengths, values, _ = permute_2D_sparse_data(longs(5, -1), longs(1, 2).view(2, 1), longs(7, 8, 9), None, 3)
        assert (lengths.flatten().tolist(), values.tolist()) == ([2, 1], [8, 9, 7])
        assert invert_permute(longs(7, 0)).tolist() == [1, 0]

    def test_rows_added_outside_the_result_are_dropped(self) -> None:
        result = jagged_index_add_2d_forward(torch.ones(3, 1), longs(1, 0), longs(2, 3), longs(1, 9), 3, 2)
        assert result.flatten().tolist() == [1, 1]

    def test_ids_before_the_first_boundary_go_to_the_first_rank(self) -> None:
        bounds = [longs(3, 6, 9)]
        lengths, _, _, _, places = block_bucketize_sparse_features(
            longs(2), longs(0, 7), False, True, longs(5), 2, block_bucketize_pos=bounds
        )
        assert places is not None
        assert (lengths.tolist(), places.tolist()) == ([1, 1], [0, 1])

    def test_more_ids_than_lengths_say_count_for_the_last_bag(self) -> None:
        lengths, ids, *_ = block_bucketize_sparse_features(longs(1, 1), longs(0, 1, 9), False, False, longs(5), 2)
        assert lengths.tolist() == [1, 1, 0, 1]
        assert ids.tolist() == [0, 1, 4]

    def test_positions_before_the_first_offset_count_from_zero(self) -> None:
        assert offsets_range(longs(2, 3), 5).tolist() == [0, 1, 0, 0, 1]

    def test_a_size_beyond_the_runs_goes_on_inside_the_values(self) -> None:
        _, values, _ = permute_1D_sparse_data(longs(0), longs(2), longs(7, 8), None, 4)
        assert values.tolist() == [7, 8, 8, 8]


def test_sums_over_runs_leave_out_what_belongs_to_none() -> None:
    for dtype in (torch.float32, I64):
        values = torch.arange(6).to(dtype)
        assert segment_sum_csr(1, longs(1, 3, 3, 5), values).tolist() == [3, 0, 7]


def test_prefix_sums_of_values_that_require_gradients_can_be_taken() -> None:
    assert asynchronous_complete_cumsum(torch.ones(2, requires_grad=True)).requires_grad


def test_int64_ids_beyond_2_to_63_are_read_as_unsigned() -> None:
    # as fbgemm reads raw, unhashed ids: -1 is 2^64 - 1
    lengths, ids, *_ = block_bucketize_sparse_features(longs(2), longs(-1, -2), False, False, longs(10), 3)
    assert [(1 << 64) - 1 - 3 * row for row in ids.tolist()] == [0, 3]
    assert lengths.tolist() == [1, 0, 1]
    assert [((1 << 64) - 1) % 3, ((1 << 64) - 2) % 3] == [0, 2]


ONE = torch.ones(1, dtype=torch.int32)
BAD: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (
        jagged_to_padded_dense_forward,
        (normal(4, 2, 2), [longs(0, 4)], [3]),
        r"values must be \[T\] or \[T, D\], got.*4, 2, 2",
    ),
    (
        jagged_to_padded_dense_forward,
        (normal(4), [longs(0, 4)], [3, 2]),
        "max_lengths must have one length per offsets, got 2 for 1",
    ),
    (
        jagged_to_padded_dense_forward,
        (normal(4), [longs(0, 4)], [-1]),
        r"max_lengths\[0\] must not be negative, got -1",
    ),
    (jagged_to_padded_dense_forward, (normal(4), [], []), "at least one jagged dimension"),
    (
        jagged_to_padded_dense_forward,
        (normal(4), [torch.tensor([0.0, 4.0])], [3]),
        r"offsets\[0\] must be int32 or int64",
    ),
    (jagged_to_padded_dense_forward, (normal(4), [longs()], [3]), r"offsets\[0\] must have at least one element"),
    (
        jagged_to_padded_dense_forward,
        (longs(1, 2), [longs(0, 2)], [3], float("inf")),
        "padding_value.*torch.int64.*inf",
    ),
    (dense_to_jagged_forward, (normal(2, 3), [longs(0, 4)], 4), r"dense must have 1 \+ 2 dimensions"),
    (dense_to_jagged_forward, (normal(2, 3, 1), [longs(0, 4)], 4), r"must have 1 rows as offsets\[0\] has"),
    (dense_to_jagged_forward, (normal(1, 3, 1), [longs(0, 4)], -2), "total_L must not be negative, got -2"),
    (jagged_1d_to_dense, (normal(4), longs(0, 4), 0, 0), "max_sequence_length must be positive, got 0"),
    (jagged_1d_to_dense, (normal(4, 1), longs(0, 4), 2, 0), "values must have one dimension"),
    (stacked_jagged_1d_to_dense, (normal(4), longs(4).view(1, 1), [0], [2], 0), r"1 \+ 1 and 1 numbers, got 1 and 1"),
    (
        jagged_dense_elementwise_add_jagged_output,
        (normal(4, 2), [longs(0, 4)], normal(1, 3, 3)),
        r"x_values must be \[T, 3\]",
    ),
    (jagged_dense_elementwise_add_jagged_output, (normal(4, 2), [longs(0, 4)], normal(2, 3, 2)), "y must have 1 rows"),
    (jagged_softmax_forward, (normal(4, 2), longs(0, 4), -1), "max_L must not be negative"),
    (jagged_softmax_forward, (normal(4), longs(0, 4), 4), r"values must be \[T, D\]"),
    (jagged_dense_bmm_forward, (normal(4, 2), longs(0, 4), normal(1, 3, 2), 4), r"y must be \[1, 2, N\]"),
    (
        batched_dense_vec_jagged_2d_mul_forward,
        (normal(3, 2), normal(4, 4), longs(0, 2, 4)),
        r"v must be \[B H, L\].*B = 2",
    ),
    (
        jagged_index_select_2d_forward,
        (normal(4, 2), longs(0), longs(4), longs(4, 5), 4),
        "selected rows must be 1, got 2",
    ),
    (
        jagged_index_select_2d_forward,
        (normal(4, 2), longs(0), longs(4), longs(4), -1),
        "num_dense_output_rows must not be",
    ),
    (jagged_index_add_2d_forward, (normal(4), longs(0), longs(4), longs(4), 4, 4), r"values must be \[T, D\]"),
    (
        jagged_slice_forward,
        (normal(4), longs(4), longs(0), longs(2), longs(0, 0), 2, 2, True),
        r"tgt_start must be \[B\]",
    ),
    (keyed_jagged_index_select_dim1, (normal(4), longs(4), longs(0, 4, 4), longs(0), 1), r"offsets must have 1 \+ 1"),
    (
        keyed_jagged_index_select_dim1,
        (normal(4), longs(2, 1, 1), longs(0, 2, 3, 4), longs(0), 2),
        "whole batches of 2, got 3",
    ),
    (
        keyed_jagged_index_select_dim1,
        (normal(4), longs(4), longs(0, 4), longs(0), 1, None, -4),
        "selected_lengths_sum must not be negative",
    ),
    (asynchronous_complete_cumsum, (normal(1, 1, 1),), "one or two dimensions"),
    (offsets_range, (longs(0), -1), "range_size must not be negative"),
    (segment_sum_csr, (-1, longs(0, 1), normal(1)), "batch_size must not be negative"),
    (permute_2D_sparse_data, (ONE, longs(1), longs(5)), r"lengths must have 2 dimension\(s\), got shape \(1,\)"),
    (permute_2D_sparse_data, (ONE.float(), longs(1).view(1, 1), longs(5)), "permute must be int32 or int64"),
    (permute_2D_sparse_data, (ONE, longs(1).view(1, 1), longs(5), normal(2)), "weights must have 1 rows like values"),
    (
        permute_2D_sparse_data,
        (ONE, longs(1).view(1, 1), longs(5), None, -1),
        "permuted_lengths_sum must not be negative",
    ),
    (permute_1D_sparse_data, (ONE, longs(), longs()), "permute must be empty, since lengths are, got 1"),
    (permute_2D_sparse_data, (ONE[:0], longs(3, -1).view(1, 2), longs(5, 6)), "lengths must not be negative, got -1"),
    (permute_2D_sparse_data, (ONE - 1, longs(1, 2).view(1, 2), longs(5, 6)), "lengths add up to 3.*there are 2 values"),
    (permute_1D_sparse_data, (ONE, longs(-1, 2), longs(5)), "lengths must not be negative, got -1"),
    (lengths_range, (longs(3, -1),), "lengths must not be negative, got -1"),
    (permute_2D_sparse_data_input1D, (ONE, longs(1, 2, 3), longs(*[5] * 6), 2), "rows of stride = 2, got 3"),
    (permute_2D_sparse_data_input1D, (ONE, longs(1, 2, 3), longs(*[5] * 6), 0), "rows of stride = 0, got 3"),
    (
        expand_into_jagged_permute,
        (ONE, longs(0, 1, 2), longs(0, 1), 1),
        r"input_offset must have 1 \+ 1 elements, got 3",
    ),
    (expand_into_jagged_permute, (ONE[:0], longs(0), longs(0), 2), "output_size must be 0"),
    (invert_permute, (normal(2),), "permute must be int32 or int64"),
    (
        block_bucketize_sparse_features,
        (longs(1, 1, 1), longs(1, 2, 3), False, False, longs(4, 4), 2),
        "batches of 2 features, got 3",
    ),
    (
        block_bucketize_sparse_features,
        (longs(3), longs(1, 2, 3), False, False, longs(4), 0),
        "my_size must be positive, got 0",
    ),
    (
        block_bucketize_sparse_features,
        (longs(3), longs(1, 2, 3), False, False, longs(4), 2, normal(2)),
        "weights must have 3 rows",
    ),
    (block_bucketize_sparse_features, (longs(), longs(1), False, False, longs(), 2), "indices must be empty"),
    (
        block_bucketize_sparse_features,
        (longs(1), longs(1), False, False, longs(4), 2, None, longs(1, 1)),
        "batch_size_per_feature must have 1",
    ),
    (
        block_bucketize_sparse_features,
        (longs(1), longs(1), False, False, longs(4), 2, None, None, -1, [longs()]),
        "boundaries for each feature",
    ),
    (
        block_bucketize_sparse_features,
        (longs(1, 1), longs(1, 2), False, False, longs(4, 4), 2, None, None, -1, [longs(0)]),
        "one tensor per feature, 2, got 1",
    ),
    (
        block_bucketize_sparse_features_2d_weights,
        (longs(1), longs(1), False, False, longs(4), 2, normal(3), 2),
        r"weights must be \[1, 2\]",
    ),
    (reorder_batched_ad_lengths, (longs(1, 2, 3), longs(0, 2), 2), "3 lengths are no whole number of features of 2"),
    (
        reorder_batched_ad_lengths,
        (longs(1, 2), longs(0, 2), 2, False, 1),
        "max_batch_size must be at least num_ads_in_batch = 2",
    ),
    (
        reorder_batched_ad_indices,
        (longs(0, 1, 2), longs(5, 6), longs(0, 1), longs(0, 2), 2),
        r"1 \* 2 \+ 1 elements, got 2",
    ),
    (
        reorder_batched_ad_indices,
        (longs(0, 1), longs(5), longs(0, 1, 2), longs(0, 2), 2, True),
        "num_indices_after_broadcast must not be",
    ),
    (permute_pooled_embs, (normal(4), longs(0, 4), longs(0), longs(0, 4), longs(0)), "at least two dimensions"),
    (permute_pooled_embs, (normal(1, 4), longs(0, 4), ONE, longs(0, 4), longs(0)), "permute_list must be int64"),
    (
        permute_pooled_embs,
        (normal(1, 4), longs(0, 1, 2, 4), longs(0), longs(0, 4), longs(0)),
        r"must have 1 \+ 1 elements, got 4",
    ),
    (permute_multi_embedding_function, ([], ONE.view(1, 1), ONE, ONE, [1]), "at least one tensor"),
    (
        permute_multi_embedding_function,
        ([normal(2, 1), normal(3, 1)], ONE.view(1, 1), ONE, ONE, [1]),
        r"all be \[B, D\]",
    ),
    (
        permute_multi_embedding_function,
        ([normal(2, 1)], ONE.view(1, 1), ONE, ONE, [1]),
        "permutes must have 6 columns, got 1",
    ),
    (kt_regroup_arguments, (normal(1), [["a"]], [[1]], [["b"]]), r"a feature 'b' that is not among the keys \['a'\]"),
    (kt_regroup_arguments, (normal(1), [["a"]], [[1, 2]], [["a"]]), "lengths must be one per key, got 2"),
    (regroup_keyed_tensor, ([], [], [], []), "at least one tensor"),
    (sum_reduce_to_one, ([normal(1), normal(2)], HERE), r"one shape, got \[\(1,\), \(2,\)\]"),
    (merge_pooled_embeddings, ([], 0, HERE), "at least one tensor"),
    (group_index_select_dim0, ([normal(1)], []), "indices_group must have 1 tensors, got 0"),
    (batch_index_select_dim0, (normal(4), longs(0), [1], [2, 2], [2]), "got 1, 2 and 1"),
    (batch_index_select_dim0, (normal(4), longs(0), [1], [3], [2]), "must have 6 and 1 elements, got 4 and 1"),
    (batch_index_select_dim0, (normal(4), longs(0), [0], [2], [2]), "must all be positive"),
    (batch_index_select_dim0, (normal(4), longs(0, 0, 1), [1, 2], [2, 2], [1, 1], True), r"must be equal.*\[1, 2\]"),
    (
        jagged_unique_indices,
        (longs(0), longs(0), longs(0), longs()),
        "hash_size_cumsum must have at least two elements",
    ),
    (
        jagged_unique_indices,
        (longs(0, 5, 9), longs(0, 1, 2), longs(0, 1, 2, 3), longs(1, 2, 3)),
        "batches of 2 features, got 3",
    ),
]


@pytest.mark.parametrize(
    ("function", "arguments", "message"), BAD, ids=[f"{case[0].__name__}-{i}" for i, case in enumerate(BAD)]
)
def test_arguments_that_contradict_each_other_are_named(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_sums_of_int32_keep_their_dtype() -> None:
    assert asynchronous_inclusive_cumsum(torch.ones(2, dtype=torch.int32)).dtype == torch.int32
