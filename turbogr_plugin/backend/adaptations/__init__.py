"""Adaptations that need no kernel: how TorchRec and torch.distributed treat a device that their lists do not name."""

from __future__ import annotations

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.adaptations import (
    collective_results,
    dense_tables_on_device,
    device_to_host_awaitable,
    fused_tables_on_device,
    immediate_results,
    kjt_checked_on_host,
    kjt_printed_by_key,
    kjt_variable_strides,
    kjt_without_host_sync,
    kjt_without_rows,
    pinned_small_tensors,
    sharded_tensor_device,
)

ADAPTATIONS: tuple[Adaptation, ...] = (
    *kjt_without_host_sync.ADAPTATIONS,
    *pinned_small_tensors.ADAPTATIONS,
    *collective_results.ADAPTATIONS,
    *device_to_host_awaitable.ADAPTATIONS,
    *sharded_tensor_device.ADAPTATIONS,
    *fused_tables_on_device.ADAPTATIONS,
    *dense_tables_on_device.ADAPTATIONS,
    *kjt_without_rows.ADAPTATIONS,
    *kjt_variable_strides.ADAPTATIONS,
    *kjt_printed_by_key.ADAPTATIONS,
    *kjt_checked_on_host.ADAPTATIONS,
    *immediate_results.ADAPTATIONS,
)
