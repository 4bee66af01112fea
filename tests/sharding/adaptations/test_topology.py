from __future__ import annotations

import pytest
from torchrec.distributed.planner.constants import HBM_CAP
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    HardwareConfig,
    KernelConfig,
    Topology,
    TopologyFactory,
    TrainerConfig,
)

from tests.stock import without
from turbogr_plugin.sharding.adaptations import topology


def test_a_topology_of_npus_has_hbm_per_device_where_torchrec_refuses_it() -> None:
    with without(topology.ADAPTATIONS), pytest.raises(AssertionError, match="unsupported compute device npu"):
        Topology(2, "npu")
    npus = Topology(2, "npu", hbm_cap=7 << 30)
    assert npus.compute_device == "npu"
    assert [device.storage.hbm for device in npus.devices] == [7 << 30] * 2
    assert [device.storage.hbm for device in Topology(world_size=2, compute_device="npu").devices] == [HBM_CAP] * 2


def test_npus_of_uneven_memory_keep_their_figures() -> None:
    custom = CustomTopologyData({"hbm_cap": [1 << 30, 2 << 30]}, world_size=2)
    npus = Topology(2, "npu", custom_topology_data=custom)
    assert [device.storage.hbm for device in npus.devices] == [1 << 30, 2 << 30]


def test_topologies_of_other_devices_stay_what_they_were() -> None:
    for device, hbm in {"cpu": 0, "cuda": HBM_CAP, "mtia": HBM_CAP}.items():
        with without(topology.ADAPTATIONS):
            expected = repr(Topology(2, device))
        found = Topology(2, device)
        assert repr(found) == expected
        assert found.devices[0].storage.hbm == hbm
    with pytest.raises(AssertionError, match="unsupported compute device tpu"):
        Topology(2, "tpu")


def test_the_factory_makes_topologies_of_npus_where_torchrec_refuses_them() -> None:
    trainer, kernel = TrainerConfig(world_size=2), KernelConfig(compute_device="npu")
    with without(topology.ADAPTATIONS), pytest.raises(ValueError, match="compute_device must be one of"):
        TopologyFactory.create_topology(trainer, kernel_config=kernel)
    found = TopologyFactory.create_topology(trainer, HardwareConfig(hbm_cap_bytes=5 << 30), kernel)
    assert found.compute_device == "npu"
    assert found.devices[1].storage.hbm == 5 << 30
    with pytest.raises(ValueError, match="compute_device must be one of"):
        KernelConfig(compute_device="tpu").validate()


def test_an_npu_without_hbm_is_named_an_issue_as_a_gpu_is() -> None:
    config = HardwareConfig(hbm_cap_bytes=0)
    with without(topology.ADAPTATIONS):
        assert config.get_validation_issues("npu") == []
        on_cuda = config.get_validation_issues("cuda")
    assert config.get_validation_issues("npu") == on_cuda == ["hbm_cap_bytes=0 is non-positive"]
    assert config.get_validation_issues("cpu") == config.get_validation_issues() == []


def test_npus_are_not_accepted_where_another_source_of_the_planner_has_changed() -> None:
    sources = set(topology.ADAPTATIONS[-1].written_for)
    for name in ("calculate_shard_storages", "_reserve_dense_storage", "_get_kjt_storage", "kernel_bw_lookup"):
        assert any(source.endswith(f":{name}") for source in sources), name
