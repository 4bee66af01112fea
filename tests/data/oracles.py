"""Slow and obvious versions of what `prepare` does, for tests only."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from turbogr_plugin.data.store import InteractionStore


class Row(NamedTuple):
    user: int
    item: int
    time: int


def brute_force_k_core(rows: list[Row], user_core: int, item_core: int) -> list[Row]:
    """Remove one bad row after another until none is left that is bad."""
    rows = list(rows)
    while True:
        users, items = Counter(row.user for row in rows), Counter(row.item for row in rows)
        for place, row in enumerate(rows):
            if users[row.user] < user_core or items[row.item] < item_core:
                del rows[place]
                break
        else:
            return rows


def oracle_sequences(
    rows: list[Row], *, user_core: int, item_core: int, dedup: bool = False
) -> dict[int, list[tuple[int, int]]]:
    """Raw user id -> (raw item id, time) in the order of the store, for rows that passed the feedback rules."""
    if dedup:
        rows = list(dict.fromkeys(rows))
    sequences: dict[int, list[tuple[int, int]]] = {}
    for row in sorted(brute_force_k_core(rows, user_core, item_core), key=lambda row: (row.user, row.time)):
        sequences.setdefault(row.user, []).append((row.item, row.time))
    return {user: sequence for user, sequence in sequences.items() if len(sequence) >= 3}


def store_sequences(store: InteractionStore) -> dict[int, list[tuple[int, int]]]:
    """The same of a store."""
    pairs = list(zip(store.raw_item_ids[store.item_ids].tolist(), store.times.tolist(), strict=True))
    offsets = store.offsets.tolist()
    return {user: pairs[offsets[n] : offsets[n + 1]] for n, user in enumerate(store.raw_user_ids.tolist())}
