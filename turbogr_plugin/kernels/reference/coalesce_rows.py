"""Duplicate ids and the sums of their gradients in plain PyTorch, on any device.

How many ids are different only their values tell: the host waits for a device, once. A lookup with a fused update does
without (row_groups.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.lookup_call import CoalesceCall


def refuses(call: CoalesceCall) -> str | None:
    """None: every call is served."""
    return None


def coalesce(call: CoalesceCall) -> tuple[Tensor, Tensor]:
    """Different ids [U], ascending, and the sum of the gradients of each [U, D], in the order of positions.

    As for `row_groups.sum_groups`, a chip that adds with atomics keeps that order only under
    torch.use_deterministic_algorithms(True).
    """
    dtype = torch.float64 if call.grads.dtype == torch.float64 else torch.float32
    ordered, order = call.ids.sort(stable=True)
    if ordered.numel() == 0:
        return ordered, call.grads.new_zeros(0, call.grads.shape[1], dtype=dtype)
    head = torch.cat([torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]])
    segment = head.to(torch.int64).cumsum(0) - 1
    count = int(segment[-1]) + 1  # the one wait
    rows = call.grads.new_zeros(count, call.grads.shape[1], dtype=dtype)
    rows.index_add_(0, segment, call.grads.index_select(0, order).to(dtype))
    return ordered.new_empty(count).scatter_(0, segment, ordered), rows
