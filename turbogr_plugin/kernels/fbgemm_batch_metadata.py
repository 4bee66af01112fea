"""What fbgemm's table modules ask about their batches, for `npu`: bits of a sample number, variable batch sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.table_bags import VariableBatch, variable_bag_begins
from turbogr_plugin.kernels.table_rows import Tables


def get_infos_metadata(unused: Tensor, B: int, T: int) -> tuple[int, int]:
    """Bits for a sample number beside a feature number in 32 bits, and their mask: fbgemm's own answer for the CPU."""
    bits, mask = torch.ops.fbgemm.get_infos_metadata(torch.empty(0), B, T)
    return int(bits), int(mask)


def generate_vbe_metadata(
    B_offsets: Tensor,
    B_offsets_rank_per_feature: Tensor,
    output_offsets_feature_rank: Tensor,
    D_offsets: Tensor,
    D: int,
    nobag: bool,
    max_B_feature_rank: int,
    info_B_num_bits: int,
    total_B: int,
    vbe_output_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Where each bag goes with variable batch sizes.

    Args:
        B_offsets: [T + 1] int32, first bag of each feature.
        B_offsets_rank_per_feature: [T, R + 1] int32, first sample of each rank.
        output_offsets_feature_rank: [R * T + 1] int64.
        D_offsets: [T + 1] int32.
        D: the width of all tables if `nobag`.
        nobag: whether there is no pooling.
        max_B_feature_rank: not used.
        info_B_num_bits: bits of a sample number in the second result.
        total_B: number of bags.
        vbe_output_offsets: [R, T] int64, instead of `output_offsets_feature_rank`.

    Returns:
        Element of the output where each bag begins ([total_B] int64), and feature << info_B_num_bits | sample
        ([total_B] int32).
    """
    features = B_offsets.numel() - 1
    widths = torch.arange(features + 1, device=D_offsets.device) * D if nobag else D_offsets
    begin = (
        vbe_output_offsets if vbe_output_offsets is not None else output_offsets_feature_rank[:-1].view(-1, features)
    )
    variable = VariableBatch(B_offsets, B_offsets_rank_per_feature, begin.to(torch.int64), 0)
    bag = torch.arange(total_B, device=B_offsets.device)
    # only the widths of these tables matter here: rows, total and largest width are not asked for
    feature, row_begin = variable_bag_begins(bag, Tables(widths, B_offsets.to(torch.int64), 0, D), variable)
    sample = bag - B_offsets.to(torch.int64).index_select(0, feature)
    return row_begin, (feature * (1 << info_B_num_bits) + sample).to(torch.int32)


KERNELS = (
    NpuKernel(
        schema="fbgemm::get_infos_metadata(Tensor unused, int B, int T) -> (int, int)",
        function=get_infos_metadata,
    ),
    NpuKernel(
        schema="fbgemm::generate_vbe_metadata(Tensor B_offsets, Tensor B_offsets_rank_per_feature, "
        "Tensor output_offsets_feature_rank, Tensor D_offsets, int D, bool nobag, SymInt max_B_feature_rank, "
        "int info_B_num_bits, SymInt total_B, Tensor? vbe_output_offsets=None) -> (Tensor, Tensor)",
        function=generate_vbe_metadata,
    ),
)
