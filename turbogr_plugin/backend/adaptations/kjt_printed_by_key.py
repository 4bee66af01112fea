"""A KeyedJaggedTensor prints under each key the values that the key has, on every device.

Given `length_per_key` and as many lengths as if all features had the same number of rows, TorchRec takes the values of
a key from the one and its rows from the other. Where the two disagree, what it prints is not what `keyed[key].values()`
gives. Here the values decide: a key prints its values, cut into rows where lengths or `length_per_key` have a border
(a row without values between two keys goes to the second).

Left out: the lookups. They read such a tensor by its lengths. On its way to an npu it is refused
(kjt_checked_on_host.py); what it means on CPU is TorchRec's to say, and the remedy is `stride_per_key_per_rank`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.sparse.jagged_tensor:KeyedJaggedTensor.__str__"


def rows_by_value(offsets: list[int], length_per_key: list[int]) -> list[list[int]]:
    """Lengths of the rows of each key, where the keys divide the values by `length_per_key`.

    Args:
        offsets: [rows + 1], from 0 on.
        length_per_key: number of values of each key.
    """
    ends = list(accumulate(length_per_key))
    rows: list[list[int]] = [[] for _ in ends]
    key = 0
    for start, end in pairwise(offsets):
        while key + 1 < len(ends) and start >= ends[key]:
            key += 1
        while key + 1 < len(ends) and end > ends[key]:
            rows[key].append(ends[key] - start)
            start, key = ends[key], key + 1
        rows[key].append(end - start)
    return rows


def _by_key(original: Callable[[KeyedJaggedTensor], str]) -> Callable[[KeyedJaggedTensor], str]:
    @functools.wraps(original)
    def __str__(self: KeyedJaggedTensor) -> str:
        given = self.length_per_key_or_none()
        laid_out = self.lengths_or_none() is not None or self.offsets_or_none() is not None
        if not given or not laid_out or self.variable_stride_per_key():
            return original(self)
        offsets: list[int] = self.offsets().tolist()
        borders = [offsets[min(self.stride() * key, len(offsets) - 1)] for key in range(len(given) + 1)]
        if borders == [0, *accumulate(given)]:
            return original(self)
        rows = rows_by_value(offsets, given)
        lengths = torch.tensor([length for of_key in rows for length in of_key], device=self.device())
        strides = torch.tensor([[len(of_key)] for of_key in rows], dtype=torch.int32)
        return original(
            KeyedJaggedTensor(
                self.keys(), self.values(), self.weights_or_none(), lengths, stride_per_key_per_rank=strides
            )
        )

    return __str__


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_by_key,
        why="printed rows are those of another key, where length_per_key divides the values otherwise than the rows",
        upstream="torchrec 1.8.0, sparse/jagged_tensor.py:3141; https://github.com/meta-pytorch/torchrec/issues/1075",
        delete_when="TorchRec prints the values that each key has, or refuses such a tensor",
        written_for={_TARGET: "6dbd1400a35bde75"},
    ),
)
