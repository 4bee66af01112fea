"""A KeyedJaggedTensor is checked where its lengths can be read for nothing: on the host, on its way to an NPU.

TorchRec checks the first batch of a module and no other. On CPU and CUDA a later batch whose lengths are negative, or
do not add up to its values, ends in an error of some operator or in memory that is not its own. Kernels on an NPU that
never wait for it cannot raise: they would return embeddings of other ids. Loaders make their batches on the host, so
that this is before any collective.

Left out: tensors made on the NPU itself, which nobody can check without waiting for it; ids, which the table lookups
check by their bounds-check mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.sparse.jagged_tensor:KeyedJaggedTensor.to"


def check_layout(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Raises ValueError, with the numbers, unless lengths or offsets (on the host) lay out the values.

    Args:
        values: [N].
        lengths: [F * B] integers or None.
        offsets: [F * B + 1] integers or None.
    """
    total = values.shape[0]
    if lengths is not None and lengths.numel() > 0:
        shortest = int(lengths.argmin())
        if int(lengths[shortest]) < 0:
            raise ValueError(f"lengths must not be negative, got {int(lengths[shortest])} at position {shortest}")
        if int(lengths.sum()) != total:
            raise ValueError(f"lengths must add up to the {total} values, got {int(lengths.sum())}")
    if offsets is not None and offsets.numel() > 0:
        steps = offsets.diff()
        if steps.numel() > 0 and int(steps.min()) < 0:
            at = int(steps.argmin())
            raise ValueError(f"offsets must not decrease, got {offsets[at : at + 2].tolist()} from position {at} on")
        if int(offsets[0]) != 0 or int(offsets[-1]) != total:
            raise ValueError(
                f"offsets must go from 0 to the {total} values, got {int(offsets[0])} to {int(offsets[-1])}"
            )


def check_keys(lengths: Tensor | None, offsets: Tensor | None, rows: list[int], length_per_key: list[int]) -> None:
    """Raises ValueError, with the numbers, unless each key's rows (on the host) have as many values as it is said to.

    Lengths for another number of rows are left to TorchRec, which names both numbers when it takes them apart.

    Args:
        lengths: [sum of rows] integers or None.
        offsets: [sum of rows + 1] integers or None.
        rows: by key.
        length_per_key: values by key.
    """
    lengths = offsets.diff() if lengths is None and offsets is not None else lengths
    if lengths is None or len(rows) != len(length_per_key) or lengths.numel() != sum(rows):
        return
    found = [int(of_key.sum()) for of_key in lengths.split(rows)]
    if found != list(length_per_key):
        raise ValueError(
            f"length_per_key must be the sums of the lengths of {rows} rows, which are {found}, got {length_per_key}; "
            "for keys with different numbers of rows give stride_per_key_per_rank"
        )


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Any:
        # By type: neither the proxies of a tracer nor fake tensors have numbers.
        if type(self._values) is Tensor and self._values.device.type == "cpu" and torch.device(device).type == "npu":
            check_layout(self._values, self._lengths, self._offsets)
            if self._length_per_key is not None:
                check_keys(self._lengths, self._offsets, self.stride_per_key(), self._length_per_key)
        return original(self, device, non_blocking, dtype)

    return to


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_checking,
        why="bad lengths of a batch on npu give embeddings of other ids, without a word",
        upstream="torchrec 1.8.0, sparse/jagged_tensor.py:3073",
        delete_when="TorchRec checks the lengths of every batch",
        written_for={_TARGET: "0f202ef8195734e3"},
    ),
)
