"""Variable batch sizes on npu where no rank has as many rows as another: embeddings and updates of the tables."""

from __future__ import annotations

import pytest
import torch

from tests.npu import variable_batches
from tests.npu.ranks import Call, RankPool

pytestmark = pytest.mark.timeout(240)

TRAIN = "tests.npu.variable_batches:train"


@pytest.mark.parametrize("ranks_of_world", [2, 4])
@pytest.mark.parametrize("sharding", ["row_wise", "table_row_wise", "table_wise"])
def test_a_variable_batch_trains_on_npu_as_without_torchrec(
    ranks: RankPool, sharding: str, ranks_of_world: int
) -> None:
    arguments = {"sharding": sharding, "device_type": "npu"}
    found = ranks.run([Call(TRAIN, arguments, ranks_of_world)])[0].result()
    pooled, tables = variable_batches.train_whole(ranks_of_world)
    for rank, ours in enumerate(found):
        for got, expected in zip(ours["pooled"], pooled[rank], strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    for name, expected in tables.items():
        held = sorted(ours["held"][name] for ours in found if name in ours["held"])
        got = torch.tensor([row for _, rows in held for row in rows])
        torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks_of_world", [2, 4])
def test_gloo_refuses_to_gather_the_gradients_of_a_variable_batch_sharded_by_rows(
    ranks: RankPool, ranks_of_world: int
) -> None:
    """Why CPU is no oracle here: c10d's gloo takes a list of tensors to gather only if all have one size."""
    outcome = ranks.run([Call(TRAIN, {"sharding": "row_wise", "device_type": "cpu"}, ranks_of_world)])[0]
    for error in outcome.errors:
        assert "ProcessGroupGloo::allgather: invalid tensor size" in error
