"""Ids without their repetitions, in C++ (csrc/jagged_lookup_unique.cpp): a radix sort on all threads by table."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu.lookup_operands import extension, no_extension, refuses_count, refuses_dtypes
from turbogr_plugin.kernels.lookup_call import UniqueCall


def refuses(call: UniqueCall) -> str | None:
    """Why the C++ cannot serve this call; None: it can."""
    return refuses_dtypes("ids", [call.ids], (torch.int32, torch.int64)) or refuses_count(call.ids) or no_extension()


def unique(call: UniqueCall) -> tuple[Tensor, Tensor | None, Tensor]:
    """Unique ids [U], ascending within each table; where each table's begin [F + 1]; the place of each id [N]."""
    offsets = call.table_offsets
    tables = [0, call.ids.numel()] if offsets is None else offsets.tolist()
    ids, begins, inverse = extension().unique(call.ids.contiguous(), tables)
    return ids, None if offsets is None else begins.to(offsets.dtype), inverse
