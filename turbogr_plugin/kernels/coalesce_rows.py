"""Duplicate ids and their gradients as different ids and sums: the form in which groups of ranks exchange gradients.

The gradients of an id are added in float32 (float64 for float64) in ascending order of positions, starting from the
first, so that the sums do not depend on threads, and those of dyadic gradients on nothing at all. How many ids are
different only their values tell: a device is waited for, once.

Left out: sparse tensors of torch, whose `coalesce` fixes no order of the sum.

Letters: N ids, D width, U different ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.custom_operator import define_operator
from turbogr_plugin.kernels.lookup_call import CoalesceCall
from turbogr_plugin.kernels.segments import check_indices


def _checked(ids: Tensor, grads: Tensor) -> CoalesceCall:
    check_indices(ids, "ids")
    if grads.dim() != 2 or grads.shape[0] != ids.shape[0] or not grads.is_floating_point():
        raise ValueError(
            f"grads must be floating point of shape [N, D] with N = {ids.shape[0]}, got {grads.dtype} of shape "
            f"{tuple(grads.shape)}"
        )
    if grads.device != ids.device:
        raise ValueError(f"grads must be on the device of ids ({ids.device}), got {grads.device}")
    return CoalesceCall(ids, grads)


def _body(ids: Tensor, grads: Tensor, *, implementation: str | None = None) -> tuple[Tensor, ...]:
    call = _checked(ids, grads)
    found: tuple[Tensor, ...] = dispatch.serve("coalesce_rows", call, implementation).coalesce(call)
    return found


def _shapes(ids: Tensor, grads: Tensor, *, implementation: str | None = None) -> tuple[Tensor, ...]:
    _checked(ids, grads)
    different = torch.library.get_ctx().new_dynamic_size()
    dtype = torch.float64 if grads.dtype == torch.float64 else torch.float32
    return ids.new_empty(different), grads.new_empty(different, grads.shape[1], dtype=dtype)


_operator = define_operator(
    "coalesce_rows", "(Tensor ids, Tensor grads, *, str? implementation=None) -> (Tensor, Tensor)", _body, _shapes
)


def coalesce_rows(ids: Tensor, grads: Tensor, *, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Sums the gradients of each id.

    Args:
        ids: [N] int32 or int64, any values.
        grads: [N, D] floating point, any strides. NaN and infinities go into the sums of their ids.
        implementation: reference, cpu or triton; None: the fastest that serves the call.

    Returns:
        The different ids [U], ascending, in the dtype of `ids`; the sums [U, D], float32 (float64 for float64).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or an `implementation` that does not serve the call.
    """
    found, rows = _operator(ids, grads.detach(), implementation=implementation)
    return found, rows
