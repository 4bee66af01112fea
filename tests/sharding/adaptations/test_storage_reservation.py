from __future__ import annotations

import copy
from typing import Any

import pytest
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import Topology

from tests.sharding.adaptations.planning import Tables, constraints
from tests.stock import without
from turbogr_plugin.sharding.adaptations import storage_reservation

HBM = 32 << 30


def reserved(device: str, reservation: Any) -> tuple[list[int], list[int]]:
    """HBM and host memory that a reservation leaves of every device."""
    topology = Topology(2, device)
    left = copy.deepcopy(reservation).reserve(topology, 512, Tables(), get_default_sharders(), constraints())
    assert [entry.storage.hbm for entry in topology.devices] == [HBM if device != "cpu" else 0] * 2
    return [entry.storage.hbm for entry in left.devices], [entry.storage.ddr for entry in left.devices]


def test_the_dense_part_and_the_batches_take_hbm_of_npus_as_of_gpus() -> None:
    heuristical = HeuristicalStorageReservation(percentage=0.0)
    with without(storage_reservation.ADAPTATIONS):
        assert reserved("npu", heuristical)[0] == [HBM, HBM]
    hbm, ddr = reserved("npu", heuristical)
    assert (hbm, ddr) == reserved("cuda", heuristical)
    dense = 6 * (112 + 1) * 1024 * 4  # TorchRec's multiplier for parameters, gradients and optimizer state
    assert all(value < HBM - dense for value in hbm)


def test_a_percentage_of_hbm_is_kept_free_on_npus_as_on_gpus() -> None:
    part = FixedPercentageStorageReservation(percentage=0.25)
    assert reserved("npu", part) == reserved("cuda", part)
    assert reserved("npu", part)[0] == [int(0.75 * HBM)] * 2


@pytest.mark.parametrize("device", ["cpu", "cuda", "mtia"])
def test_reservations_on_other_devices_stay_what_they_were(device: str) -> None:
    heuristical = HeuristicalStorageReservation(percentage=0.15)
    with without(storage_reservation.ADAPTATIONS):
        expected = reserved(device, heuristical)
    assert reserved(device, heuristical) == expected
