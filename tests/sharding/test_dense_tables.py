"""Which tables travel whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from turbogr_plugin.sharding.dense_tables import DenseTables
from turbogr_plugin.sharding.touched_rows import TableLayout

DIM = 8


def _chosen(rows: int, counts: list[int], wire: torch.dtype = torch.float32) -> bool:
    layout = TableLayout(rows=(rows,), dims=(DIM,), feature_tables=(0,), pooling=0)
    return DenseTables.cheapest(layout, [[count] for count in counts], wire).places == {0}


def _cheapest_bytes(rows: int, ids: list[set[int]], *, id_bytes: int, row: int) -> int:
    """What the busiest rank sends by the cheaper of all-gather and slices, counted message by message."""
    ranks = len(ids)
    union = sorted(set().union(*ids))
    cuts = [len(union) * number // ranks for number in range(ranks + 1)]
    slices = [set(union[first:last]) for first, last in itertools.pairwise(cuts)]
    gathered, sliced = [0] * ranks, [0] * ranks
    for one, other in itertools.permutations(range(ranks), 2):
        gathered[one] += len(ids[one]) * (id_bytes + row)
        sliced[one] += len(ids[one]) * id_bytes + (len(ids[one] & slices[other]) + len(slices[one])) * row
    return min(max(gathered), max(sliced))


@pytest.mark.parametrize(("wire", "row"), [(torch.float32, 4 * DIM), (torch.float16, 2 * DIM)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_table_travels_whole_where_that_takes_fewer_bytes(ranks: int, wire: torch.dtype, row: int) -> None:
    touched = 840
    chosen = []
    for rows in range(touched, 3 * touched, 56):
        ids = [set(range(touched))] * ranks  # all touch the same ones: what is known of the union at least
        whole = _cheapest_bytes(rows, [set(range(rows))] * ranks, id_bytes=0, row=row)
        some = _cheapest_bytes(rows, ids, id_bytes=4, row=row)
        assert _chosen(rows, [touched] * ranks, wire) == (whole < some), (rows, whole, some)
        chosen.append(whole < some)
    assert chosen[0] and not chosen[-1]


def test_the_rank_with_the_most_rows_decides() -> None:
    # Of 4 ranks 1.5 rows per row are sent at 32 bytes, and 3 ids per id at 4: whole below 1.25 touched rows.
    assert _chosen(124, [100] * 4) and not _chosen(126, [100] * 4)
    assert _chosen(124, [1, 100, 0, 7]) and not _chosen(124, [98] * 4)


def test_every_table_is_judged_for_itself() -> None:
    layout = TableLayout(rows=(120, 130, 120), dims=(8, 8, 16), feature_tables=(0, 1, 2), pooling=0)
    # Twice the width, half the share of ids: whole below 1.125 touched rows.
    assert DenseTables.cheapest(layout, [[100, 100, 100]] * 4, torch.float32).places == {0}
    assert DenseTables.cheapest(layout, [[100, 110, 110]] * 4, torch.float32).places == {0, 1, 2}
