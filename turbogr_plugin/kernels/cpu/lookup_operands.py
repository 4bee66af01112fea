"""What the C++ of the lookup and of its parts takes: one extension serves all of them (csrc/jagged_lookup*.cpp).

Left out: the choice of an implementation (dispatch.py), checks of what users give (lookup_layout.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu import build
from turbogr_plugin.kernels.cpu.operands import missing_tool
from turbogr_plugin.kernels.dispatch import MissingTool
from turbogr_plugin.kernels.fused_optimizers import Settings
from turbogr_plugin.kernels.lookup_call import StochasticRounding

EXTENSION = "jagged_lookup"
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_MOST_POSITIONS = 1 << 32


def extension() -> ModuleType:
    """The C++."""
    return build.load(EXTENSION)


def no_extension() -> MissingTool | None:
    """Why it cannot be had on this machine; None: it is there or can be built."""
    return missing_tool(EXTENSION)


def refuses_count(ids: Tensor) -> str | None:
    """Why so many ids cannot be served; None: they can."""
    count = ids.numel()
    return f"it counts positions in 32 bits, there are {count}" if count >= _MOST_POSITIONS else None


def refuses_dtypes(what: str, tensors: Iterable[Tensor], known: tuple[torch.dtype, ...] = TABLE_DTYPES) -> str | None:
    """Why tensors of such dtypes cannot be served; None: they can."""
    for tensor in tensors:
        if tensor.dtype not in known:
            return f"it serves {what} in {', '.join(map(str, known))}, got {tensor.dtype}"
    return None


def refuses_optimizer(optimizer: str, settings: Settings) -> str | None:
    """Why an optimizer cannot be served with such settings; None: it can."""
    if optimizer not in OPTIMIZERS:
        return f"it updates by {', '.join(OPTIMIZERS)}, got {optimizer}"
    if settings.max_norm > 0.0 and optimizer == "rowwise_adagrad":  # no other reads it
        return f"it does not limit the norm of rows, got max_norm={settings.max_norm}"
    if settings.rowwise_bias_correction:
        return "it does not count the updates of each row (rowwise_bias_correction)"
    return None


def settings_of(optimizer: str, settings: Settings, rounding: StochasticRounding | None) -> tuple[Any, ...]:
    """The settings of an optimizer as C++ takes them."""
    return (
        optimizer,
        float(settings.learning_rate),
        *(settings.eps, settings.beta1, settings.beta2),
        *(settings.weight_decay, settings.weight_decay_mode, settings.iteration),
        None if rounding is None else (rounding.seed, rounding.step),
    )


def rows_of(matrix: Tensor) -> Tensor:
    """[N, D] with the elements of a row side by side; the rows themselves may be any distance apart, or one."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()
