"""Ids without their repetitions in plain PyTorch, on any device.

How many ids are different only their values tell: the host waits for a device, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.lookup_call import UniqueCall
from turbogr_plugin.kernels.segments import complete_offsets, gather, search, segment_ids


def refuses(call: UniqueCall) -> str | None:
    """None: every call is served."""
    return None


def unique(call: UniqueCall) -> tuple[Tensor, Tensor | None, Tensor]:
    """Different ids of each table [U], their offsets [F + 1], and the place of each id among them [N] int64."""
    ids, offsets = call.ids, call.table_offsets
    if ids.numel() == 0:
        ends = None if offsets is None else torch.zeros_like(offsets)
        return ids.new_empty(0), ends, torch.zeros(0, dtype=torch.int64, device=ids.device)
    ordered, order = ids.sort(stable=True)
    table = None
    if offsets is not None and offsets.numel() > 2:
        by_position = segment_ids(offsets.to(torch.int64), ids.numel())
        table, again = gather(by_position, order).sort(stable=True)
        order, ordered = gather(order, again), gather(ordered, again)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    if table is not None:
        first[1:] |= table[1:] != table[:-1]
    counted = complete_offsets(first.to(torch.int64))  # different ids before each sorted one
    place = counted[1:] - 1
    inverse = torch.empty_like(place).scatter_(0, order, place)
    count = int(counted[-1])  # the one wait
    found = ids.new_empty(count).scatter_(0, place, ordered)
    if offsets is None:
        return found, None, inverse
    if table is None:
        return found, torch.cat([counted[:1], counted[-1:]])[: offsets.numel()].to(offsets.dtype), inverse
    ends = search(table, torch.arange(offsets.numel() - 1, device=ids.device))
    return found, torch.cat([counted[:1], gather(counted, ends)]).to(offsets.dtype), inverse
