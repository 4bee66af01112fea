"""When things run: TrainPipelineFineGrained and its schedule, and how TorchRec's pipelines overlap on an accelerator.

The names are imported when they are asked for: the adaptations in this package are registered before TorchRec's
pipelines, on which TrainPipelineFineGrained is built, may be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbogr_plugin.pipeline.schedule import Schedule, Stage
    from turbogr_plugin.pipeline.train_pipeline_fine_grained import TrainPipelineFineGrained

__all__ = ["Schedule", "Stage", "TrainPipelineFineGrained"]

_MODULES = {"Schedule": "schedule", "Stage": "schedule", "TrainPipelineFineGrained": "train_pipeline_fine_grained"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
