"""Memory of a device in figures, and copies between pinned host memory and a device that nobody waits for.

A copy is non-blocking only from or to pinned memory, and it has two lifetimes that plain code forgets: the host must
not write to (or free) the source before the copy to the device has read it, and must not read the result of a copy to
the host before it has been written. `PendingCopy` holds both ends and the event that ends them.

Left out: a pool of pinned buffers. torch's caching host allocator is one, and it waits for the copies it knows of.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turbogr_plugin.backend.streams import (
    CPU,
    Event,
    Stream,
    current_stream,
    device_module,
    new_event,
    on_stream,
    record_stream,
)


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Bytes of one device as this process sees them; None is unknown, never a guess."""

    allocated: int | None = None
    """Held by living tensors of this process."""
    peak: int | None = None
    """Highest `allocated` since the process began or `reset_peak`."""
    reserved: int | None = None
    """Taken from the device by this process, caches included."""
    total: int | None = None
    """What the device has; for cpu the host's memory."""
    free: int | None = None
    """What nobody has taken, of all processes."""


def memory_figures(device: torch.device) -> MemoryFigures:
    """What the device's module tells of its memory; torch keeps no account of tensors on CPU."""
    if device.type == "cpu":
        return MemoryFigures(total=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    module = device_module(device)

    def figure(name: str) -> int | None:
        function = getattr(module, name, None)
        return None if function is None else int(function(device))

    mem_get_info = getattr(module, "mem_get_info", None)
    free, total = (None, None) if mem_get_info is None else mem_get_info(device)
    return MemoryFigures(
        allocated=figure("memory_allocated"),
        peak=figure("max_memory_allocated"),
        reserved=figure("memory_reserved"),
        total=total,
        free=free,
    )


def reset_peak(device: torch.device) -> None:
    """Lets `peak` begin anew; nothing on devices that keep none."""
    function = None if device.type == "cpu" else getattr(device_module(device), "reset_peak_memory_stats", None)
    if function is not None:
        function(device)


def pinned_empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory [*shape] that `device` can copy from and to without the host; plain memory where that is cpu."""
    return torch.empty(shape, dtype=dtype, device=CPU, pin_memory=device.type != "cpu")


@dataclass
class PendingCopy:
    """A copy under way; both its ends live as long as this object."""

    result: Tensor
    """Where the values arrive; not to be touched before `use` or `wait`."""
    source: Tensor = field(repr=False)
    """Where they come from; the host must not write to it before `wait`."""
    event: Event = field(repr=False)

    def use(self, stream: Stream | None = None) -> Tensor:
        """The result for work on `stream` (None: the current one of its device); the host does not wait.

        Raises:
            ValueError: the result is on the host, which has to `wait`.
        """
        if self.result.device.type == "cpu" and self.source.device.type != "cpu":
            raise ValueError("a copy to the host is not ordered with a stream: call wait() before reading it")
        if self.source.device != self.result.device:
            user = current_stream(self.result.device) if stream is None else stream
            user.wait_event(self.event)  # type: ignore[arg-type]  # the union of host and device never mixes here
            record_stream(self.result, user)
        return self.result

    def wait(self) -> Tensor:
        """The result, after the host has waited for it; source and result are free to be written."""
        self.event.synchronize()
        return self.result

    @property
    def done(self) -> bool:
        """Whether the copy is over; asks, does not wait."""
        return self.event.query()


def copy_to_device(source: Tensor, device: torch.device, *, stream: Stream | None = None) -> PendingCopy:
    """Starts a copy from the host to `device`.

    Args:
        source: on the host; pinned here first if it is not, which copies it once more.
        device: where to; for cpu the result is `source` itself.
        stream: the one that copies and allocates the result, so that users have to go through `PendingCopy.use`;
            None is the current one.

    Raises:
        ValueError: `source` is not on the host.
    """
    if source.device.type != "cpu":
        raise ValueError(f"source has to be on cpu, it is on {source.device}")
    event = new_event(device)
    if device.type == "cpu":
        return PendingCopy(source, source, event)
    pinned = source if source.is_pinned() else source.pin_memory()
    with on_stream(stream):
        result = pinned.to(device, non_blocking=True)
        event.record(current_stream(device))  # type: ignore[arg-type]
    return PendingCopy(result, pinned, event)


def copy_to_host(source: Tensor, *, stream: Stream | None = None) -> PendingCopy:
    """Starts a copy from a device to pinned memory of the host.

    Args:
        source: on any device; for cpu the result is `source` itself.
        stream: the one that copies, which waits for the current one first; None is the current one.
    """
    device = source.device
    event = new_event(device)
    if device.type == "cpu":
        return PendingCopy(source, source, event)
    result = pinned_empty(*source.shape, dtype=source.dtype, device=device)
    producer = current_stream(device)
    with on_stream(stream):
        copier = current_stream(device)
        if stream is not None:
            copier.wait_stream(producer)  # type: ignore[arg-type]
            record_stream(source, copier)
        result.copy_(source, non_blocking=True)
        event.record(copier)  # type: ignore[arg-type]
    return PendingCopy(result, source, event)
