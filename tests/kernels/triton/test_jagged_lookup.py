"""What the launches of the lookup, the sums and the updates decide before any kernel: who serves, and who does what."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, Settings
from turbogr_plugin.kernels.lookup_call import CoalesceCall, StochasticRounding, UpdateCall
from turbogr_plugin.kernels.triton import coalesce_rows, fused_update, row_tiles
from turbogr_plugin.kernels.triton.jagged_lookup import bag_shares
from turbogr_plugin.kernels.triton.row_segments import row_segments
from turbogr_plugin.kernels.triton.targets import Target

ASCEND = Target(True, "Ascend910B3", 20, 40)
CUDA = Target(False, "90", 132, 132)


@pytest.mark.parametrize("seed", range(8))
def test_segments_are_the_positions_of_each_row_in_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = seed * seed
    number = torch.randint(-3, 3 + seed, (count,), generator=generator) * 2**40
    absent = torch.rand(count, generator=generator) < (0.0, 0.3, 1.0)[seed % 3]
    expected: dict[int, list[int]] = defaultdict(list)
    for position, row in enumerate(number.tolist()):
        if not absent[position]:
            expected[row].append(position)
    found = row_segments(number, absent)
    assert int(found.heads[-1]) == len(expected)
    begins = found.begins.tolist()
    for segment, row in enumerate(sorted(expected)):
        assert found.order[begins[segment] : begins[segment + 1]].tolist() == expected[row]
    for place in range(count + 1):
        assert int(found.heads[place]) == sum(begin < place for begin in begins[: len(expected)])


def test_without_absent_positions_all_are_in_a_segment() -> None:
    found = row_segments(torch.tensor([5, 2, 5], dtype=torch.int32))
    assert found.order.tolist() == [1, 0, 2]
    assert found.begins[:3].tolist() == [0, 1, 3] and found.heads.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("features", "batch", "programs"), [(1, 1, 6), (3, 7, 4), (2, 40, 6), (4, 1, 1)])
def test_the_bags_of_each_feature_are_shared_out_once_and_evenly(
    features: int, batch: int, programs: int, dtype: torch.dtype
) -> None:
    draw = random.Random(batch)
    lengths = [draw.choice((0, 0, 1, 2, 9)) for _ in range(features * batch)]
    lengths[-batch:] = [0] * batch  # a feature without ids
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)
    shares = bag_shares(offsets, features, batch, programs)
    assert shares.shape == (features, programs + 1)
    for feature in range(features):
        row = shares[feature].tolist()
        assert row[0] == feature * batch and row[-1] == (feature + 1) * batch and row == sorted(row)
        work = [sum(1 + lengths[bag] for bag in range(begin, end)) for begin, end in pairwise(row)]
        assert max(work) <= sum(work) / programs + 1 + max(lengths)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_without_a_kernel_are_refused_by_name(optimizer: str) -> None:
    reason = fused_update.refuses_optimizer(optimizer, Settings(learning_rate=1.0), 0)
    if optimizer in fused_update.OPTIMIZERS:
        assert reason is None
    else:
        assert reason is not None and optimizer in reason and "rowwise_adagrad" in reason


def test_settings_that_no_kernel_knows_are_refused() -> None:
    longest = Settings(learning_rate=1.0, max_norm=2.0)
    assert "max_norm = 2.0" in str(fused_update.refuses_optimizer("rowwise_adagrad", longest, 0))
    counted = Settings(learning_rate=1.0, rowwise_bias_correction=True)
    assert "rowwise_bias_correction" in str(fused_update.refuses_optimizer("adam", counted, 0))
    wide = fused_update.refuses_optimizer("sgd", Settings(learning_rate=1.0), 513)
    assert "513 columns, more than 512" in str(wide)


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert coalesce_rows.refuses_sizes(2**31 - 2**16, row_tiles.WIDEST) is None
    assert str(2**31) in str(coalesce_rows.refuses_sizes(2**31, 8))
    assert "4097 columns" in str(coalesce_rows.refuses_sizes(1, 4097))
    assert "0 columns" in str(coalesce_rows.refuses_sizes(1, 0))


def test_tensors_on_cpu_are_refused() -> None:
    ids, rows = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4)
    assert "not on cpu" in str(coalesce_rows.refuses(CoalesceCall(ids, rows)))
    call = UpdateCall(rows, (), ids, rows, "sgd", Settings(learning_rate=1.0), None)
    assert "not on cpu" in str(fused_update.refuses(call))


def test_words_of_the_rounding_keep_their_bits() -> None:
    rounding = StochasticRounding(seed=0xDEADBEEF, step=0x7FFFFFFF)
    arguments = fused_update.optimizer_arguments(
        "sgd", Settings(learning_rate=0.5), rounding, torch.zeros(1, dtype=torch.bfloat16)
    )
    assert arguments["seed"] % 2**32 == 0xDEADBEEF and -(2**31) <= arguments["seed"] < 2**31
    assert arguments["step"] == 0x7FFFFFFF and arguments["DROPPED"] == 16
    nearest = fused_update.optimizer_arguments("sgd", Settings(learning_rate=0.5), rounding, torch.zeros(1))
    assert nearest["DROPPED"] == 0


@pytest.mark.parametrize("target", [ASCEND, CUDA], ids=["ascend", "cuda"])
@pytest.mark.parametrize("width", [1, 4, 16, 17, 128, 200, 1024, row_tiles.WIDEST])
def test_tiles_hold_a_row_and_no_more_than_a_warp_can(target: Target, width: int) -> None:
    for tile in (row_tiles.lookup_tile(width), row_tiles.sum_tile(target, width)):
        assert tile.width >= max(width, 16) and tile.width < max(2 * width, 17) and tile.width & (tile.width - 1) == 0
        assert tile.rows == 1 or tile.rows * tile.width <= 1024
    warps = row_tiles.options(target, width).get("num_warps", 1)
    assert row_tiles.programs(target, width) == (40 if target.ascend else 132 * 32 // warps)
