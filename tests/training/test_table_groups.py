"""What the planner is told of a run whose ranks form groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.data.batch import ITEM, NEGATIVE
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.models.hstu import HSTUConfig
from turbogr_plugin.models.retrieval import ITEM_TABLE
from turbogr_plugin.negatives.uniform import NegativesConfig
from turbogr_plugin.sharding import cuda_topology
from turbogr_plugin.sharding.groups_config import GroupsConfig
from turbogr_plugin.sharding.topologies import save_topology
from turbogr_plugin.training import table_groups
from turbogr_plugin.training.config import DataConfig, RunConfig, TrainingConfig


def _config(**sections: Any) -> RunConfig:
    return RunConfig(output="run", data=DataConfig(store="store"), **sections)


@pytest.mark.parametrize("sharing", ["none", "sequence"])
@pytest.mark.parametrize("max_length", [8, 64])
def test_lengths_and_popularity_are_those_of_the_store(tiny: Path, sharing: Any, max_length: int) -> None:
    store = InteractionStore.open(tiny / "store")
    model = HSTUConfig(dim=16, blocks=1, heads=2, qk_dim=8, value_dim=8, max_length=max_length)
    config = _config(model=model, negatives=NegativesConfig(count=5, sharing=sharing))
    found = table_groups.item_statistics(config, store)
    histories = [store.sequence(user)[0].tolist() for user in range(store.num_users)]
    items = sum(min(len(history), max_length) for history in histories) / len(histories)
    negatives = 5 * (items if sharing == "none" else 1)
    assert found.lengths == pytest.approx({ITEM: items, NEGATIVE: negatives})
    seen = Counter(item for history in histories for item in history)
    shares = np.array(
        [items * seen[item] / sum(seen.values()) + negatives / store.num_items for item in range(store.num_items)]
    )
    halves = [0, store.num_items // 2, store.num_items]
    expected = [shares[: halves[1]].sum(), shares[halves[1] :].sum()] / shares.sum()
    assert found.access[ITEM_TABLE].lookup_shares(halves) == pytest.approx(expected, rel=0.05)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    with process_group(torch.device("cpu"), timeout=timedelta(seconds=20)) as group:
        yield group


def test_the_planner_has_the_options_of_the_run(
    monkeypatch: pytest.MonkeyPatch, world: dist.ProcessGroup, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def record(**arguments: Any) -> Any:
        given.update(arguments)
        raise ValueError("seen")

    monkeypatch.setattr(table_groups, "HierarchicalShardingPlanner", record)
    config = _config(groups=GroupsConfig(size=1, wire="bf16"), training=TrainingConfig(global_batch_size=24))
    unused: Any = None
    with pytest.raises(InputError, match="groups: seen"):
        table_groups.plan_groups(config, unused, unused, [], world, torch.device("cpu"))
    assert (given["group_size"], given["wire_dtype"], given["batch_size"]) == (1, torch.bfloat16, 24)
    assert given["constraints"][ITEM_TABLE].sharding_types == ["row_wise", "table_wise"]
    assert given["batch_statistics"] is None

    path = tmp_path / "links.json"
    save_topology(cuda_topology("dgx-h100", nodes=1, devices_per_node=1), path)
    config = _config(groups=GroupsConfig(size="auto", topology=str(path)))
    with pytest.raises(InputError, match=f"groups: {path} is of cuda, the run of cpu"):
        table_groups.plan_groups(config, unused, unused, [], world, torch.device("cpu"))
