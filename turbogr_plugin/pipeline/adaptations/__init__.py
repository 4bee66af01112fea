"""Adaptations of TorchRec's train pipelines: their streams on npu, and the faults that keep two of them off the CPU."""

from __future__ import annotations

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.pipeline.adaptations import (
    cpu_record_stream,
    data_loading_thread,
    forward_device,
    lookup_after_writes,
    memory_stashing,
    pipeline_streams,
    postproc_streams,
    prefetch_refill,
    prefetch_without_streams,
    staged_pipeline,
)

ADAPTATIONS: tuple[Adaptation, ...] = (
    *pipeline_streams.ADAPTATIONS,
    *staged_pipeline.ADAPTATIONS,
    *data_loading_thread.ADAPTATIONS,
    *postproc_streams.ADAPTATIONS,
    *forward_device.ADAPTATIONS,
    *cpu_record_stream.ADAPTATIONS,
    *prefetch_without_streams.ADAPTATIONS,
    *memory_stashing.ADAPTATIONS,
    *prefetch_refill.ADAPTATIONS,
    *lookup_after_writes.ADAPTATIONS,
)
