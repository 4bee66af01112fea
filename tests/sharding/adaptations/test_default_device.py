from __future__ import annotations

import pytest
import torchrec.distributed.planner.planners
import torchrec.distributed.sharding_plan
import torchrec.distributed.utils

from tests.npu.ranks import Call, RankPool
from tests.stock import without
from turbogr_plugin.sharding.adaptations import default_device


@pytest.mark.timeout(150)
def test_npu_is_taken_where_no_device_is_named_and_torchrec_would_take_the_cpu(ranks: RankPool) -> None:
    (outcome,) = ranks.run([Call("tests.sharding.adaptations.on_ranks:default_devices", {}, world_size=1)])
    (found,) = outcome.result()
    assert set(found["ours"].values()) == {"npu"}
    assert set(found["stock"].values()) == {"cpu"}


def test_every_module_that_asks_gets_the_same_type_and_torchrecs_own_where_there_is_no_npu() -> None:
    with without(default_device.ADAPTATIONS):
        expected = torchrec.distributed.utils.get_device_type()
    modules = (torchrec.distributed.utils, torchrec.distributed.sharding_plan, torchrec.distributed.planner.planners)
    if expected == "cpu" and default_device.npu_is_available():
        expected = "npu"  # another test of this process has loaded the simulated one
    assert {module.get_device_type() for module in modules} == {expected}
