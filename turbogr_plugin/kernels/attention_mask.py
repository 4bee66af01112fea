"""Which pairs of tokens attend to each other: causal order, targets, a contextual prefix and a local window.

This is the one place that says so; each implementation follows it, and the plain PyTorch one calls it. A row of L
tokens holds c contextual tokens, then history, then n targets (the candidates of a ranking request). Tokens carry ids:

    id(x) = min(max(x - c + 1, 0), last),  last = L - n - (c - 1)     for c > 0
    id(x) = min(x, last),                  last = L - n               for c = 0

so contextual tokens share id 0 and targets share `last`, which no other token reaches. With dist = id(i) - id(j), or
its absolute value without causal order, query i sees key j

    if i = j,
    or if dist > 0 and, with a window of W, (dist <= W, or full_tail > 0 and id(i) >= last - full_tail),
    or if c > 0, id(i) = 0 and id(j) < last  (contextual tokens see each other and the whole history).

Targets thus see history and themselves, never each other; a window holds them, too, unless there is a full tail. This
is the mask of Meta's generative-recommenders. Where contextual tokens and targets do not fit into the row together
(c + n > L) each token sees itself alone.

Letters: T tokens, B rows, L length of a row, n queries and m keys of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.kernels.offsets import has_readable_values, row_ids


class TokenIds(NamedTuple):
    """Ids of all tokens of a batch, on its device; found without waiting for it."""

    ids: Tensor
    """[T] int64."""
    last: Tensor
    """[B] int64: the id that targets take, one more than the greatest of history."""


def token_ids(offsets: Tensor, total: int, num_targets: Tensor | None, num_contextual: Tensor | None) -> TokenIds:
    """The id of each token, and of each row the id that its targets take.

    Args:
        offsets: [B + 1] int32 or int64.
        total: T.
        num_targets: [B] int32 or int64, targets at the end of each row; None: none.
        num_contextual: [B] int32 or int64, contextual tokens at its beginning; None: none.
    """
    offsets = offsets.to(torch.int64)
    rows = row_ids(offsets, total)
    ids = torch.arange(total, device=offsets.device) - offsets[rows]
    last = offsets.diff()
    if num_targets is not None:
        last = last - num_targets
    if num_contextual is not None:
        shift = (num_contextual.to(torch.int64) - 1).clamp(min=0)
        last = last - shift
        ids = (ids - shift[rows]).clamp(min=0)
    return TokenIds(torch.minimum(ids, last[rows]), last)


def allowed_pairs(
    query_ids: Tensor,
    key_ids: Tensor,
    last: Tensor,
    contextual: Tensor | None,
    *,
    first_query: int,
    first_key: int,
    causal: bool,
    window: int | None,
    full_tail: int,
) -> Tensor:
    """Which keys each query of a chunk of one row sees: bool [n, m].

    Args:
        query_ids: [n], ids of consecutive tokens of the row.
        key_ids: [m], the same.
        last: [], the id that the row's targets take.
        contextual: [], how many contextual tokens the row has; None: none.
        first_query: position in the row (or in the batch) of the first query.
        first_key: position of the first key, counted from the same token.
        causal: whether a token sees only what stands before it.
        window: how far a token sees, in ids; None: as far as it may.
        full_tail: how many of the last ids of history, and with them all targets, see everything they may in spite of
            the window; 0: none, targets neither.
    """
    dist = query_ids[:, None] - key_ids[None]
    if not causal:
        dist = dist.abs()
    allowed = dist > 0
    if window is not None:
        near = dist <= window
        allowed &= near | (query_ids[:, None] >= last - full_tail) if full_tail else near
    if contextual is not None:
        allowed |= (query_ids[:, None] == 0) & (key_ids[None] < last) & (contextual > 0)
    i = torch.arange(first_query, first_query + query_ids.numel(), device=query_ids.device)
    j = torch.arange(first_key, first_key + key_ids.numel(), device=query_ids.device)
    return allowed.logical_or_(i[:, None] == j[None])


def check_mask(
    offsets: Tensor,
    num_targets: Tensor | None,
    num_contextual: Tensor | None,
    window: int | None,
    full_tail: int,
) -> None:
    """Raises ValueError for shapes, dtypes and sizes that do not fit. Reads no value of a tensor."""
    rows = offsets.numel() - 1
    for name, numbers in (("num_targets", num_targets), ("num_contextual", num_contextual)):
        if numbers is None:
            continue
        if tuple(numbers.shape) != (rows,) or numbers.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be int32 or int64 of shape [B] with B = {rows}, "
                f"got {numbers.dtype} of shape {tuple(numbers.shape)}"
            )
        if numbers.device != offsets.device:
            raise ValueError(f"{name} must be on the device of offsets ({offsets.device}), got {numbers.device}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for no window, got {window}")
    if full_tail < 0:
        raise ValueError(f"full_tail must be at least 0, got {full_tail}")


def check_mask_values(offsets: Tensor, num_targets: Tensor | None, num_contextual: Tensor | None) -> None:
    """Raises ValueError for numbers of targets or contextual tokens that no row can have.

    Only where the host can read them (see `has_readable_values`); elsewhere such rows get meaningless output, read from
    within the tensors. `offsets` must have been checked.
    """
    if not has_readable_values(offsets):
        return
    if num_targets is not None:
        bad = (num_targets < 0) | (num_targets > offsets.diff())
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            length = int(offsets[row + 1] - offsets[row])
            raise ValueError(
                f"num_targets[{row}] must be between 0 and the row's length {length}, got {num_targets[row]}"
            )
    if num_contextual is not None and bool((num_contextual < 0).any()):
        row = int((num_contextual < 0).nonzero()[0])
        raise ValueError(f"num_contextual[{row}] must be at least 0, got {int(num_contextual[row])}")
