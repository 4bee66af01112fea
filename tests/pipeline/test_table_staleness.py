"""Which tables are chosen to be stale, and what is said of it."""

from __future__ import annotations

import pytest

from turbogr_plugin.pipeline.collisions import CountedTable
from turbogr_plugin.pipeline.table_staleness import choose_staleness

ITEMS = CountedTable("bags", "items", 1000, ("item",))
GENDER = CountedTable("bags", "gender", 2, ("gender",))
USERS = CountedTable("users", "users", 500, ("user",))


def test_a_table_is_stale_only_below_the_limit_and_with_it_all_of_its_module() -> None:
    choice = choose_staleness({ITEMS: 0.001, GENDER: 0.5, USERS: 0.02}, 2, steps=10)
    assert choice.modules == {"bags": 0, "users": 2}
    assert [table.staleness for table in choice.tables] == [0, 0, 2]


@pytest.mark.parametrize(("alpha", "staleness", "stale"), [(0.049, 1, 1), (0.05, 1, 0), (0.024, 2, 2), (0.025, 2, 0)])
def test_the_limit_holds_for_alpha_times_tau_and_is_itself_too_much(alpha: float, staleness: int, stale: int) -> None:
    assert choose_staleness({USERS: alpha}, staleness).modules == {"users": stale}


def test_the_limit_is_an_argument() -> None:
    assert choose_staleness({USERS: 0.5}, 1, limit=0.6).modules == {"users": 1}
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"staleness_limit must be a positive number .*, got {limit}"):
            choose_staleness({USERS: 0.5}, 1, limit=limit)


def test_alpha_and_the_choice_are_told_of_every_table() -> None:
    lines = choose_staleness({ITEMS: 0.001, GENDER: 0.5, USERS: 0.02}, 1, steps=10).lines()
    assert lines == [
        "staleness 1, limit alpha tau < 0.05, alpha over 10 steps:",
        "  bags.items   alpha 1.00e-03  exact: alpha tau = 1.00e-03 is below 0.05, "
        "but its module looks up gender, too: split the collection to part them",
        "  bags.gender  alpha 5.00e-01  exact: alpha tau = 5.00e-01 is not below 0.05",
        "  users.users  alpha 2.00e-02  stale: alpha tau = 2.00e-02 is below 0.05",
    ]
