"""Which entry of a bias table a pair of tokens takes: buckets of time gaps, and position gaps.

HSTU (Zhai et al., 2024) adds two learned biases to each query-key pair: one by the bucket of the time between the two
events, one by their distance in the sequence. Both publish a logarithmic bucket, floor(log(max(|gap|, 1)) / 0.301).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.compiler import assume_constant_result

from turbogr_plugin.kernels.offsets import has_readable_values, row_ids

BUCKET_LOG_WIDTH = 0.301
_CPU = torch.device("cpu")
_BITS_OF_ONE, _BITS_OF_INFINITY = 0x3F800000, 0x7F800000

QueryTime = Literal["own", "next"]


def time_buckets(gaps: Tensor, num_buckets: int) -> Tensor:
    """The bucket of each time gap: floor(log(max(|gap|, 1)) / 0.301), clipped to [0, num_buckets - 1].

    Args:
        gaps: integer gaps of any shape (seconds in the published models).
        num_buckets: size of the bias table.

    Returns:
        int64, the shape of `gaps`.
    """
    # float32 as published: log and division then fall on the same side of a bucket's border everywhere.
    return _published_bucket(gaps.abs().clamp_(min=1).to(torch.float32), num_buckets)


def _published_bucket(gaps: Tensor, num_buckets: int) -> Tensor:
    """Of float32 gaps >= 1."""
    return gaps.log().div_(BUCKET_LOG_WIDTH).to(torch.int64).clamp_(max=num_buckets - 1)


def time_borders(num_buckets: int, device: torch.device = _CPU) -> Tensor:
    """Where the published buckets begin: float32 [num_buckets - 1], ascending. Shared: not to be written to.

    The bucket of a gap is the number of borders that are at most float32(|gap|), bit for bit what `time_buckets` says
    on CPU, and the same on every device, whatever its logarithm rounds to.

    Args:
        num_buckets: entries of the bias table, at least 1.
        device: where the borders are to be. A copy of a few hundred bytes is made for each call, from pinned memory:
            nothing waits, and no stream can meet a tensor that another one has not filled yet.
    """
    if device.type == "cpu":
        return _host_borders(num_buckets)
    return _pinned_borders(num_buckets).to(device, non_blocking=True)


@cache
def _pinned_borders(num_buckets: int) -> Tensor:
    return _host_borders(num_buckets).pin_memory()


@assume_constant_result
def _host_borders(num_buckets: int) -> Tensor:
    """A compiler that meets it takes the values, and looks neither into the cache nor into the bisection."""
    return _cached_borders(num_buckets)


@cache
def _cached_borders(num_buckets: int) -> Tensor:
    with unset_fake_temporarily():  # what is cached here has data
        return _bisected_borders(num_buckets)


def _bisected_borders(num_buckets: int) -> Tensor:
    # Bits of positive floats are ordered as the floats are: the smallest gap of each bucket is found by bisection.
    bucket = torch.arange(1, num_buckets)
    low = torch.full((num_buckets - 1,), _BITS_OF_ONE, dtype=torch.int32)
    high = torch.full((num_buckets - 1,), _BITS_OF_INFINITY, dtype=torch.int32)
    while bool((low < high).any()):
        middle = low + (high - low) // 2
        reached = _published_bucket(middle.view(torch.float32), num_buckets) >= bucket
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return low.view(torch.float32)


def bucket_numbers(gaps: Tensor, borders: Tensor) -> Tensor:
    """The bucket of each gap among any borders: int64, the shape of `gaps`.

    Args:
        gaps: int64, of any shape.
        borders: float32 [N - 1], ascending; the bucket is how many of them are at most float32(|gap|).
    """
    return torch.bucketize(gaps.abs().to(torch.float32), borders, right=True)


def query_times(timestamps: Tensor, offsets: Tensor, convention: QueryTime) -> Tensor:
    """The time that a query token is taken to stand at: [T] int64.

    "own": the time of its own event, so that nothing about the next one is known. "next": the time of the next event of
    its row, as in the published training code, where the request time of the prediction is known; the last token of a
    row, which has no next event, keeps its own.

    Raises:
        ValueError: another convention.
    """
    if convention not in get_args(QueryTime):
        raise ValueError(f"convention must be one of {get_args(QueryTime)}, got {convention!r}")
    if convention == "own" or timestamps.numel() == 0:
        return timestamps
    total = timestamps.numel()
    following = torch.arange(1, total + 1, device=timestamps.device)
    is_last = following == offsets[row_ids(offsets, total) + 1]
    return torch.where(is_last, timestamps, torch.cat([timestamps[1:], timestamps[-1:]]))


def check_borders(borders: Tensor) -> None:
    """Raises ValueError unless the borders of buckets ascend, where the host can read them.

    Args:
        borders: [N - 1] float32.
    """
    if not has_readable_values(borders):
        return
    # Not by differences: those of two infinite borders are NaN.
    if bool(borders.isnan().any()) or not bool((borders[1:] >= borders[:-1]).all()):
        raise ValueError(f"time_buckets must be ascending borders, got {borders.tolist()}")
