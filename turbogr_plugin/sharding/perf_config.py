"""The planner's cost model under the name `npu`, where TorchRec lets hardware register its own.

    EmbeddingPerfEstimatorFactory.create("npu", topology=topology)

Its formulas are TorchRec's, its bandwidths those of the topology. Left out: coefficients measured on an NPU.
"""

from __future__ import annotations

from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig

from turbogr_plugin.backend.adaptation import Outcome


class NpuPerfConfig(HardwarePerfConfig):
    """TorchRec's formulas; what a table kernel reads per millisecond comes from the topology."""

    name = "npu"


def register() -> Outcome:
    """Registers NpuPerfConfig, once; refused where another package has taken the name."""
    item = "EmbeddingPerfEstimatorFactory: npu"
    found = EmbeddingPerfEstimatorFactory._registry.get(NpuPerfConfig.name)
    if found is None:
        EmbeddingPerfEstimatorFactory.register(NpuPerfConfig.name)(NpuPerfConfig)
        return Outcome(item, "applied", "hardware registered")
    if found is NpuPerfConfig:
        return Outcome(item, "already applied", "hardware registered")
    return Outcome(item, "refused", f"{found.__module__}.{found.__qualname__} is registered under this name")
