"""The device of a sharded table on a rank that holds none of its shards is the npu of that rank, not cuda.

Loading a checkpoint asks every entry of the state dict for its device, also where a table-wise sharded table lives on
another rank. torch answers "cpu" for gloo and the current cuda device for any other group. The table's own metadata
knows better: its shards are placed on npu. torch has a table of operators that users override, so the entry for
`device` goes there; `ShardedTensor.__torch_function__` itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from turbogr_plugin.backend.adaptation import Adaptation

_PACKAGE = "torch.distributed._shard.sharded_tensor"
_TABLE = f"{_PACKAGE}.api:_CUSTOM_SHARDED_OPS"
_DISPATCH = f"{_PACKAGE}.api:ShardedTensor.__torch_function__"
_DEVICE = f"{_PACKAGE}._ops.tensor_ops:tensor_device"


def _device(types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, process_group: Any) -> torch.device:
    from torch.distributed._shard.sharded_tensor._ops.tensor_ops import tensor_device

    table = args[0]
    if not table.local_shards():
        placements = [shard.placement for shard in table.metadata().shards_metadata]
        if placements and all(place is not None and place.device().type == "npu" for place in placements):
            return torch.device("npu", torch.accelerator.current_device_index())
    return tensor_device(types, args, kwargs, process_group)


def _with_device(original: dict[Callable[..., Any], Callable[..., Any]]) -> dict[Callable[..., Any], Any]:
    return {**original, torch.Tensor.device.__get__: _device}


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TABLE,
        replace=_with_device,
        why="loading table-wise state raises on ranks without a shard: torch.cuda is asked for the current device",
        upstream="torch 2.13.0, distributed/_shard/sharded_tensor/_ops/tensor_ops.py:54",
        delete_when="tensor_device asks the accelerator, or the metadata's placements",
        written_for={_TABLE: "44136fa355b3678a", _DISPATCH: "fa5d9247daa5777c", _DEVICE: "47f833118ae359d2"},
        also=(f"{_PACKAGE}:_CUSTOM_SHARDED_OPS",),
    ),
)
