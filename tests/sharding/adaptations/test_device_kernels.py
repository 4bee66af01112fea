from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.sharding.adaptations.planning import as_values, constraints, plan
from tests.stock import without
from turbogr_plugin.sharding.adaptations import device_kernels

CUDA_ONLY = ["fused_uvm", "fused_uvm_caching", "key_value", "dram_virtual_table"]


class OffersAll(EmbeddingBagCollectionSharder):
    """A sharder of one's own that offers kernels of CUDA on every device, as TorchRec's managed collision one does."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["fused", *CUDA_ONLY]


def offered(device: str) -> set[str]:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=16, feature_names=["f"])]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    enumerator = EmbeddingEnumerator(topology=Topology(2, device), batch_size=8)
    return {option.compute_kernel for option in enumerator.enumerate(bags, [OffersAll()])}


@pytest.mark.parametrize("kernel", CUDA_ONLY)
def test_a_table_that_may_only_lie_outside_hbm_is_refused_on_npu_by_name(kernel: str) -> None:
    with pytest.raises(ValueError, match=f"table 'b0': compute kernel '{kernel}' does not exist on npu.*use 'fused'"):
        plan("npu", constraints={"b0": constraints(compute_kernels=[kernel])["b0"]})


def test_a_table_that_may_also_lie_in_hbm_is_planned_there() -> None:
    found = as_values(plan("npu", constraints=constraints(compute_kernels=["fused_uvm_caching", "fused"])))
    assert {values["kernel"] for values in found.values()} == {"fused"}


def test_virtual_tables_are_refused_on_npu() -> None:
    with pytest.raises(ValueError, match="table 'b1': use_virtual_table"):
        plan("npu", constraints={"b1": constraints(use_virtual_table=True)["b1"]})


def test_the_refusal_comes_with_the_planner_on_every_rank_and_not_while_rank_0_plans() -> None:
    wanted = constraints(compute_kernels=["fused_uvm"])
    with pytest.raises(ValueError, match="compute kernel 'fused_uvm' does not exist on npu"):
        EmbeddingShardingPlanner(topology=Topology(2, "npu"), constraints=wanted, debug=False)


def test_kernels_that_a_sharder_offers_everywhere_are_not_planned_for_npu() -> None:
    with without(device_kernels.ADAPTATIONS), pytest.raises(ValueError, match="unsupported compute kernel"):
        offered("npu")
    assert offered("npu") == {"fused"}


def test_kernels_on_other_devices_stay_what_they_were() -> None:
    with without(device_kernels.ADAPTATIONS):
        expected = offered("cuda")
    assert offered("cuda") == expected > {"fused"}
    planner = EmbeddingShardingPlanner(
        topology=Topology(2, "cpu"), constraints=constraints(compute_kernels=["fused_uvm"]), debug=False
    )
    with pytest.raises(RuntimeError, match="No available sharding type and compute kernel combination"):
        planner._enumerator.enumerate(*_tables())


def _tables() -> tuple[torch.nn.Module, list[EmbeddingBagCollectionSharder]]:
    tables = [EmbeddingBagConfig(name="b0", num_embeddings=1000, embedding_dim=16, feature_names=["f"])]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables), [EmbeddingBagCollectionSharder()]
