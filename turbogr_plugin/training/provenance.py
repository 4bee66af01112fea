"""What a checkpoint belongs to: the configuration and the store it was trained with, recorded in it and compared later.

Shapes alone do not tell a model from another: with other heads, another temperature or another id map the same tensors
mean something else. Resuming needs the same training in all that decides its losses; evaluating needs the same model
and the same items.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.checkpoints import Checkpoint
from turbogr_plugin.training.config import RunConfig

_RESUMED = (
    "model",
    "loss",
    "negatives",
    "optimizer",
    "balance",
    "training.seed",
    "training.global_batch_size",
    "training.precision",
    "training.matmul_precision",
    "training.table_precision",
    "training.table_rounding",
    "training.loss_reduction",
)
_EVALUATED = ("model", "loss")


def provenance(config: RunConfig, store: InteractionStore) -> dict[str, Any]:
    """What a checkpoint records: the resolved configuration and the checksums of the store's arrays."""
    checksums = {name: about["sha256"] for name, about in store.manifest["files"].items()}
    return {"config": asdict(config), "store": checksums}


def check_resumable(checkpoint: Checkpoint, now: dict[str, Any]) -> None:
    """Raises InputError, naming what differs, unless training with `now` continues the training of `checkpoint`."""
    _check(checkpoint, now, _RESUMED, sorted(now["store"]), "cannot be resumed")


def check_same_model(checkpoint: Checkpoint, now: dict[str, Any]) -> None:
    """Raises InputError, naming what differs, unless `checkpoint` holds the model and the items of `now`."""
    _check(checkpoint, now, _EVALUATED, ["items.npy"], "belongs to another model or store")


def _check(checkpoint: Checkpoint, now: dict[str, Any], sections: tuple[str, ...], files: list[str], what: str) -> None:
    then = checkpoint.extra["provenance"]
    was, is_ = _leaves(then["config"]), _leaves(now["config"])
    differing = [
        f"{key} was {was.get(key)} and is {is_.get(key)}"
        for key in sorted(was.keys() | is_.keys())
        if was.get(key) != is_.get(key) and any(key == name or key.startswith(f"{name}.") for name in sections)
    ]
    differing += [
        f"{name} of the store has another checksum" for name in files if then["store"].get(name) != now["store"][name]
    ]
    if differing:
        raise InputError(
            f"{checkpoint.path} {what}: {'; '.join(differing)}. Use the configuration and store it was trained with, "
            "or train anew with another --output."
        )


def _leaves(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} of nested dicts; lists are values, tuples count as lists (they come back from JSON so)."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found
