"""HSTU attention without bias as Meta's generative-recommenders computes it where it has no GPU: pad, attend, unpad.

Written anew from the semantics: the jagged q, k and v are padded by fbgemm's operator inside the step, scores of all
pairs are activated and divided, a mask per row hides the future and what stands behind the end of the row, and the
result is brought back to the jagged layout.

Letters: B rows, N the longest row, T tokens, H heads, D query/key dim, E value dim.
"""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import torch
from torch import Tensor
from torch.nn import functional


def _padded(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """[T, H, D] to [B, H, N, D]."""
    dense = torch.ops.fbgemm.jagged_to_padded_dense(values.flatten(1), [offsets], [longest], 0.0)
    return dense.unflatten(2, values.shape[1:]).transpose(1, 2)


def visible_pairs(offsets: Tensor, longest: int) -> Tensor:
    """[B, N, N] bool: the key stands at or before the query, and both within the row."""
    place = torch.arange(longest, device=offsets.device)
    within = place < offsets.diff()[:, None]
    return (place[:, None] >= place) & within[:, :, None] & within[:, None, :]


def hstu(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, longest: int, alpha: float, scale: float) -> Tensor:
    """Causal HSTU attention without bias.

    Args:
        q: [T, H, D].
        k: [T, H, D].
        v: [T, H, E].
        offsets: [B + 1] int64.
        longest: N, known on the host as in Meta's model.
        alpha: factor of the products.
        scale: factor of the activated scores.

    Returns:
        [T, H, E].
    """
    scores = torch.einsum("bhxa,bhya->bhxy", *(_padded(x, offsets, longest) for x in (q, k))) * alpha
    weights = functional.silu(scores) * scale * visible_pairs(offsets, longest)[:, None]
    attended = torch.einsum("bhxy,bhye->bhxe", weights, _padded(v, offsets, longest))
    jagged = torch.ops.fbgemm.dense_to_jagged(attended.transpose(1, 2).flatten(2), [offsets], q.shape[0])[0]
    return jagged.view(v.shape)
