"""Calls of the operators on jagged batches, and the comparison of a kernel's answer with the reference's.

The reference runs in float64 on the same (rounded) inputs. What is compared is the largest error over the largest
element, for the output and for each gradient.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.kernels.attention_call import FuxiAttentionCall, HSTUAttentionCall
from turbogr_plugin.kernels.gated_norm_call import GatedNormCall, Norm
from turbogr_plugin.kernels.relative_bias import time_borders

LARGEST_ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}

# Empty rows at the beginning, in the middle and at the end, a row of one, lengths at and beside the borders of tiles.
LENGTHS = (0, 5, 33, 0, 1, 64, 130, 31, 0)


def hstu_call(
    dtype: torch.dtype,
    *,
    seed: int = 0,
    dim: int = 64,
    value_dim: int = 64,
    heads: int = 2,
    lengths: tuple[int, ...] = LENGTHS,
    causal: bool = True,
    biases: bool = True,
    per_head: bool = False,
    buckets: int = 128,
    positions: int = 48,
    targets: bool | int = False,
    contextual: bool | int = False,
    window: int | None = None,
    full_tail: int = 0,
    next_times: bool = False,
    offsets_dtype: torch.dtype = torch.int64,
) -> HSTUAttentionCall:
    """A call of hstu_attention; q, k and v are parts of one tensor, as a model's projection makes them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    tokens = int(offsets[-1])

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.5

    q, k, v = random(tokens, heads, 2 * dim + value_dim).to(dtype).split([dim, dim, value_dim], dim=2)
    # Milliseconds, which no float32 holds; gaps from none to half a year, not all in order.
    gaps = torch.exp(torch.rand(tokens, generator=generator) * 23.5).to(torch.int64) - 1
    times = 1_700_000_000_000 + gaps.cumsum(0)
    times[::7] -= 5
    table = (heads,) if per_head else ()
    by_time, by_position = random(*table, buckets), random(*table, positions)
    call = HSTUAttentionCall(q, k, v, offsets.to(offsets_dtype), dim**-0.5, 1 / 130, causal=causal)
    if targets:
        least, most = (0, 7) if targets is True else (targets // 2, targets)
        found = torch.randint(least, most + 1, rows.shape, generator=generator)
        call = call._replace(num_targets=torch.minimum(found, rows))
    if contextual:
        least, most = (0, 4) if contextual is True else (contextual // 2, contextual)
        call = call._replace(num_contextual=torch.randint(least, most + 1, rows.shape, generator=generator))
    if biases:
        asked = times + 1000 if next_times else times
        call = call._replace(timestamps=times, query_timestamps=asked, time_bias=by_time)
        call = call._replace(time_borders=time_borders(buckets), position_bias=by_position if causal else None)
    return call._replace(window=window, full_tail=full_tail)


def fuxi_call(dtype: torch.dtype, *, decay: Tensor | None = None, **arguments: Any) -> FuxiAttentionCall:
    """A call of fuxi_attention with buckets of time, or with (a, r, p) of a decay."""
    call = hstu_call(dtype, **arguments)._asdict()
    if decay is not None:
        call |= {"time_bias": None, "time_borders": None, "time_decay": decay}
    return FuxiAttentionCall(**call, bias_scale=1 / 64)


def norm_call(
    dtype: torch.dtype,
    tokens: int,
    width: int,
    norm: Norm,
    *,
    groups: int = 1,
    p: float = 0.0,
    affine: bool = True,
    key: tuple[int, int, int] = (0xDEADBEEF, 0x80000001, 7),
) -> GatedNormCall:
    """A call of gated_norm."""
    generator = torch.Generator().manual_seed(tokens)
    x, gate = (torch.randn(tokens, width, generator=generator).to(dtype) + 0.25 for _ in range(2))
    weight, bias = (torch.randn(width, generator=generator) + 1 for _ in range(2)) if affine else (None, None)
    samples = torch.randint(0, 1 << 56, (tokens,), generator=generator)
    dropout = (samples, torch.arange(tokens), *key, p) if p else ()
    return GatedNormCall(x, gate, weight, bias, norm, groups, 1e-6, *dropout)


class Errors(NamedTuple):
    """Largest error over largest element."""

    forward: float
    gradients: tuple[float, ...]

    @property
    def largest(self) -> float:
        """Of all; NaN counts as infinite."""
        return max(float("inf") if error != error else error for error in (self.forward, *self.gradients))


def errors(kernels: ModuleType, reference: ModuleType, call: Any, *, backward: bool = True) -> Errors:
    """How far the kernels' answers to a call are from the reference's."""
    first: Tensor = call[0]
    exact = type(call)(*(_widened(name, value) for name, value in zip(call._fields, call, strict=True)))
    out, expected = kernels.forward(call), reference.forward(exact)
    assert out.dtype == first.dtype and out.is_contiguous()
    forward = _error(out, expected)
    if not backward:
        return Errors(forward, ())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    pairs = zip(kernels.backward(grad, call), reference.backward(grad.double(), exact), strict=True)
    return Errors(forward, tuple(_error(x, y) for x, y in pairs if not (x is None and y is None)))


def _widened(name: str, value: Any) -> Any:
    # Borders are float32 by definition: which bucket a gap falls into depends on it.
    if name == "time_borders" or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.double()


def _error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.double() - expected).abs().max() / expected.abs().max())
