"""Adaptations of TorchRec's planner, sharders and DMPCollection, one file per place."""

from __future__ import annotations

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.sharding.adaptations import (
    collisions_without_rows,
    default_device,
    device_kernels,
    dmp_collection,
    enumerator,
    grouped_plan,
    kernel_bandwidth,
    placement,
    plan_check,
    plan_statistics,
    refused_features,
    replica_averages,
    rows_without_tables,
    sequences_without_rows,
    sharding_types,
    storage_estimate,
    storage_reservation,
    topology,
    uneven_row_ranges,
)

#: In the order in which they are applied: what accepts `npu` comes after what handles it.
ADAPTATIONS: tuple[Adaptation, ...] = (
    *storage_estimate.ADAPTATIONS,
    *storage_reservation.ADAPTATIONS,
    *kernel_bandwidth.ADAPTATIONS,
    *enumerator.ADAPTATIONS,
    *device_kernels.ADAPTATIONS,
    *plan_statistics.ADAPTATIONS,
    *placement.ADAPTATIONS,
    *sharding_types.ADAPTATIONS,
    *plan_check.ADAPTATIONS,
    *topology.ADAPTATIONS,
    *default_device.ADAPTATIONS,
    *dmp_collection.ADAPTATIONS,
    *sequences_without_rows.ADAPTATIONS,
    *rows_without_tables.ADAPTATIONS,
    *collisions_without_rows.ADAPTATIONS,
    *replica_averages.ADAPTATIONS,
    *refused_features.ADAPTATIONS,
    *grouped_plan.ADAPTATIONS,
    *uneven_row_ranges.ADAPTATIONS,
)
