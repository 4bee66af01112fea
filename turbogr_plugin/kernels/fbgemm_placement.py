"""fbgemm's operators that bring tensors to one device, for `npu`.

One process drives one NPU in training, so that the tensors usually are on the target already; where they are not, they
are copied without waiting. Gradients flow back, through `merge_pooled_embeddings` too (fbgemm's CPU kernel refuses it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel, with_autograd


def all_to_one_device(input_tensors: Sequence[Tensor], target_device: torch.device) -> list[Tensor]:
    """The tensors on the target device; those that are there already are returned as they are."""
    return [tensor.to(target_device, non_blocking=True) for tensor in input_tensors]


def sum_reduce_to_one(input_tensors: Sequence[Tensor], target_device: torch.device) -> Tensor:
    """The sum of tensors of one shape, on the target device.

    Raises:
        ValueError: for no tensors, or tensors of different shapes.
    """
    shapes = {tuple(tensor.shape) for tensor in input_tensors}
    if len(shapes) != 1:
        raise ValueError(f"input_tensors must have one shape, got {sorted(shapes)}")
    first, *others = all_to_one_device(input_tensors, target_device)
    total = torch.zeros_like(first) + first
    for tensor in others:
        total = total + tensor
    return total


def merge_pooled_embeddings(
    pooled_embeddings: Sequence[Tensor], uncat_dim_size: int, target_device: torch.device, cat_dim: int = 1
) -> Tensor:
    """Pooled embeddings joined along `cat_dim`, on the target device.

    Args:
        pooled_embeddings: tensors that agree in the other dimension.
        uncat_dim_size: its size; a hint for fbgemm's CUDA kernel.
        target_device: where the result is to be.
        cat_dim: dimension to join along.

    Raises:
        ValueError: for no tensors.
    """
    if not pooled_embeddings:
        raise ValueError("pooled_embeddings must have at least one tensor, got none")
    return torch.cat(all_to_one_device(pooled_embeddings, target_device), cat_dim)


def is_uvm_tensor(t: Tensor) -> bool:
    """False: an NPU's memory is never CUDA's unified memory."""
    return False


KERNELS: tuple[NpuKernel, ...] = (
    *with_autograd(
        "fbgemm::all_to_one_device(Tensor[] input_tensors, Device target_device) -> Tensor[]", all_to_one_device
    ),
    *with_autograd(
        "fbgemm::sum_reduce_to_one(Tensor[] input_tensors, Device target_device) -> Tensor", sum_reduce_to_one
    ),
    *with_autograd(
        "fbgemm::merge_pooled_embeddings(Tensor[] pooled_embeddings, SymInt uncat_dim_size, Device target_device,"
        " SymInt cat_dim=1) -> Tensor",
        merge_pooled_embeddings,
    ),
    NpuKernel(schema="fbgemm::is_uvm_tensor(Tensor t) -> bool", function=is_uvm_tensor),
)
