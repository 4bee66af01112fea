"""Small index tensors that TorchRec makes on the host go to npu through pinned memory, as they go to cuda.

Only from pinned memory is a copy asynchronous as `non_blocking` asks: from pageable memory the runtime stages it, or
waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from turbogr_plugin.backend.adaptation import Adaptation

_JAGGED = "torchrec.sparse.jagged_tensor:_pin_and_move"
_EMBEDDING = "torchrec.distributed.embedding:_pin_and_move"
_WHY = "the copy to npu is from pageable memory, which the runtime cannot do without the host"
_DELETE_WHEN = "the function pins for every accelerator"


def _pin_for_npu(
    original: Callable[[torch.Tensor, torch.device], torch.Tensor],
) -> Callable[[torch.Tensor, torch.device], torch.Tensor]:
    # No functools.wraps: TorchScript, which compiles KeyedJaggedTensor and so this, would read the wrapped source.
    def _pin_and_move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        scripting = torch.jit.is_scripting()  # type: ignore[attr-defined]
        if scripting or device.type != "npu" or tensor.device.type != "cpu":
            return original(tensor, device)
        return tensor.pin_memory().to(device=device, non_blocking=True)

    return _pin_and_move


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        target=_JAGGED,
        replace=_pin_for_npu,
        why=_WHY,
        upstream="torchrec 1.8.0, sparse/jagged_tensor.py:63",
        delete_when=_DELETE_WHEN,
        written_for={_JAGGED: "6befa895e42a4aa4"},
        also=("torchrec.modules.itep_modules:_pin_and_move",),
    ),
    Adaptation(
        target=_EMBEDDING,
        replace=_pin_for_npu,
        why=_WHY,
        upstream="torchrec 1.8.0, distributed/embedding.py:317",
        delete_when=_DELETE_WHEN,
        written_for={_EMBEDDING: "431f615f09defbe3"},
    ),
)
