"""A checkpoint is used only with the training, the model and the items that it belongs to."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.checkpoints import Checkpoint
from turbogr_plugin.training.config import DataConfig, RunConfig
from turbogr_plugin.training.jobs import _make_store
from turbogr_plugin.training.provenance import check_resumable, check_same_model, provenance


@pytest.fixture
def recorded(tiny: Path) -> dict[str, Any]:
    config = RunConfig(output="x", data=DataConfig(store="store"))
    return provenance(config, InteractionStore.open(tiny / "store"))


def _checkpoint(recorded: dict[str, Any]) -> Checkpoint:
    as_on_disk = json.loads(json.dumps({"provenance": recorded}))
    return Checkpoint(path=Path("run/best"), step=1, world_size=1, extra=as_on_disk)


def test_the_same_configuration_and_store_pass(recorded: dict[str, Any]) -> None:
    check_resumable(_checkpoint(recorded), recorded)
    check_same_model(_checkpoint(recorded), recorded)


@pytest.mark.parametrize(
    ("section", "key", "value", "resumable", "same_model"),
    [
        ("model", "heads", 4, False, False),
        ("model", "time_buckets", 16, False, False),
        ("loss", "temperature", 0.5, False, False),
        ("negatives", "count", 3, False, True),
        ("optimizer", "betas", [0.5, 0.5], False, True),
        ("training", "seed", 1, False, True),
        ("training", "global_batch_size", 7, False, True),
        ("training", "precision", "bf16", False, True),
        ("training", "table_precision", "bf16", False, True),
        ("training", "table_rounding", "nearest", False, True),
        ("training", "loss_reduction", "sample", False, True),
        ("training", "epochs", 7, True, True),
        ("training", "patience", 99, True, True),
        ("data", "workers", 0, True, True),
        ("evaluation", "batch_size", 3, True, True),
    ],
)
def test_what_decides_the_losses_must_agree(
    recorded: dict[str, Any], section: str, key: str, value: Any, resumable: bool, same_model: bool
) -> None:
    now = copy.deepcopy(recorded)
    now["config"][section][key] = value
    for check, passes in ((check_resumable, resumable), (check_same_model, same_model)):
        if passes:
            check(_checkpoint(recorded), now)
        else:
            with pytest.raises(InputError, match=rf"run/best .*{section}\.{key} was .* and is"):
                check(_checkpoint(recorded), now)


@pytest.mark.parametrize("name", ["items.npy", "item_ids.npy", "times.npy", "offsets.npy", "users.npy"])
def test_resuming_needs_the_same_store_and_evaluating_the_same_items(recorded: dict[str, Any], name: str) -> None:
    now = copy.deepcopy(recorded)
    now["store"][name] = "0" * 64
    with pytest.raises(InputError, match=f"{name} of the store has another checksum"):
        check_resumable(_checkpoint(recorded), now)
    if name == "items.npy":
        with pytest.raises(InputError, match="belongs to another model or store"):
            check_same_model(_checkpoint(recorded), now)
    else:
        check_same_model(_checkpoint(recorded), now)


def test_a_store_prepared_otherwise_than_the_configuration_says_is_refused(tiny: Path) -> None:
    as_made = PrepareConfig(format="text", inputs=[str(tiny / "log.txt")], user_core=1, item_core=1)
    _make_store(DataConfig(store=str(tiny / "store"), prepare=as_made))
    as_made.threads += 1
    _make_store(DataConfig(store=str(tiny / "store"), prepare=as_made))
    as_made.item_core = 30
    with pytest.raises(InputError, match="item_core was 1 and is 30"):
        _make_store(DataConfig(store=str(tiny / "store"), prepare=as_made))


@pytest.mark.usefixtures("one_rank")
def test_the_run_folder_names_its_store_from_anywhere(tiny: Path) -> None:
    config = yaml.safe_load((tiny / "one/config.yaml").read_text())
    assert config["data"]["store"] == str((tiny / "store").resolve())
