"""An HSTU on padded tensors, written from the published formulas with plain torch.nn.functional: the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from turbogr_plugin.models.hstu import HSTUConfig


def _buckets(query_times: Tensor, times: Tensor, count: int) -> Tensor:
    """[B, N, N], pair by pair."""
    result = torch.zeros(*times.shape, times.shape[1], dtype=torch.int64)
    for b, (row, columns) in enumerate(zip(query_times.tolist(), times.tolist(), strict=True)):
        for i, at in enumerate(row):
            for j, then in enumerate(columns):
                result[b, i, j] = min(int(math.log(max(abs(at - then), 1)) / 0.301), count - 1)
    return result


def padded_hstu(
    config: HSTUConfig,
    weights: Mapping[str, Tensor],
    embeddings: Tensor,
    valid: Tensor,
    times: Tensor,
    query_times: Tensor,
    dropout: list[Tensor] | None = None,
) -> Tensor:
    """The encoder's output.

    Args:
        config: of the model.
        weights: its named parameters.
        embeddings: [B, N, D]; what stands in padding is hidden by `valid`.
        valid: bool [B, N].
        times: [B, N].
        query_times: [B, N].
        dropout: factors of the input [B, N, D] and of each block [B, N, H * E].

    Returns:
        [B, N, D], undefined in padding.
    """
    size = config.dimensions()
    rows, width, dim = embeddings.shape
    x = embeddings * math.sqrt(dim) + weights["position_embedding"][:width]
    if dropout:
        x = x * dropout[0]
    place = torch.arange(width)
    seen = valid[:, None, :] & (place[None, :] <= place[:, None])
    for layer in range(size.blocks):
        own = {
            name.removeprefix(f"blocks.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        normed = functional.layer_norm(x, (dim,), own["input_norm.weight"], own["input_norm.bias"], 1e-6)
        u, v, q, k = torch.split(
            functional.silu(functional.linear(normed, own["uvqk.weight"])),
            [size.heads * width for width in (size.value_dim, size.value_dim, size.qk_dim, size.qk_dim)],
            dim=-1,
        )
        q, k = (y.reshape(rows, width, size.heads, size.qk_dim) for y in (q, k))
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        if config.time_buckets:
            buckets = _buckets(query_times, times, config.time_buckets)
            scores = scores + own["time_bias"][buckets][:, None]
        if config.position_bias:
            scores = scores + own["position_bias"][(place[:, None] - place[None]).clamp(0)]
        weight = torch.where(seen[:, None], functional.silu(scores) / size.max_length, 0.0)
        attended = torch.einsum("bhij,bjhe->bihe", weight, v.reshape(rows, width, size.heads, size.value_dim)).flatten(
            2
        )
        gated = u * functional.layer_norm(
            attended, attended.shape[-1:], own["attention_norm.weight"], own["attention_norm.bias"], 1e-6
        )
        if dropout:
            gated = gated * dropout[layer + 1]
        x = x + functional.linear(gated, own["output.weight"], own["output.bias"])
    return x
