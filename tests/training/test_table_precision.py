"""The item table of a run in fp16 or bf16, and how its updates are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.npu.ranks import Call, RankPool

CASES = [("fp32", "stochastic"), ("fp16", "stochastic"), ("fp16", "nearest"), ("bf16", "stochastic")]


def item_table(folder: str, precision: str, rounding: str) -> dict[str, Any]:
    """Builds the model of a configuration and runs on a rank of the pool: what its table is."""
    from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

    from turbogr_plugin.data.store import InteractionStore
    from turbogr_plugin.sharding.jagged_lookup import table_modules
    from turbogr_plugin.training.assembly import ITEM_WEIGHT, build_model
    from turbogr_plugin.training.config import DataConfig, RunConfig, TrainingConfig

    world = dist.group.WORLD
    assert world is not None
    store = InteractionStore.open(Path(folder) / "store")
    config = RunConfig(output="never", data=DataConfig(store=str(store.path)))
    config.training = TrainingConfig(table_precision=precision, table_rounding=rounding)  # type: ignore[arg-type]
    config.model.dim = 16
    divided = get_gradient_division()  # of the whole process, which other tests share
    model = build_model(config, store, world, torch.device("cpu"))
    set_gradient_division(divided)
    (tables,) = table_modules(model)
    (shard,) = model.state_dict()[ITEM_WEIGHT].local_shards()
    return {
        "dtype": str(shard.tensor.dtype),
        "class": type(tables).__name__,
        "stochastic": tables.stochastic_rounding,
        "spread": float(shard.tensor.float().std()),
        "states": [str(value.dtype) for of_table in tables.split_optimizer_states() for value in of_table],
    }


@pytest.mark.timeout(120)
def test_the_item_table_has_the_precision_and_rounding_that_were_asked_for(tiny: Path, ranks: RankPool) -> None:
    calls = [
        Call(
            "tests.training.test_table_precision:item_table",
            {"folder": str(tiny), "precision": precision, "rounding": rounding},
        )
        for precision, rounding in CASES
    ]
    dtypes = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}
    for (precision, rounding), outcome in zip(CASES, ranks.run(calls), strict=True):
        (found,) = outcome.result()
        assert found["dtype"] == dtypes[precision]
        assert found["class"] == "JaggedLookupTables"
        assert found["stochastic"] == (rounding == "stochastic")
        assert found["spread"] == pytest.approx(0.02, rel=0.2)  # initial values are drawn in float32 and rounded
        assert found["states"] == ["torch.float32"]
