from __future__ import annotations

from typing import Any

import pytest
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator

from tests.sharding.adaptations.planning import Tables
from tests.stock import without
from turbogr_plugin.sharding import perf_config
from turbogr_plugin.sharding.adaptations import kernel_bandwidth

BANDWIDTHS = {"hbm_mem_bw": 800.0, "ddr_mem_bw": 50.0, "hbm_to_ddr_mem_bw": 30.0}


def of_config(device: str, kernel: str) -> float:
    return HardwarePerfConfig().get_device_bw(
        compute_device=device, compute_kernel=kernel, ssd_mem_bw=1.0, **BANDWIDTHS
    )


def test_tables_on_npu_are_read_at_the_bandwidth_of_hbm() -> None:
    import torchrec.distributed.planner.constants as constants

    with without(kernel_bandwidth.ADAPTATIONS):
        assert constants.kernel_bw_lookup("npu", "fused", **BANDWIDTHS) is None
        with pytest.raises(ValueError, match="unsupported compute kernel: fused"):
            of_config("npu", "fused")
    for kernel, bandwidth in {"fused": 800.0, "dense": 400.0, "quant": 800.0}.items():
        assert constants.kernel_bw_lookup("npu", kernel, **BANDWIDTHS) == bandwidth
        assert of_config("npu", kernel) == of_config("cuda", kernel) == bandwidth


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching", "key_value"])
def test_kernels_that_npus_lack_have_no_bandwidth(kernel: str) -> None:
    with pytest.raises(ValueError, match=f"unsupported compute kernel: {kernel}"):
        of_config("npu", kernel)
    assert of_config("cuda", kernel) > 0


def costs(name: str, device: str) -> list[Any]:
    topology = Topology(4, device)
    estimators = [
        EmbeddingPerfEstimatorFactory.create(name, topology=topology),
        EmbeddingStorageEstimator(topology=topology),
    ]
    enumerator = EmbeddingEnumerator(topology=topology, batch_size=512, estimator=estimators)
    options = enumerator.enumerate(Tables(), get_default_sharders())
    return sorted(
        (option.name, option.sharding_type, option.compute_kernel, [shard.perf.total for shard in option.shards])
        for option in options
        if option.compute_kernel in ("fused", "dense")
    )


def test_the_cost_model_registered_as_npu_costs_tables_as_torchrecs_own_does_on_cuda() -> None:
    assert costs("npu", "npu") == costs("default_estimator", "cuda") == costs("default_estimator", "npu")


def test_a_cost_model_that_somebody_else_registered_as_npu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(HardwarePerfConfig):
        name = "npu"

    assert perf_config.register().status == "already applied"
    monkeypatch.setitem(EmbeddingPerfEstimatorFactory._registry, "npu", Theirs)
    outcome = perf_config.register()
    assert outcome.status == "refused"
    assert "Theirs" in outcome.reason
    assert EmbeddingPerfEstimatorFactory._registry["npu"] is Theirs


def test_bandwidths_of_an_npu_topology_reach_the_cost_model() -> None:
    fast, slow = (
        EmbeddingShardingPlanner(topology=Topology(2, "npu", hbm_mem_bw=bandwidth), debug=False)
        ._enumerator.enumerate(Tables(), get_default_sharders())[0]
        .shards[0]
        .perf.fwd_compute
        for bandwidth in (900.0, 450.0)
    )
    assert slow == pytest.approx(2 * fast)
