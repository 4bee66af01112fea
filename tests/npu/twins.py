"""A call on ranks with some adaptations taken back: what stock TorchRec does there."""

from __future__ import annotations

import importlib
from typing import Any

from turbogr_plugin.backend.adaptation import apply, undo


def stock(module: str, function: str, arguments: dict[str, Any]) -> Any:
    """Calls "module:function" without the adaptations of a module, and puts them back."""
    adaptations = importlib.import_module(module).ADAPTATIONS
    place, _, name = function.partition(":")
    called = getattr(importlib.import_module(place), name)
    for adaptation in adaptations:
        undo(adaptation)
    try:
        return called(**arguments)
    finally:
        for adaptation in adaptations:
            outcome = apply(adaptation)
            assert outcome.status == "applied", outcome
