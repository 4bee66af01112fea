"""Which entry of a bias table a pair of tokens takes: buckets of time gaps, and position gaps.

HSTU (Zhai et al., 2024) adds two learned biases to each query-key pair: one by the bucket of the time between the two
events, one by their distance in the sequence. Both publish a logarithmic bucket, floor(log(max(|gap|, 1)) / 0.301).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

BUCKET_LOG_WIDTH = 0.301

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
    logs = gaps.abs().clamp_(min=1).to(torch.float32).log_()
    return logs.div_(BUCKET_LOG_WIDTH).to(torch.int64).clamp_(max=num_buckets - 1)


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
    shifted = torch.cat([timestamps[1:], timestamps[-1:]])
    last = (offsets[1:] - 1)[offsets.diff() > 0]
    shifted[last] = timestamps[last]
    return shifted
