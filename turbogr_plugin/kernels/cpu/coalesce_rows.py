"""Sums of the rows that belong to one id, in C++ (csrc/jagged_lookup_unique.cpp): in the order of the positions."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu.lookup_operands import (
    TABLE_DTYPES,
    extension,
    no_extension,
    refuses_count,
    refuses_dtypes,
    rows_of,
)
from turbogr_plugin.kernels.lookup_call import CoalesceCall


def refuses(call: CoalesceCall) -> str | None:
    """Why the C++ cannot serve this call; None: it can."""
    return (
        refuses_dtypes("ids", [call.ids], (torch.int32, torch.int64))
        or refuses_dtypes("grads", [call.grads], (*TABLE_DTYPES, torch.float64))
        or refuses_count(call.ids)
        or no_extension()
    )


def coalesce(call: CoalesceCall) -> tuple[Tensor, Tensor]:
    """Ids [U], ascending, and their rows' sums [U, D] in float32 (float64 for float64)."""
    ids, rows = extension().coalesce(call.ids.contiguous(), rows_of(call.grads.detach()))
    return ids, rows
