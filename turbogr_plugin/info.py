"""What `turbogr info` prints: a store, a run, or the versions of what is installed."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from turbogr_plugin.backend.host_versions import installed_versions
from turbogr_plugin.data.store import MANIFEST, InteractionStore
from turbogr_plugin.errors import InputError


def versions() -> list[str]:
    """The versions of this package, Python and the host packages."""
    return [f"{name} {version}" for name, version in installed_versions().items()] + [platform.platform()]


def describe(path: Path) -> list[str]:
    """A store (its counts and how it was prepared) or a run folder (its metrics)."""
    if (path / MANIFEST).is_file():
        return _describe_store(path)
    if (path / "config.yaml").is_file():
        return _describe_run(path)
    raise InputError(f"{path} is neither a store ({MANIFEST}) nor a run folder (config.yaml)")


def _describe_store(path: Path) -> list[str]:
    store = InteractionStore.open(path)
    mean = store.num_interactions / max(store.num_users, 1)
    return [
        f"store {path}: {store.num_users:,} users, {store.num_items:,} items, {store.num_interactions:,} interactions",
        f"{mean:.1f} interactions a user, time unit {store.time_unit}, checksums right",
        json.dumps(store.manifest, indent=2),
    ]


def _describe_run(path: Path) -> list[str]:
    metrics = path / "metrics.json"
    checkpoints = sorted(folder.name for folder in (path / "checkpoints").glob("[!.]*"))
    lines = [f"run {path}, checkpoints: {', '.join(checkpoints) or 'none'}"]
    return lines + ([metrics.read_text().rstrip()] if metrics.is_file() else ["not finished: no metrics.json"])
