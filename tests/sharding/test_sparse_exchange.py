"""The exchange of rows: all ways lead to the same sums, and the one with the fewest bytes is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu.ranks import Call, RankPool

RUN = "tests.sharding.exchanged_rows:exchanged"


def run(ranks: RankPool, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """By case and rank."""
    (outcome,) = ranks.run([Call(RUN, {"cases": cases}, world_size=4)])
    return list(map(list, zip(*outcome.result(), strict=True)))


@pytest.mark.timeout(120)
def test_all_ways_give_the_sums_of_one_process_to_the_last_bit(ranks: RankPool) -> None:
    cases = [
        {"way": way, "share": share, "shared": shared}
        for way in ("all_gather", "reduce_scatter", "dense")
        for share, shared in ((0.3, True), (0.3, False), (2.0, True), (0.0, True))
    ]
    for case, found in zip(cases, run(ranks, cases), strict=True):
        for of_rank in found:
            assert of_rank["way"] == case["way"], case
            assert of_rank["ids"], case
            assert of_rank["error"] == 0.0, case


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("wire", "error"), [("float16", 2e-2), ("bfloat16", 2e-1)])
def test_a_narrow_wire_rounds_and_sends_fewer_bytes(ranks: RankPool, wire: str, error: float) -> None:
    ways = ("all_gather", "reduce_scatter", "dense")
    narrow = run(ranks, [{"way": way, "share": 0.5, "wire": wire} for way in ways])
    full = run(ranks, [{"way": way, "share": 0.5} for way in ways])
    for here, there in zip(narrow, full, strict=True):
        for of_rank, wide in zip(here, there, strict=True):
            assert 0 < of_rank["error"] < error
            assert 0.45 < of_rank["bytes"] / wide["bytes"] < 0.75  # ids and headers stay


@pytest.mark.timeout(120)
def test_the_way_with_the_fewest_bytes_is_taken(ranks: RankPool) -> None:
    ways = ("all_gather", "reduce_scatter", "dense", None)
    for share, shared, best in ((0.25, True, "reduce_scatter"), (0.2, False, "all_gather"), (12.0, True, "dense")):
        found = run(ranks, [{"way": way, "share": share, "shared": shared} for way in ways])
        *fixed, chosen = [max(of_rank["bytes"] for of_rank in each) for each in found]
        assert {of_rank["way"] for of_rank in found[-1]} == {best}, (share, fixed)
        assert chosen <= 1.02 * min(fixed), (share, fixed)


@pytest.mark.timeout(120)
def test_of_several_tables_those_travel_whole_that_are_touched_densely(ranks: RankPool) -> None:
    ways = ("all_gather", "reduce_scatter", "dense", None)
    for share, dense in (([0.2, 12.0, 0.3], [1]), ([12.0, 0.2, 0.0], [0]), ([0.2, 12.0, 12.0], [1, 2])):
        found = run(ranks, [{"way": way, "share": share} for way in ways])
        *fixed, chosen = [max(of_rank["bytes"] for of_rank in each) for each in found]
        assert chosen < 0.95 * min(fixed), (share, chosen, fixed)
        for of_rank in found[-1]:
            assert of_rank["dense"] == dense, share
            assert of_rank["ids"], share
            assert of_rank["error"] == 0.0, share
