"""Ids without their repetitions, table by table: what is looked up once and handed to every position that names it.

TorchRec's deduplication of ids (`use_index_dedup`) has a CUDA kernel only (fbgemm's jagged_unique_indices); this one
runs on CPU threads or on the device. How many ids are different only their values tell: a device is waited for, once.

Left out: hashing. Ids are sorted, so that the result depends on nothing but the ids.

Letters: N ids, F tables, U different ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.custom_operator import define_operator
from turbogr_plugin.kernels.lookup_call import UniqueCall
from turbogr_plugin.kernels.segments import check_indices, check_offsets_shape


def _checked(ids: Tensor, table_offsets: Tensor | None) -> UniqueCall:
    check_indices(ids, "ids")
    if table_offsets is None:
        return UniqueCall(ids, None)
    check_offsets_shape(table_offsets, "table_offsets")
    if table_offsets.device != ids.device:
        raise ValueError(f"table_offsets must be on the device of ids ({ids.device}), got {table_offsets.device}")
    return UniqueCall(ids, table_offsets)


def check_offset_values(name: str, offsets: Tensor, count: int) -> None:
    """Raises ValueError unless offsets go from 0 to `count` without decreasing; on a device they are not read."""
    if offsets.device.type != "cpu":
        return
    if int(offsets[0]) != 0 or int(offsets[-1]) != count:
        raise ValueError(
            f"{name} must go from 0 to the number of ids, {count}; got {int(offsets[0])} to {int(offsets[-1])}"
        )
    if bool((offsets[1:] < offsets[:-1]).any()):
        segment = int((offsets[1:] < offsets[:-1]).to(torch.int32).argmax())
        raise ValueError(
            f"{name} must not decrease, got {int(offsets[segment])} and then {int(offsets[segment + 1])} at {segment}"
        )


def _body(ids: Tensor, table_offsets: Tensor | None = None, *, implementation: str | None = None) -> tuple[Tensor, ...]:
    call = _checked(ids, table_offsets)
    if table_offsets is not None:
        check_offset_values("table_offsets", table_offsets, ids.numel())
    found, offsets, inverse = dispatch.serve("jagged_unique", call, implementation).unique(call)
    return found, ids.new_empty(0) if offsets is None else offsets, inverse


def _shapes(
    ids: Tensor, table_offsets: Tensor | None = None, *, implementation: str | None = None
) -> tuple[Tensor, ...]:
    _checked(ids, table_offsets)
    different = torch.library.get_ctx().new_dynamic_size()
    offsets = ids.new_empty(0) if table_offsets is None else table_offsets.new_empty(table_offsets.shape)
    return ids.new_empty(different), offsets, ids.new_empty(ids.shape, dtype=torch.int64)


_operator = define_operator(
    "jagged_unique",
    "(Tensor ids, Tensor? table_offsets=None, *, str? implementation=None) -> (Tensor, Tensor, Tensor)",
    _body,
    _shapes,
)


def jagged_unique(
    ids: Tensor, table_offsets: Tensor | None = None, *, implementation: str | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Finds the different ids of each table.

    Args:
        ids: [N] int32 or int64, any values, grouped by table.
        table_offsets: [F + 1] int32 or int64, where the ids of each table begin; from 0 to N. None: there is one table.
        implementation: reference, cpu or triton; None: the fastest that serves the call.

    Returns:
        The different ids [U], ascending within each table, in the dtype of `ids`; where those of each table begin
        [F + 1], in the dtype of `table_offsets` (None without it); for each id its place among them, [N] int64.

    Raises:
        ValueError: shapes, dtypes or (looked at on CPU) offsets that do not fit, or an `implementation` that does not
            serve the call.
    """
    found, offsets, inverse = _operator(ids, table_offsets, implementation=implementation)
    return found, None if table_offsets is None else offsets, inverse
