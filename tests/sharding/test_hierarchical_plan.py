"""Plans as files and as values."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType

from tests.sharding.planned import SHARDERS, Tables, planner, shardings
from turbogr_plugin.sharding import HierarchicalShardingPlan, npu_topology

KINDS = ["row_wise", "table_wise", "column_wise", "table_row_wise", "grid_shard", "data_parallel"]


def _plan(**arguments: Any) -> HierarchicalShardingPlan:
    wanted = {
        kind: ParameterConstraints(
            sharding_types=[kind],
            min_partition=16,
            stochastic_rounding=True,
            bounds_check_mode=BoundsCheckMode.WARNING,
            output_dtype=DataType.FP16,
        )
        for kind in KINDS
    }
    module = Tables({"s": (1_000, 32)}, dict.fromkeys(KINDS, (1_000, 64)))
    arguments = {"group_size": 8, "constraints": wanted, **arguments}
    return planner(npu_topology("atlas-800t-a2", nodes=2), **arguments).plan(module, SHARDERS)


def test_a_file_gives_back_the_plan_and_its_report(tmp_path: Path) -> None:
    plan = _plan(sync="average")
    plan.save(tmp_path / "plan.json")
    found = HierarchicalShardingPlan.load(tmp_path / "plan.json")
    assert found == plan
    assert found.report == plan.report
    assert str(found) == str(plan)
    assert {sharding.sharding_type for sharding in shardings(found).values()} >= set(KINDS)


def test_a_plan_can_be_sent_to_other_processes() -> None:
    plan = _plan()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_every_size_of_groups_that_was_looked_at_is_in_the_file(tmp_path: Path) -> None:
    plan = _plan(group_size="auto", constraints=None)
    plan.save(tmp_path / "plan.json")
    report = json.loads((tmp_path / "plan.json").read_text())["report"]
    assert [candidate["group_size"] for candidate in report["candidates"]] == [16, 8, 4, 2, 1]
    assert all(candidate["verdict"] for candidate in report["candidates"])


def test_tables_behind_a_cache_have_no_file(tmp_path: Path) -> None:
    plan = _plan()
    shardings(plan)["s"].cache_params = CacheParams(load_factor=0.1)
    with pytest.raises(ValueError, match=re.escape("table 's' has cache_params, which a plan file cannot hold")):
        plan.save(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(kind="x"), "kind must be 'turbogr plan 1'"),
        (lambda values: values.update(world_size=12), "group_size must divide world_size 12, got 8"),
        (lambda values: values.update(group_size=4), "a group has ranks 0 to 3"),
        (lambda values: values["modules"]["bags"]["row_wise"].update(ranks=None), "ranks must be those of the shards"),
        (lambda values: values["modules"]["bags"]["row_wise"]["ranks"].reverse(), "ranks must be those of the shards"),
        (
            lambda values: (
                values["modules"]["bags"]["row_wise"]["shards"].pop(1),
                values["modules"]["bags"]["row_wise"]["ranks"].pop(1),
            ),
            "shards must fill a table of 1000 rows and 64 columns",
        ),
        (lambda values: values.update(sync="none"), "sync must be one of exact, average, got 'none'"),
        (lambda values: values.pop("modules"), "a field is missing or of the wrong kind"),
        (
            lambda values: values["modules"]["bags"]["row_wise"].update(sharding_type="diagonal"),
            "sharding_type must be one of data_parallel",
        ),
    ],
)
def test_a_wrong_file_is_named_with_the_fault(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        HierarchicalShardingPlan.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"group_size": 3, "world_size": 4}, "group_size must divide world_size 4, got 3"),
        ({"group_size": 0, "world_size": 4}, "group_size must be a whole number >= 1, got 0"),
        ({"group_size": 4, "world_size": 4, "node_group_size": 3}, "node_group_size must divide group_size 4, got 3"),
        ({"group_size": 2, "world_size": 4, "ranks_per_host": 0}, "ranks_per_host must be a whole number >= 1, got 0"),
        ({"group_size": 2, "world_size": 4, "ranks_per_host": "2"}, "ranks_per_host must be a whole number >= 1"),
        ({"group_size": 2, "world_size": 4, "sync": "never"}, "sync must be one of exact, average"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        HierarchicalShardingPlan(plan={}, **values)


@pytest.mark.parametrize("length", range(5))
@pytest.mark.parametrize("table", ["row_wise", "grid_shard"])
def test_a_shard_of_too_few_numbers_is_refused(tmp_path: Path, table: str, length: int) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)
    values = json.loads(path.read_text())
    shards = values["modules"]["bags"][table]["shards"]
    assert {len(shard) for shard in shards} == {5}
    shards[-1] = shards[-1][:length]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="a field is missing or of the wrong kind") as caught:
        HierarchicalShardingPlan.load(path)
    assert str(path) in str(caught.value)
