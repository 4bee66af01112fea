"""The two rates that useful work is compared with: torch.mm, and the brgemm of ATen on tiles that stay in the cache.

mm is what a user can have; on some AMD parts MKL runs it at half of the machine's speed, so a share of it can exceed 1.
brgemm is the product inside the kernels here, [64 x 64] by [64 x 256], on all threads at once, and so their ceiling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from turbogr_plugin.kernels.cpu import build

MM_SIZE = 2048
MM_FLOPS = 2.0 * MM_SIZE**3


def _brgemm_rate(dtype: torch.dtype) -> float:
    """FLOP/s; where the machine has no products of bf16, those of float32, which the kernels then use."""
    try:
        return build.brgemm_rate(dtype)
    except ValueError:
        return build.brgemm_rate(torch.float32)


def mm(dtype: torch.dtype) -> Callable[[], object]:
    """torch.mm of two square matrices; what to time."""
    left, right = torch.randn(MM_SIZE, MM_SIZE).to(dtype), torch.randn(MM_SIZE, MM_SIZE).to(dtype)
    return lambda: torch.mm(left, right)


class Brgemm:
    """The rate of brgemm, taken once per turn. It repeats and times itself, for one tile takes microseconds."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flops_per_second: list[float] = []

    def __call__(self) -> None:
        """Takes the rate."""
        self._flops_per_second.append(_brgemm_rate(self._dtype))

    def last(self, turns: int) -> list[float]:
        """FLOP/s of the last turns."""
        return self._flops_per_second[-turns:]
