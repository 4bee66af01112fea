from __future__ import annotations

import pickle

import pytest
import torch
import torchrec.distributed.planner.planners
import torchrec.distributed.planner.utils
import torchrec.distributed.sharding_plan
from torch.distributed.remote_device import _remote_device

from tests.stock import without
from turbogr_plugin.sharding.adaptations import placement

MODULES = (
    torchrec.distributed.sharding_plan,
    torchrec.distributed.planner.planners,
    torchrec.distributed.planner.utils,
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_shard_on_npu_is_placed_with_the_index_that_torchrec_leaves_out(module: object) -> None:
    with without(placement.ADAPTATIONS):
        assert module.placement("npu", 5, 4) == "rank:5/npu"  # type: ignore[attr-defined]
    found = _remote_device(module.placement("npu", 5, 4))  # type: ignore[attr-defined]
    assert (found.rank(), found.device()) == (5, torch.device("privateuseone", 1))
    assert pickle.loads(pickle.dumps(found)) == found


def test_placements_on_other_devices_stay_what_they_were() -> None:
    for module in MODULES:
        assert [module.placement(device, 5, 4) for device in ("cpu", "cuda", "mtia")] == [
            "rank:5/cpu",
            "rank:5/cuda:1",
            "rank:5/mtia:1",
        ]
