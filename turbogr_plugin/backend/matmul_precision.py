"""How precisely float32 matrix products are computed: one setting for every kind of device.

The paper trains in TF32/HF32: tensors are float32, but the operands of products are rounded to a shorter mantissa (10
bits in TF32, 11 in HF32) and summed in float32. Nobody gets that without asking: the default is fp32, and what was
asked for is recorded with the run.

Left out: mixed precision of the model (autocast), which is the trainer's business; fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from turbogr_plugin.backend.streams import device_module
from turbogr_plugin.errors import InputError

MatmulPrecision = Literal["fp32", "hf32", "bf16"]


def set_matmul_precision(precision: MatmulPrecision, device: torch.device) -> None:
    """Makes float32 matrix products (and convolutions) of this process on `device` as precise as asked.

    Args:
        precision: fp32 = IEEE float32. hf32 = operands in the device's short float32 (TF32 on cuda, HF32 on npu).
            bf16 = operands in bfloat16 (cpu with the instructions for it).
        device: decides which switches are set.

    Raises:
        InputError: a precision that the device does not have, naming those it has. It has been left as it was.
    """
    setters = _setters(device)
    if precision not in get_args(MatmulPrecision) or precision not in setters:
        known = ", ".join(setters)
        raise InputError(
            f"matmul_precision {precision!r} is not available on device {device.type!r}: use one of {known}"
        )
    setters[precision]()


def available_matmul_precisions(device: torch.device) -> tuple[MatmulPrecision, ...]:
    """The precisions that `set_matmul_precision` accepts for `device`."""
    return tuple(_setters(device))


def _setters(device: torch.device) -> dict[MatmulPrecision, Callable[[], None]]:
    """How to set each precision that `device` has."""
    if device.type == "npu":
        module = device_module(device)
        switches: list[Any] = [getattr(module, name, None) for name in ("matmul", "conv")]
        if any(not hasattr(switch, "allow_hf32") for switch in switches):
            return {"fp32": _nothing}

        def hf32(allowed: bool) -> None:
            for switch in switches:
                switch.allow_hf32 = allowed

        # torch_npu lets convolutions use HF32 from the start, so that fp32 has to switch it off.
        return {"fp32": lambda: hf32(False), "hf32": lambda: hf32(True)}
    if device.type == "cuda":

        def tf32(allowed: bool) -> None:
            torch.backends.cudnn.allow_tf32 = allowed
            torch.set_float32_matmul_precision("high" if allowed else "highest")

        # No bf16: torch's "medium" computes in TF32 there.
        return {"fp32": lambda: tf32(False), "hf32": lambda: tf32(True)}
    setters: dict[MatmulPrecision, Callable[[], None]] = {"fp32": lambda: torch.set_float32_matmul_precision("highest")}
    # oneDNN computes in float32 without a word on a CPU that lacks the instructions.
    if device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        setters["bf16"] = lambda: torch.set_float32_matmul_precision("medium")
    return setters


def _nothing() -> None:
    """Float32 is all there is."""
