"""`KeyedJaggedTensor.from_jt_dict` keeps, where it is asked to, that the features have batch sizes of their own.

TorchRec 1.8 makes a batch of one size where the sizes happen to agree. Where they vary on other ranks, these exchange
another set of tensors than this one, and the lookup of the sharded tables raises on each of them. Which it is to be is
not in the dictionary, so that later versions of TorchRec take an argument, `force_variable_stride`; it is added here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.sparse.jagged_tensor:KeyedJaggedTensor.from_jt_dict"


def _with_forced_strides(original: Any) -> Any:
    made: Callable[[dict[str, JaggedTensor]], KeyedJaggedTensor] = original.__func__

    # TorchScript, and whoever asks for the signature, sees the function that is wrapped.
    @functools.wraps(made)
    def from_jt_dict(jt_dict: dict[str, JaggedTensor], force_variable_stride: bool = False) -> KeyedJaggedTensor:
        features = made(jt_dict)
        if not force_variable_stride or features.variable_stride_per_key():
            return features
        rows = [[size] for size in features.stride_per_key()]
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride_per_key_per_rank=torch.tensor(rows, dtype=torch.int32),
            length_per_key=features.length_per_key(),
        ).sync()

    return staticmethod(from_jt_dict)


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_with_forced_strides,
        why="a rank whose batch sizes happen to agree cannot share a variable batch: no argument says that they vary",
        upstream="torchrec 1.8.0, sparse/jagged_tensor.py:2274; https://github.com/meta-pytorch/torchrec/pull/4459",
        delete_when="the pull request is in the oldest TorchRec that is supported",
        written_for={_TARGET: "537a8ac7b9fae378"},
    ),
)
