"""Which device this process uses."""

from __future__ import annotations

import os

import torch

from turbogr_plugin.errors import InputError


def current_device(device_type: str) -> torch.device:
    """The device of this process, made current: the launcher's LOCAL_RANK picks the accelerator.

    Args:
        device_type: "cpu", or the type of an accelerator that this torch knows.

    Raises:
        InputError: a device type that is not there, naming what is.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    known = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
    if device_type not in known:
        raise InputError(f"device {device_type!r} is not available in this process: use one of {', '.join(known)}")
    if device_type == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)
