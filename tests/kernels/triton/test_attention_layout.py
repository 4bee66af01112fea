from __future__ import annotations

import pytest
import torch

from turbogr_plugin.kernels.attention_call import HSTUAttentionCall
from turbogr_plugin.kernels.triton import attention_layout as layout


def _call(lengths: list[int], **fields: torch.Tensor) -> HSTUAttentionCall:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q = torch.zeros(int(offsets[-1]), 1, 8)
    return HSTUAttentionCall(q, q, q, offsets, 1.0, 1.0)._replace(**fields)


@pytest.mark.parametrize("lengths", [[5], [0, 3, 0, 0, 8, 9, 1, 0], [16, 16], [0, 0, 1]])
def test_work_holds_each_tile_of_each_row_once(lengths: list[int]) -> None:
    call = _call(lengths)
    work = layout.work(layout.row_table(call), call.q.shape[0], 8)
    expected = [[row, tile] for row, length in enumerate(lengths) for tile in range(-(-length // 8))]
    assert work.items[: int(work.size)].tolist() == expected
    assert work.bound >= len(expected)


def test_offsets_that_do_not_fit_are_cut_to_the_batch() -> None:
    rows = layout.row_table(_call([4, 4])._replace(offsets=torch.tensor([-7, 99, 3, 1 << 40])))
    starts, lengths = rows[:, 0], rows[:, 1]
    assert bool(((starts >= 0) & (lengths >= 0) & (starts + lengths <= 8)).all())


def test_targets_beyond_a_row_are_cut_to_it() -> None:
    rows = layout.row_table(_call([4, 2], num_targets=torch.tensor([9, -1])))
    assert rows[:, 2].tolist() == [4, 0]


@pytest.mark.parametrize("unit", [1, 1000, 1_000_000])
def test_split_times_give_the_float32_nearest_to_each_gap(unit: int) -> None:
    generator = torch.Generator().manual_seed(unit)
    lengths = [40, 0, 1, 25]
    times = torch.randint(0, 10**7, (66,), generator=generator) * unit + 1_700_000_000 * unit
    asked = times + torch.randint(-5, 10**6, (66,), generator=generator) * unit
    call = _call(lengths, timestamps=times, query_timestamps=asked)
    q_high, q_low, k_high, k_low = layout.split_times(call)
    start = 0
    for length in lengths:
        row = slice(start, start + length)
        start += length
        gaps = (q_high[row, None] - k_high[row]) + (q_low[row, None] - k_low[row])
        exact = asked[row, None] - times[row]
        assert torch.equal(gaps.abs(), exact.abs().to(torch.float32))


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 8), (8, 16)])
@pytest.mark.parametrize("entries", [1, 7, 40])
def test_position_tiles_hold_the_entry_of_each_pair(rows: int, columns: int, entries: int) -> None:
    table = torch.arange(entries, dtype=torch.float32)
    (tiles,) = layout.position_tiles(table, rows, columns)
    step = min(rows, columns)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    for offset in range(-128, 129, step):
        # As position_bias_tile chooses one.
        last = (entries + columns) // step + 1 + rows // step
        which = min(max(offset // step + rows // step, 0), last)
        assert torch.equal(tiles[which], table[(offset + i - j).clamp(0, entries - 1)])
    assert tiles.shape[0] == last + 1


def test_folded_sums_put_what_lies_outside_the_table_into_its_ends() -> None:
    tile, entries = 4, 6
    sums = torch.zeros(2, layout.position_slots(entries, tile))
    for difference in range(-2 * tile, entries + 5):
        sums[:, difference + 2 * tile] += 2.0 ** max(0, min(difference, entries - 1))
    folded = layout.fold_positions(sums, entries, tile)
    assert folded[0].tolist() == [2 * tile + 1, 2, 4, 8, 16, 32 * 6]
    assert torch.equal(folded[0], folded[1])
