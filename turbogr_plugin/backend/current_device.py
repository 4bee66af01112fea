"""Which device this process uses.

A process that has an accelerator may still be asked to use the CPU (a comparison, a debugging run); the accelerator is
then left untouched. That makes `torch.accelerator` answer for a device that nobody uses, so code that has a
`torch.device` asks that, and never `torch.accelerator.is_available()`.
"""

from __future__ import annotations

import os

import torch

from turbogr_plugin.errors import InputError


def available_device_types() -> tuple[str, ...]:
    """The device types that `current_device` accepts in this process: cpu, and the accelerator if one is there."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def current_device(device_type: str) -> torch.device:
    """The device of this process, made current: the launcher's LOCAL_RANK picks the accelerator.

    Args:
        device_type: "cpu", or the type of an accelerator that this torch knows.

    Raises:
        InputError: a device type that is not there, naming what is; more processes on this host than devices.
    """
    known = available_device_types()
    if device_type not in known:
        raise InputError(f"device {device_type!r} is not available in this process: use one of {', '.join(known)}")
    if device_type == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.accelerator.device_count()
    if index >= count:
        raise InputError(
            f"LOCAL_RANK {index} has no device of its own: this host shows {count} of type {device_type!r}. "
            f"Start at most {count} processes per host"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)
