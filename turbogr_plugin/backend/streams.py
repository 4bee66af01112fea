"""Streams and events of any device: new ones, the current one, order between them, and memory that several use.

Everything goes through `torch.accelerator` and the device's own module (`torch.cuda`, `torch.npu`), so that the same
code runs on each of them. On CPU, where work is done when the call returns, streams and events are there and do
nothing: callers need no branch. `torch.cpu.Stream` is not used for that: `Tensor.record_stream` refuses it, and it
knows neither its device nor how to wait.

Left out: priorities beyond what the device module takes, graphs, and timing on CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

CPU = torch.device("cpu")


class HostEvent:
    """The event of a device without streams: over as soon as it is recorded."""

    device = CPU

    def record(self, stream: Stream | None = None) -> None:
        """Does nothing: all work before this call is done."""

    def wait(self, stream: Stream | None = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """True: nothing is outstanding."""
        return True


class HostStream:
    """The one stream of a device without streams: work is done when its call returns."""

    device = CPU

    def wait_stream(self, stream: Stream) -> None:
        """Waits for the work that `stream` has been given."""
        if not isinstance(stream, HostStream):
            stream.synchronize()

    def wait_event(self, event: Event) -> None:
        """Waits for the work before `event`."""
        event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        """An event that is over."""
        return HostEvent() if event is None else event

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """True: nothing is outstanding."""
        return True


Stream: TypeAlias = torch.Stream | HostStream
Event: TypeAlias = torch.Event | HostEvent

_HOST_STREAM = HostStream()


class Recordable(Protocol):
    """What holds tensors and can tell the allocator who uses them: a Tensor, or TorchRec's Multistreamable."""

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory until the work that `stream` has been given is done."""


def device_module(device: torch.device) -> Any:
    """The module of the device's type, such as torch.npu.

    Raises:
        ValueError: this torch has no module for the type.
    """
    try:
        return torch.get_device_module(device)
    except RuntimeError as error:
        raise ValueError(f"device {device} has no module in this torch: {error}") from error


def new_stream(device: torch.device, *, priority: int = 0) -> Stream:
    """A stream of `device` beside the current one (CPU: the only one).

    Args:
        device: without an index the current device of its type.
        priority: lower runs first, as the device module takes it (CUDA: -1 and 0).
    """
    if device.type == "cpu":
        return _HOST_STREAM
    module = device_module(device)
    return module.Stream(_index(device), priority=priority)


def new_event(device: torch.device, *, timing: bool = False) -> Event:
    """An event for streams of `device`.

    Args:
        device: where it will be recorded.
        timing: whether `elapsed_time` will be asked (not on CPU).
    """
    if device.type == "cpu":
        if timing:
            raise ValueError("timing=True needs an accelerator: on cpu read the clock of the host")
        return HostEvent()
    return device_module(device).Event(enable_timing=timing)


def current_stream(device: torch.device) -> Stream:
    """The stream that work on `device` goes to from this thread."""
    if device.type == "cpu":
        return _HOST_STREAM
    return device_module(device).current_stream(_index(device))


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """The block's work goes to `stream`; None leaves the current one."""
    if stream is None or isinstance(stream, HostStream):
        return nullcontext()
    return device_module(stream.device).stream(stream)


def wait(stream: Stream, producer: Stream) -> None:
    """Later work on `stream` waits for all work that `producer` has been given; the host waits only if one is CPU's."""
    if stream is producer or isinstance(producer, HostStream):
        return
    if isinstance(stream, HostStream):
        producer.synchronize()
    else:
        stream.wait_stream(producer)


def record_stream(value: Recordable, stream: Stream) -> None:
    """Tells the allocator that `stream` uses the memory of `value`, which another stream has allocated.

    Without it a freed tensor's memory goes back to the stream that allocated it, which may write to it while `stream`
    still reads.

    Args:
        value: a Tensor of any device (CPU tensors need nothing), or what holds some.
        stream: the user.
    """
    if isinstance(stream, HostStream) or (isinstance(value, Tensor) and value.device.type == "cpu"):
        return
    value.record_stream(stream)


def synchronize(device: torch.device) -> None:
    """The host waits for all streams of `device`."""
    if device.type != "cpu":
        torch.accelerator.synchronize(_index(device))


def _index(device: torch.device) -> int:
    """The device's index, that of the current device where it has none."""
    return torch.accelerator.current_device_index() if device.index is None else device.index
