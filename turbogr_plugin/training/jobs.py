"""The jobs behind the commands: open the store, start the process group, run, and bring the result to rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import yaml

from turbogr_plugin.backend.collectives import on_first_rank, process_group
from turbogr_plugin.backend.current_device import current_device
from turbogr_plugin.backend.matmul_precision import set_matmul_precision
from turbogr_plugin.data.prepare import prepare
from turbogr_plugin.data.store import InteractionStore, is_store
from turbogr_plugin.errors import InputError
from turbogr_plugin.sharding.groups_config import GroupsConfig
from turbogr_plugin.training.checkpoints import find_checkpoint, latest_checkpoint
from turbogr_plugin.training.config import DataConfig, RunConfig
from turbogr_plugin.training.evaluation import EvaluationResult
from turbogr_plugin.training.host_warnings import quiet_host_warnings
from turbogr_plugin.training.run_folder import write_atomically
from turbogr_plugin.training.session import Session
from turbogr_plugin.training.trainer import Trainer

_PREPARE_TIMEOUT = timedelta(days=1)
_HOW_FAST = ("memory_gb", "threads")  # settings of data.prepare that do not change the store


def _make_store(config: DataConfig) -> None:
    """Prepares the store of a run where it is missing and the configuration says how; refuses one made otherwise."""
    path = Path(config.store)
    if config.prepare is None:
        return
    if not path.exists():
        print("\n".join(prepare(config.prepare, path).lines()), flush=True)
    elif is_store(path):
        made, wanted = InteractionStore.open(path, verify=False).manifest["config"], asdict(config.prepare)
        differing = [
            f"{key} was {made.get(key)} and is {wanted[key]}"
            for key in wanted
            if key not in _HOW_FAST and made.get(key) != wanted[key]
        ]
        if differing:
            raise InputError(
                f"{path} was prepared otherwise than data.prepare says: {'; '.join(differing)}. Name another "
                "data.store, or delete this one to have it made again"
            )


def _open_store(config: DataConfig, group: dist.ProcessGroup, *, make: bool) -> InteractionStore:
    """The store of a run; rank 0 prepares it, where that is wanted, and verifies the checksums for all."""
    path = Path(config.store)

    def first() -> None:
        if make:
            _make_store(config)
        InteractionStore.open(path)

    # Preparing may take longer than any collective may: the ranks wait for it in a group of their own.
    waiting = dist.new_group(timeout=_PREPARE_TIMEOUT, backend="gloo") if group.size() > 1 else group
    on_first_rank(first, waiting)
    return InteractionStore.open(path, verify=False)


@contextmanager
def _session(config: RunConfig, *, make_store: bool = False) -> Iterator[Session]:
    device = current_device(config.device)
    set_matmul_precision(config.training.matmul_precision, device)
    with (
        quiet_host_warnings(),
        process_group(device, timeout=timedelta(minutes=config.timeout_minutes)) as group,
    ):
        yield Session(config, _open_store(config.data, group, make=make_store), group, device)


def _ungrouped(config: RunConfig) -> RunConfig:
    """Groups serve training; weights are read by any number of ranks."""
    return replace(config, groups=GroupsConfig())


def _load(session: Session, name: str) -> None:
    """Loads the weights of a checkpoint of the run by name."""
    folder = session.checkpoints
    found = latest_checkpoint(folder) if name == "latest" else find_checkpoint(folder, name)
    if found is None:
        there = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
        raise InputError(f"{folder} has no complete checkpoint {name!r}; it holds: {', '.join(there) or 'none'}")
    session.load_model(found)


def train(config: RunConfig, *, resume: bool) -> dict[str, Any] | None:
    """Trains, tests, and leaves the run folder; the summary on rank 0, None elsewhere.

    Args:
        config: of the run.
        resume: go on from the latest complete checkpoint.
    """
    with _session(config, make_store=True) as session:
        trainer = Trainer(session, resume=resume)
        if session.rank == 0:
            resolved = asdict(config)
            # As an absolute path, with which `evaluate` and `recommend` find the store from anywhere.
            resolved["data"]["store"] = str(Path(config.data.store).resolve())
            if config.groups.topology:
                resolved["groups"]["topology"] = str(Path(config.groups.topology).resolve())
            text = yaml.safe_dump(resolved, sort_keys=False)
            write_atomically(Path(config.output) / "config.yaml", text.encode())
        summary = trainer.train()
        return summary if session.rank == 0 else None


def evaluate(config: RunConfig, checkpoint: str) -> EvaluationResult | None:
    """Tests a checkpoint of a run; the result on rank 0, None elsewhere."""
    with _session(_ungrouped(config)) as session:
        _load(session, checkpoint)
        result = session.evaluate("test")
        return result if session.rank == 0 else None


def recommend(config: RunConfig, checkpoint: str, raw_users: list[int], k: int) -> list[tuple[int, list[int]]]:
    """The k best unseen items of users, as raw ids, in the order asked for; all on rank 0, nothing elsewhere."""
    if k < 1:
        raise InputError(f"k is {k}; at least one item has to be asked for")
    beyond = [user for user in raw_users if not -(1 << 63) <= user < 1 << 63]
    if beyond:
        raise InputError(f"user ids are 64-bit integers, got {beyond[0]}")
    with _session(_ungrouped(config)) as session:
        store = session.store
        users = store.user_indices(np.asarray(raw_users, dtype=np.int64))
        _load(session, checkpoint)
        mine: dict[int, list[int]] = {}
        for indices, top in session.recommend(users, min(k, store.num_items)):
            for user, items in zip(indices, top.items.cpu().numpy(), strict=True):
                mine[int(store.raw_user_ids[user])] = store.raw_item_ids[items[items >= 0]].tolist()
        gathered: list[dict[int, list[int]]] = [{}] * session.world_size
        dist.all_gather_object(gathered, mine, group=session.group)
        if session.rank != 0:
            return []
        found = {user: items for part in gathered for user, items in part.items()}
        return [(user, found[user]) for user in raw_users]
