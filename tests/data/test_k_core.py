from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from tests.data.oracles import Row, brute_force_k_core
from turbogr_plugin.data.k_core import k_core


@pytest.mark.parametrize("seed", range(30))
def test_k_core_of_a_random_graph_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_users, num_items = int(rng.integers(1, 15)), int(rng.integers(1, 15))
    user_core, item_core = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    rows = [
        Row(user, item, 0)
        for user, item in zip(
            rng.integers(0, num_users, 60).tolist(), (num_items * rng.random(60) ** 2).astype(int).tolist(), strict=True
        )
    ][: int(rng.integers(0, 61))]
    users = np.array([row.user for row in rows], dtype=np.int32)
    items = np.array([row.item for row in rows], dtype=np.int32)
    block = int(rng.integers(1, 20))

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, len(rows), block):
            yield users[first : first + block], items[first : first + block]

    core = k_core(blocks, num_users=num_users, num_items=num_items, user_core=user_core, item_core=item_core)

    expected = brute_force_k_core(rows, user_core, item_core)
    by_user, by_item = Counter(row.user for row in expected), Counter(row.item for row in expected)
    assert core.user_counts.tolist() == [by_user[user] for user in range(num_users)]
    assert core.item_counts.tolist() == [by_item[item] for item in range(num_items)]
    assert core.removed_by_user + core.removed_by_item == len(rows) - len(expected)


def test_k_core_follows_a_long_chain_of_removals_to_its_end() -> None:
    # user n has the items n and n + 1: the ends have one row each, and every round eats one step from either end
    length = 200
    users = np.repeat(np.arange(length, dtype=np.int32), 2)
    items = users + np.tile([0, 1], length).astype(np.int32)

    core = k_core(lambda: iter([(users, items)]), num_users=length, num_items=length + 1, user_core=2, item_core=2)

    assert not core.user_counts.any() and not core.item_counts.any()
    assert core.removed_by_user + core.removed_by_item == 2 * length
    assert core.rounds > length // 2


def test_rows_are_counted_under_the_rule_that_removed_them() -> None:
    users = np.array([0, 0, 1, 1, 1, 2], dtype=np.int32)
    items = np.array([0, 1, 0, 1, 2, 0], dtype=np.int32)  # item 2 is rare, user 2 is rare

    core = k_core(lambda: iter([(users, items)]), num_users=3, num_items=3, user_core=2, item_core=2)

    assert (core.removed_by_item, core.removed_by_user) == (1, 1)
    assert core.user_counts.tolist() == [2, 2, 0]
