"""The operators of fbgemm 1.8 that TorchRec 1.8 and models on jagged tensors reach, by who calls them.

Found by reading the sources of torchrec, fbgemm_gpu and HSTU; a list, so that all of them can be asked for.
"""

from __future__ import annotations

from types import MappingProxyType


def _names(text: str) -> tuple[str, ...]:
    return tuple(f"fbgemm::{name}" for name in text.split())


TORCHREC = _names("""
    FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf all_to_one_device asynchronous_exclusive_cumsum
    asynchronous_inclusive_cumsum batch_index_select_dim0 block_bucketize_sparse_features
    block_bucketize_sparse_features_2d_weights block_bucketize_sparse_features_inference create_zch_buffer
    group_index_select_dim0 init_address_lookup invert_permute is_uvm_tensor kt_regroup_arguments
    merge_pooled_embeddings new_unified_tensor offsets_range permute_1D_sparse_data permute_2D_sparse_data
    permute_2D_sparse_data_input1D permute_multi_embedding permute_pooled_embs_auto_grad prune_embedding_tables
    regroup_keyed_tensor remap_indices_update_utils segment_sum_csr sum_reduce_to_one zero_collision_hash
""")

JAGGED = _names("""
    asynchronous_complete_cumsum batched_dense_vec_jagged_2d_mul dense_to_jagged dense_to_jagged_forward
    expand_into_jagged_permute group_index_select_dim0_gpu_impl histogram_binning_calibration index_select_dim0
    jagged_1d_to_dense jagged_2d_to_dense jagged_dense_bmm jagged_dense_bmm_forward
    jagged_dense_dense_elementwise_add_jagged_output jagged_dense_elementwise_add
    jagged_dense_elementwise_add_jagged_output jagged_dense_elementwise_mul jagged_index_add_2d_forward
    jagged_index_select jagged_index_select_2d_forward jagged_index_select_2d_forward_v2 jagged_jagged_bmm
    jagged_jagged_bmm_forward jagged_slice jagged_softmax jagged_to_padded_dense jagged_to_padded_dense_backward
    jagged_to_padded_dense_forward jagged_unique_indices keyed_jagged_index_select_dim1
    permute_multi_embedding_function permute_pooled_embs permute_sequence_embeddings reorder_batched_ad_indices
    reorder_batched_ad_lengths stacked_jagged_2d_to_dense
""")

TABLES = _names("""
    FP8RowwiseQuantizedToFloat FloatToFP8RowwiseQuantized FloatToFused8BitRowwiseQuantized FloatToHFP8Quantized
    Fused8BitRowwiseQuantizedToFloat HFP8QuantizedToFloat bounds_check_indices
    dense_embedding_codegen_lookup_function dequantize_mx_cuda direct_mapped_lru_cache_populate_byte
    direct_mapped_lxu_cache_lookup emb_inplace_update generate_vbe_metadata get_infos_metadata get_unique_indices
    get_unique_indices_with_inverse int_nbit_split_embedding_codegen_lookup_function lfu_cache_populate
    lfu_cache_populate_byte linearize_cache_indices linearize_cache_indices_from_row_idx lru_cache_populate
    lru_cache_populate_byte lxu_cache_flush lxu_cache_locking_counter_decrement lxu_cache_lookup masked_index_select
    permute_pooled_embs_auto_grad_split pruned_array_lookup pruned_array_lookup_from_row_idx pruned_hashmap_insert
    pruned_hashmap_lookup quantize_mx_cuda reset_weight_momentum split_embedding_codegen_lookup_adagrad_function_pt2
    split_embedding_codegen_lookup_adam_function_pt2 split_embedding_codegen_lookup_lamb_function_pt2
    split_embedding_codegen_lookup_lars_sgd_function_pt2 split_embedding_codegen_lookup_none_function_pt2
    split_embedding_codegen_lookup_partial_rowwise_adam_function_pt2
    split_embedding_codegen_lookup_partial_rowwise_lamb_function_pt2
    split_embedding_codegen_lookup_rowwise_adagrad_function_pt2
    split_embedding_codegen_lookup_rowwise_adagrad_with_counter_function_pt2
    split_embedding_codegen_lookup_rowwise_rmsprop_ar_function_pt2 split_embedding_codegen_lookup_sgd_function_pt2
    ssd_embedding_codegen_lookup_rowwise_adagrad_function_pt2
""")

TABLE_INTERNALS = _names("""
    split_embedding_backward_codegen_rowwise_adagrad_cpu
    split_embedding_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper
    split_embedding_backward_codegen_rowwise_adagrad_unweighted_vbe_pt2_wrapper
    split_embedding_backward_codegen_rowwise_adagrad_weighted_pt2_wrapper
    split_embedding_backward_codegen_rowwise_adagrad_weighted_vbe_pt2_wrapper split_embedding_codegen_forward_cpu
    split_embedding_codegen_forward_unweighted_pt2_wrapper
    split_embedding_codegen_forward_unweighted_vbe_pt2_wrapper split_embedding_codegen_forward_weighted_pt2_wrapper
    split_embedding_codegen_forward_weighted_vbe_pt2_wrapper split_embedding_codegen_grad_indice_weights_cpu
    split_embedding_codegen_grad_indice_weights_pt2_wrapper
    split_embedding_codegen_grad_indice_weights_vbe_pt2_wrapper
    split_embedding_codegen_lookup_approx_rowwise_adagrad_function_cpu
    split_embedding_codegen_lookup_approx_rowwise_adagrad_with_weight_decay_function_cpu
    split_embedding_codegen_lookup_rowwise_adagrad_function_cpu
    split_embedding_codegen_lookup_rowwise_adagrad_with_weight_decay_function_cpu
    split_embedding_nobag_backward_codegen_rowwise_adagrad_cpu
    split_embedding_nobag_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper
""")

REACHED = MappingProxyType(
    {
        "TorchRec": TORCHREC,
        "jagged tensors": JAGGED,
        "embedding tables": TABLES,
        "inside of fbgemm's own tables": TABLE_INTERNALS,
    }
)
"""All of them. The last group is called by fbgemm's table lookups alone: what replaces a lookup does not reach it."""
