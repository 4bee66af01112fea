"""What the fused attention is compared with: eager PyTorch on padded rows, with the bias as a dense tensor.

HSTU and FuXi as the open research code writes them: [B, N, H, D] with N the longest row of the batch, two batched
products, the bias of all pairs looked up in each step, no loop over rows or heads. Tables are read by index_select, as
there: the gradient of plain indexing is several times slower on CPU, and would flatter us. Masks and position gaps,
which depend on N alone, are made once, outside of what is timed.

Letters: B rows, N the longest row, T tokens, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def pad(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T, ...] to [B, N, ...], zeros behind the end of each row."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(list(lengths))), batch_first=True)


def unpad(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, N, ...] to [T, ...]."""
    return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What the pairs of a padded batch look like."""

    visible: Tensor
    """[N, N] of the dtype of q, 1 where the key does not stand behind the query, else 0."""
    position_gaps: Tensor
    """[N, N] int64, i - j, at least 0."""
    times: Tensor
    """[B, N] int64 seconds."""

    @classmethod
    def of(cls, times: Tensor, dtype: torch.dtype) -> Pairs:
        """Of rows whose events happened at `times` [B, N]."""
        place = torch.arange(times.shape[1], device=times.device)
        gaps = (place[:, None] - place).clamp(min=0)
        visible = torch.ones(gaps.shape, dtype=dtype, device=times.device).tril()
        return cls(visible=visible, position_gaps=gaps, times=times)

    def time_bias(self, table: Tensor) -> Tensor:
        """[B, N, N]: the entry of each pair, by the published buckets floor(log(max(|gap|, 1)) / 0.301)."""
        gaps = (self.times[:, :, None] - self.times[:, None, :]).abs().clamp(min=1)
        buckets = (gaps.float().log() / 0.301).long().clamp(max=table.numel() - 1)
        return table.index_select(0, buckets.view(-1)).view(buckets.shape)

    def position_bias(self, table: Tensor) -> Tensor:
        """[N, N]: the entry of each pair."""
        gaps = self.position_gaps.clamp(max=table.numel() - 1)
        return table.index_select(0, gaps.view(-1)).view(gaps.shape)


def hstu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs,
    time_table: Tensor | None,
    position_table: Tensor | None,
    *,
    alpha: float,
    scale: float,
) -> Tensor:
    """Causal HSTU attention.

    Args:
        q: [B, N, H, D].
        k: [B, N, H, D].
        v: [B, N, H, E].
        pairs: of the batch.
        time_table: [buckets], or None for no bias by time; taken in the dtype of q, like all of it.
        position_table: [gaps], or None for no bias by position.
        alpha: factor of the products.
        scale: factor of the activated scores.

    Returns:
        [B, N, H, E]; what stands behind the end of a row means nothing.
    """
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * alpha
    if time_table is not None:
        scores = scores + pairs.time_bias(time_table.to(q.dtype))[:, None]
    if position_table is not None:
        scores = scores + pairs.position_bias(position_table.to(q.dtype))
    weights = functional.silu(scores) * scale * pairs.visible
    return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def fuxi(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs,
    time_table: Tensor,
    position_table: Tensor,
    *,
    alpha: float,
    scale: float,
    bias_scale: float,
) -> Tensor:
    """Causal FuXi attention: a semantic, a temporal and a positional channel, side by side.

    Args: as for `hstu`, and bias_scale, the factor of the two other channels.

    Returns:
        [B, N, H, 3 E].
    """
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * alpha
    weights = functional.silu(scores) * scale * pairs.visible
    semantic = torch.einsum("bhnm,bmhd->bnhd", weights, v)
    temporal = torch.einsum("bnm,bmhd->bnhd", pairs.time_bias(time_table) * pairs.visible, v)
    positional = torch.einsum("nm,bmhd->bnhd", pairs.position_bias(position_table) * pairs.visible, v)
    return torch.cat([semantic, temporal * bias_scale, positional * bias_scale], dim=-1)
