"""What the C++ kernels of the dense operators take: dtypes and layouts of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu import build
from turbogr_plugin.kernels.dispatch import MissingTool


def missing_tool(family: str) -> MissingTool | None:
    """Why a family's kernel cannot be built on this machine; None: it is there or can be built."""
    missing = build.missing(family)
    return None if missing is None else MissingTool(missing)


def only_float32(**tensors: Tensor) -> str | None:
    """Why a kernel of float32 alone cannot serve these; None: it can."""
    others = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype != torch.float32]
    return f"it serves float32 alone and {' and '.join(others)}" if others else None


def floats(parameter: Tensor | None) -> Tensor | None:
    """A bias or the like in float32, contiguous."""
    return None if parameter is None else parameter.float().contiguous()


def contiguous_rows(x: Tensor) -> Tensor:
    """x [T, W] with the elements of a row side by side; the rows themselves may be any distance apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()
