"""A KeyedJaggedTensor with keys but a batch of no rows becomes a dictionary, on every device.

TorchRec 1.8 takes its lengths and offsets apart by key, of which an empty tensor gives nothing. Here each key gets no
lengths and the offsets [0], as later versions of TorchRec do it. A rank whose last batch is empty gets there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from turbogr_plugin.backend.adaptation import Adaptation

_TARGET = "torchrec.sparse.jagged_tensor:_maybe_compute_kjt_to_jt_dict"


def _with_empty_batches(original: Callable[..., dict[str, JaggedTensor]]) -> Callable[..., dict[str, JaggedTensor]]:
    @functools.wraps(original)
    def _maybe_compute_kjt_to_jt_dict(
        stride: int,
        stride_per_key: list[int],
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        lengths: Tensor,
        variable_stride_per_key: bool,
        weights: Tensor | None,
        jt_dict: dict[str, JaggedTensor] | None,
        compute_offsets: bool = True,
    ) -> dict[str, JaggedTensor]:
        if stride or variable_stride_per_key or lengths.numel() or jt_dict is not None or not length_per_key:
            options: dict[str, Any] = {"compute_offsets": compute_offsets}
            arguments = (stride, stride_per_key, keys, length_per_key, values, lengths, variable_stride_per_key)
            return original(*arguments, weights, jt_dict, **options)
        offsets = lengths.new_zeros(1) if compute_offsets else None
        return {key: JaggedTensor(values, weights, lengths, offsets) for key in keys}

    # TorchScript compiles the original instead (the mark of torch.jit.script_if_tracing): it cannot compile a wrapper.
    _maybe_compute_kjt_to_jt_dict.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
    _maybe_compute_kjt_to_jt_dict.__original_fn = original  # type: ignore[attr-defined]
    return _maybe_compute_kjt_to_jt_dict


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TARGET,
        replace=_with_empty_batches,
        why="to_dict of a KeyedJaggedTensor without rows raises 'tuple index out of range'",
        upstream="torchrec 1.8.0, sparse/jagged_tensor.py:1627; https://github.com/meta-pytorch/torchrec/pull/4638",
        delete_when="the pull request is in the oldest TorchRec that is supported",
        written_for={_TARGET: "61c0f01fd96dec6c"},
    ),
)
