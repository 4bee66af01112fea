"""torch.npu of the simulated device: the part of torch_npu's module that training code uses.

Streams, events and memory figures are torch's own (torch.Stream, torch.Event, torch.accelerator); what stands here are
the names that torch_npu gives them. Left out: graphs, profiling, IPC, and everything that asks about the chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from turbogr_plugin.simnpu.simulation import native

Device = torch.device | str | int | None


def _index(device: Device = None) -> int:
    """Index of a device given in any of torch's ways; the current one where none is named.

    Raises:
        ValueError: a device of another type.
    """
    if device is None:
        return int(native().current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(native().current_device())
    device = torch.device(device)
    if device.type != "npu":
        raise ValueError(f"expected an npu device, got {device}")
    return int(native().current_device()) if device.index is None else device.index


# ---------------------------------------------------------------------------------------------------------- devices


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """True: there is nothing to initialise."""
    return True


def init() -> None:
    """Nothing."""


_lazy_init = init
_initialized = True  # torch.utils.checkpoint keeps the random state only of a device that says so


def _is_in_bad_fork() -> bool:
    """False: host memory survives a fork."""
    return False


def device_count() -> int:
    """How many devices `load` was asked for."""
    return int(native().device_count())


def current_device() -> int:
    """Index of the current device of this thread."""
    return int(native().current_device())


def set_device(device: Device) -> None:
    """Makes a device current in this thread.

    Raises:
        RuntimeError: there is no such device.
    """
    native().set_device(_index(device))


def _exchange_device(index: int) -> int:
    return int(native().exchange_device(index))


def _maybe_exchange_device(index: int) -> int:
    return int(native().exchange_device(index))


class device:
    """Context in which a device is current."""

    def __init__(self, device: Device) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):
    """Context in which the device of a tensor is current; does nothing for a tensor elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "npu" else current_device())


def get_device_name(device: Device = None) -> str:
    """Says that there is no chip behind it."""
    native().check_device(_index(device))
    return "simulated Ascend 910B3"


def get_device_capability(device: Device = None) -> None:
    """None, as torch_npu: a chip has no compute capability."""
    native().check_device(_index(device))


class _Properties:
    def __init__(self, name: str, total_memory: int) -> None:
        self.name = name
        self.total_memory = total_memory

    def __repr__(self) -> str:
        return f"_NPUDeviceProperties(name={self.name!r}, total_memory={self.total_memory // 2**20}MB)"


def get_device_properties(device: Device = None) -> _Properties:
    """Name and memory in bytes."""
    return _Properties(get_device_name(device), mem_get_info(device)[1])


def can_device_access_peer(device: Device, peer: Device) -> bool:
    """True for two devices of this process."""
    return _index(device) != _index(peer)


def is_bf16_supported() -> bool:
    """True, as on the 910B."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes of autocast."""
    return [torch.float16, torch.bfloat16]


# ------------------------------------------------------------------------------------------------ streams and events


class Stream(torch.Stream):
    """A stream of a device; torch hands out 32 per device and priority in turn, as torch_npu does."""

    def __new__(cls, device: Device = None, priority: int = 0, **known: Any) -> Stream:
        """A new stream of `device`, or one known by stream_id, device_index and device_type."""
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        """Identifies the stream on its device."""
        return self.stream_id


class Event(torch.Event):
    """An event of the current device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        """A new event; blocking and interprocess have no meaning here."""
        return super().__new__(cls, device=torch.device("npu", current_device()), enable_timing=enable_timing)

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds between the two records: host time, no measure of a chip.

        torch.Event.elapsed_time of torch 2.13 refuses subclasses of torch.Event.
        """
        return float(native().elapsed_ms(self.event_id, end_event.event_id))


class StreamContext:
    """Context in which a stream is current on its device; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: tuple[int, torch.Stream] | None = None

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._before = current_device(), torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            index, stream = self._before
            torch.accelerator.set_stream(stream)
            set_device(index)


stream = StreamContext


def _as_npu_stream(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Device = None) -> Stream:
    """The stream on which operators of this thread are launched."""
    return _as_npu_stream(torch.accelerator.current_stream(_index(device)))


def default_stream(device: Device = None) -> Stream:
    """The stream that is current where nothing was set."""
    now = torch.accelerator.current_stream(_index(device))
    return Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)


def set_stream(stream: torch.Stream) -> None:
    """Makes a stream and its device current in this thread."""
    torch.accelerator.set_stream(stream)


def synchronize(device: Device = None) -> None:
    """Waits for all streams of a device."""
    torch.accelerator.synchronize(_index(device))


# ------------------------------------------------------------------------------------------------------------ memory


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Figures of the allocator, under torch's names."""
    return dict(torch.accelerator.memory_stats(_index(device)))


def memory_allocated(device: Device = None) -> int:
    """Bytes in tensors, each rounded up to 512."""
    return int(torch.accelerator.memory_allocated(_index(device)))


def max_memory_allocated(device: Device = None) -> int:
    """Peak of `memory_allocated` since the start or the last reset."""
    return int(torch.accelerator.max_memory_allocated(_index(device)))


def memory_reserved(device: Device = None) -> int:
    """Bytes in tensors and in the allocator's pools."""
    return int(torch.accelerator.memory_reserved(_index(device)))


def max_memory_reserved(device: Device = None) -> int:
    """Peak of `memory_reserved`."""
    return int(torch.accelerator.max_memory_reserved(_index(device)))


def reset_peak_memory_stats(device: Device = None) -> None:
    """Starts the peaks anew from what is in use now."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Sets the totals of allocated and freed bytes to zero."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of a device."""
    free, total = torch.accelerator.get_memory_info(_index(device))
    return free, total


def empty_cache() -> None:
    """Gives the memory of the pools back to the host."""
    torch.accelerator.empty_cache()


# ------------------------------------------------------------------------------------------------------------ random


def _generator(device: Device = None) -> torch.Generator:
    generator: torch.Generator = native().default_generator(_index(device))
    return generator


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds every device."""
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seeds the current device from the system."""
    _generator().seed()


def seed_all() -> None:
    """Seeds every device with one number from the system."""
    manual_seed_all(_generator().seed())


def initial_seed() -> int:
    """Seed of the current device."""
    return _generator().initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """State of a device's generator, a CPU byte tensor."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Sets the state of a device's generator."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the states of all devices."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _lazy_call(call: Callable[[], None], **_: Any) -> None:
    """Runs it: nothing waits for an initialisation."""
    call()
