"""Iterative k-core of a user-item log: drop rare users and rare items until every one left is frequent enough.

The k-core is unique: whatever the order of removals, the same largest set of rows remains in which every user has at
least `user_core` rows and every item at least `item_core`. Rows are streamed from disk once per round; memory holds a
counter and a state byte per user and item. Counters are decremented by the rows that die in a round, so a round costs
one lookup per row (about 10 ns), and the late rounds, which remove a handful of rows, cost no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

_ALIVE, _DYING, _DEAD = 0, 1, 2

Blocks = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Starts a new pass over the rows: blocks of dense user indices [n] and dense item indices [n]."""


@dataclass(frozen=True)
class KCore:
    """What is left."""

    user_counts: np.ndarray
    """int64 [U]: rows of each user in the core, 0 for a dropped user."""
    item_counts: np.ndarray
    """int64 [I]: rows of each item in the core, 0 for a dropped item."""
    removed_by_item: int
    """Rows dropped because their item became too rare."""
    removed_by_user: int
    """Rows dropped because their user, and not in the same round their item, became too rare."""
    rounds: int


def k_core(blocks: Blocks, *, num_users: int, num_items: int, user_core: int, item_core: int) -> KCore:
    """The k-core of the rows that `blocks` yields.

    Args:
        blocks: starts a pass over all rows; called once per round.
        num_users: U; user indices are below it.
        num_items: I; item indices are below it.
        user_core: least number of rows of a user, at least 1.
        item_core: least number of rows of an item, at least 1.
    """
    user_counts = np.zeros(num_users, dtype=np.int64)
    item_counts = np.zeros(num_items, dtype=np.int64)
    for users, items in blocks():
        np.add.at(user_counts, users, 1)
        np.add.at(item_counts, items, 1)
    user_state = np.full(num_users, _ALIVE, dtype=np.uint8)
    item_state = np.full(num_items, _ALIVE, dtype=np.uint8)
    removed_by_item = removed_by_user = rounds = 0
    while True:
        user_state[(user_state == _ALIVE) & (user_counts < user_core)] = _DYING
        item_state[(item_state == _ALIVE) & (item_counts < item_core)] = _DYING
        # A dying user or item that has no row left takes nothing with it: without this a last idle pass would follow.
        if not user_counts[user_state == _DYING].any() and not item_counts[item_state == _DYING].any():
            return KCore(user_counts, item_counts, removed_by_item, removed_by_user, rounds)
        rounds += 1
        for users, items in blocks():
            item_states = item_state[items]
            dying = np.flatnonzero(np.maximum(user_state[users], item_states) == _DYING)
            np.subtract.at(user_counts, users[dying], 1)
            np.subtract.at(item_counts, items[dying], 1)
            by_item = int(np.count_nonzero(item_states[dying] == _DYING))
            removed_by_item += by_item
            removed_by_user += len(dying) - by_item
        user_state[user_state == _DYING] = _DEAD
        item_state[item_state == _DYING] = _DEAD
