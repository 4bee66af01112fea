"""Small stores for tests, from sequences given in the code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turbogr_plugin.data.store import InteractionStore, TimeUnit, write_array, write_manifest


def write_small_store(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    times: Sequence[Sequence[int]] | None = None,
    *,
    num_items: int | None = None,
    time_unit: TimeUnit = "s",
) -> InteractionStore:
    """A store whose user u has the dense items sequences[u]; without times, event n of a user happens at 100 n + u."""
    if times is None:
        times = [[100 * n + user for n in range(len(row))] for user, row in enumerate(sequences)]
    if num_items is None:
        num_items = 1 + max(item for row in sequences for item in row)
    lengths = [len(row) for row in sequences]
    arrays = {
        "item_ids": [item for row in sequences for item in row],
        "times": [time for row in times for time in row],
        "offsets": [sum(lengths[:user]) for user in range(len(lengths) + 1)],
        "users": [1000 + 3 * user for user in range(len(lengths))],
        "items": [50 + 7 * item for item in range(num_items)],
    }
    folder.mkdir(parents=True)
    files = {
        f"{name}.npy": write_array(folder / f"{name}.npy", np.array(values, dtype=np.int64))
        for name, values in arrays.items()
    }
    write_manifest(
        folder,
        files=files,
        num_users=len(lengths),
        num_items=num_items,
        num_interactions=sum(lengths),
        time_unit=time_unit,
        config={},
        report={},
    )
    return InteractionStore.open(folder)


def random_sequences(users: int, num_items: int, *, seed: int, longest: int = 12) -> list[list[int]]:
    """Sequences of 3 to `longest` items; every item may repeat."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, num_items, generator.integers(3, longest + 1)).tolist() for _ in range(users)]
