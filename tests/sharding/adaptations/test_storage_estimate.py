from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import shard_estimators
from torchrec.distributed.types import ModuleSharder, PipelineType, StorageUsageType

from tests.stock import without
from turbogr_plugin.sharding.adaptations import storage_estimate

TABLE_BYTES = 1000 * 64 * 4


def storages(device: str, kernel: str = "fused", usage: str = "BASE", **rest: Any) -> list[Any]:
    """Estimates of a table of 1000 rows of 64 floats in two shards by rows."""
    return shard_estimators.calculate_shard_storages(
        sharder_data=SimpleNamespace(storage_usage_type=StorageUsageType[usage]),
        sharding_type="row_wise",
        tensor=torch.empty(1000, 64, device="meta"),
        compute_device=device,
        compute_kernel=kernel,
        shard_sizes=[[500, 64], [500, 64]],
        batch_sizes=[32],
        world_size=2,
        local_world_size=2,
        input_lengths=[3.0],
        num_poolings=[1.0],
        caching_ratio=0.2,
        is_pooled=True,
        input_data_type_size=8,
        output_data_type_size=4,
        **rest,
    )


def test_a_table_on_npu_takes_hbm_where_torchrec_estimates_zero_bytes() -> None:
    with without(storage_estimate.ADAPTATIONS):
        assert [(shard.hbm, shard.ddr) for shard in storages("npu")] == [(0, 0), (0, 0)]
    assert all(shard.hbm > TABLE_BYTES // 2 and shard.ddr == 0 for shard in storages("npu"))


@pytest.mark.parametrize("pipeline", list(PipelineType))
@pytest.mark.parametrize(("kernel", "usage"), [("fused", "BASE"), ("dense", "BASE"), ("quant", "BASE_QUANT")])
def test_the_estimate_for_npu_is_that_for_cuda(pipeline: PipelineType, kernel: str, usage: str) -> None:
    assert storages("npu", kernel, usage, pipeline_type=pipeline) == storages(
        "cuda", kernel, usage, pipeline_type=pipeline
    )


def test_an_unknown_device_is_refused_instead_of_estimated() -> None:
    with pytest.raises(ValueError, match=r"compute_device 'tpu'.*cpu, cuda, mtia, npu"):
        storages("tpu")


@pytest.mark.parametrize("device", ["cpu", "cuda", "mtia"])
def test_estimates_for_other_devices_stay_what_they_were(device: str) -> None:
    with without(storage_estimate.ADAPTATIONS):
        expected = storages(device)
    assert storages(device) == expected


def test_a_sharder_without_an_estimate_of_its_own_counts_hbm_on_npu() -> None:
    table, sharder = torch.empty(10, 4, device="meta"), EmbeddingBagCollectionSharder()
    with without(storage_estimate.ADAPTATIONS), pytest.raises(AssertionError):
        ModuleSharder.storage_usage(sharder, table, "npu", "default")
    assert ModuleSharder.storage_usage(sharder, table, "npu", "default") == {"hbm": 160}
    assert ModuleSharder.storage_usage(sharder, table, "cpu", "default") == {"ddr": 160}
    with pytest.raises(AssertionError):
        ModuleSharder.storage_usage(sharder, table, "tpu", "default")
