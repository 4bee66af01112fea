"""The gradient of torch.nn.EmbeddingBag on npu: what TorchRec's unsharded EmbeddingBagCollection trains with.

torch_npu implements the forward pass of embedding bags and not their backward pass, which would run on the CPU. Here it
is built from operators that torch_npu has, and does not wait for the device. Sums are in float32 and in the order of
the ids (see `sum_groups` in reference/row_groups.py for chips that add with atomics).

Left out: sparse gradients and scaling by frequency, both refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.npu_operators import NpuKernel
from turbogr_plugin.kernels.table_bags import bags_of_positions

_SUM, _MEAN, _MAX = 0, 1, 2  # torch's modes


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """aten::_embedding_bag_backward.

    Args:
        grad: [B, D].
        indices: [N] int32 or int64.
        offsets: [B] or [B + 1] int32 or int64.
        offset2bag: not used: torch leaves it empty on some paths.
        bag_size: not used, for the same reason.
        maximum_indices: [B, D], mode max only.
        num_weights: rows of the table.
        scale_grad_by_freq: must be False.
        mode: 0 (sum), 1 (mean) or 2 (max).
        sparse: must be False.
        per_sample_weights: [N] or None, mode sum only.
        padding_idx: row that is left out, -1 for none.

    Returns:
        [num_weights, D] in the dtype of `grad`.

    Raises:
        NotImplementedError: `sparse` or `scale_grad_by_freq`.
    """
    for name, value in (("sparse", sparse), ("scale_grad_by_freq", scale_grad_by_freq)):
        if value:
            raise NotImplementedError(f"EmbeddingBag with {name}=True is not supported on npu, only {name}=False")
    bags, width = grad.shape
    wide = grad.to(torch.float32)
    table = wide.new_zeros(num_weights, width)
    if bags == 0 or indices.numel() == 0:
        return table.to(grad.dtype)
    found = bags_of_positions(offsets.contiguous(), indices.numel())
    bag = found.clamp(0, bags - 1)
    counted = ((found == bag) & (indices != padding_idx)).to(torch.float32).unsqueeze(1)
    size = wide.new_zeros(bags, 1).index_add_(0, bag, counted)
    if mode == _MAX:
        filled = wide.masked_fill(size == 0, 0.0)  # a bag without ids took its zeros from nowhere
        return table.scatter_add_(0, maximum_indices.to(torch.int64).clamp(min=0), filled).to(grad.dtype)
    if mode == _MEAN:
        wide = wide / size.clamp(min=1.0)
    by_value = wide.index_select(0, bag) * counted
    if per_sample_weights is not None:
        by_value = by_value * per_sample_weights.to(torch.float32).unsqueeze(1)
    return table.index_add_(0, indices, by_value).to(grad.dtype)


KERNELS = (
    NpuKernel(
        schema="aten::_embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, "
        "Tensor bag_size, Tensor maximum_indices, SymInt num_weights, bool scale_grad_by_freq, int mode, bool sparse, "
        "Tensor? per_sample_weights, int padding_idx=-1) -> Tensor",
        function=embedding_bag_backward,
    ),
)
