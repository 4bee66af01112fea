"""Lengths become Python lists on npu by one copy on the current stream, as on cuda, without stopping the device.

TorchRec's jagged tensors keep their lengths per key as lists, and its all-to-alls need the sizes of what they receive
on the host. On cuda it copies them without blocking and waits for the current stream alone; on any other device it
calls `Tensor.tolist`, which may wait for every stream of the device. The host still waits here, for as long as it has
to: these are the waits that TorchRec itself makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, List  # noqa: UP035  TorchScript, which compiles what is defined here, knows List alone

import torch

from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.memory import copy_to_host

_TO_LIST = "torchrec.sparse.jagged_tensor:_safe_tolist"
_TO_LIST_2D = "torchrec.distributed.dist_data:_safe_tolist_2d"


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0 or torch.compiler.is_compiling():  # a traced program has no events, as for cuda
        return tensor
    return copy_to_host(tensor.contiguous()).wait()


@torch.jit.unused
def _list_of_npu(tensor: torch.Tensor) -> List[int]:  # noqa: UP006
    return _on_host(tensor).tolist()


def _to_list(original: Callable[[torch.Tensor], list[int]]) -> Callable[[torch.Tensor], list[int]]:
    # No functools.wraps: TorchScript, which compiles KeyedJaggedTensor and so this, would read the wrapped source.
    def _safe_tolist(tensor: torch.Tensor) -> List[int]:  # noqa: UP006
        if torch.jit.is_scripting() or tensor.device.type != "npu":  # type: ignore[attr-defined]
            return original(tensor)
        return _list_of_npu(tensor)

    return _safe_tolist


def _to_list_2d(original: Callable[[torch.Tensor], list[Any]]) -> Callable[[torch.Tensor], list[Any]]:
    @functools.wraps(original)
    def _safe_tolist_2d(tensor: torch.Tensor) -> list[Any]:
        if tensor.device.type != "npu":
            return original(tensor)
        return _on_host(tensor).tolist()

    return _safe_tolist_2d


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_TO_LIST,
        replace=_to_list,
        why="each jagged tensor whose lengths are read waits for all streams of the npu, not for its own",
        upstream="torchrec 1.8.0, sparse/jagged_tensor.py:123",
        delete_when="the copy goes through the device's module instead of torch.cuda",
        written_for={_TO_LIST: "cd8c58bf34a5fa2e"},
        also=(
            "torchrec.distributed.dist_data:_safe_tolist",
            "torchrec.distributed.embedding:_safe_tolist",
            "torchrec.distributed.embedding_sharding:_safe_tolist",
        ),
    ),
    Adaptation(
        target=_TO_LIST_2D,
        replace=_to_list_2d,
        why="each exchange of split sizes waits for all streams of the npu, not for its own",
        upstream="torchrec 1.8.0, distributed/dist_data.py:189",
        delete_when="the copy goes through the device's module instead of torch.cuda",
        written_for={_TO_LIST_2D: "f772f1b2a3425fea"},
    ),
)
