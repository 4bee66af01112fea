"""CPU; figures, pinned memory and lifetimes on npu in tests/npu/test_streams_and_memory.py."""

from __future__ import annotations

import pytest
import torch

from turbogr_plugin.backend.memory import (
    MemoryFigures,
    copy_to_device,
    copy_to_host,
    memory_figures,
    pinned_empty,
    reset_peak,
)

CPU = torch.device("cpu")


def test_of_the_cpu_only_the_size_is_known() -> None:
    reset_peak(CPU)
    figures = memory_figures(CPU)
    assert figures.total is not None and figures.total > 1 << 28
    assert figures == MemoryFigures(total=figures.total)


def test_memory_for_a_cpu_is_not_pinned() -> None:
    buffer = pinned_empty(2, 3, dtype=torch.int64, device=CPU)
    assert (buffer.shape, buffer.dtype) == ((2, 3), torch.int64)
    assert not buffer.is_pinned()


def test_a_copy_from_cpu_to_cpu_is_the_tensor_itself() -> None:
    source = torch.arange(4)
    for copy in (copy_to_device(source, CPU), copy_to_host(source)):
        assert copy.done
        assert copy.use() is source
        assert copy.wait() is source


def test_only_host_memory_is_copied_to_a_device() -> None:
    with pytest.raises(ValueError, match="source has to be on cpu, it is on meta"):
        copy_to_device(torch.empty(1, device="meta"), CPU)
