"""Bytes of optimizer state that a table's rows take with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

#: (bytes per row, bytes per element), in fp32, by the name of fbgemm's EmbOptimType or of TorchRec's optimizer class.
_STATE: dict[str, tuple[float, float]] = {
    "SGD": (0, 0),
    "EXACT_SGD": (0, 0),
    "LARS_SGD": (0, 4),
    "LarsSGD": (0, 4),
    "NONE": (0, 0),
    "EXACT_ADAGRAD": (0, 4),
    "Adagrad": (0, 4),
    "EXACT_ROWWISE_ADAGRAD": (4, 0),
    "RowWiseAdagrad": (4, 0),
    "ADAM": (0, 8),
    "Adam": (0, 8),
    "LAMB": (0, 8),
    "PARTIAL_ROWWISE_ADAM": (4, 4),
    "PartialRowWiseAdam": (4, 4),
    "PARTIAL_ROWWISE_LAMB": (4, 4),
    "PartialRowWiseLAMB": (4, 4),
}


def state_bytes(table: Tensor, fused_params: Mapping[str, Any], optimizer: Any = None) -> tuple[float, float]:
    """Optimizer state per row and per element of a table.

    Args:
        table: the parameter; an optimizer that was applied in its backward is found at it.
        fused_params: of the sharder; its key "optimizer" comes next. Without one fbgemm's default is SGD.
        optimizer: overrules both: fbgemm's EmbOptimType, an optimizer class, or a name of either.

    Raises:
        ValueError: an optimizer whose state is not known here.
    """
    found = optimizer
    if found is None:
        applied = getattr(table, "_optimizer_classes", None)
        found = applied[0] if applied else fused_params.get("optimizer", "EXACT_SGD")
    name = found if isinstance(found, str) else getattr(found, "name", None) or getattr(found, "__name__", str(found))
    if name not in _STATE:
        raise ValueError(f"optimizer must be one of {', '.join(_STATE)}, got {name!r}")
    return _STATE[name]
