"""Jagged shapes, masks and dims at which C++ attention takes its different ways, for tests and sanitizer.

Its tiles are 64 lanes wide, 32 where they are seen in part, and 16 rows high; blocks are 256 tokens; rows of up to 32
tokens share a tile.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.kernels.attention_cases import Case

SHORT_ROWS = (3, 0, 7, 1, 20, 0, 0, 11, 32, 5, 33)
BORDERS = (31, 64, 65, 63, 1, 0, 127)

CASES = (
    Case(()),
    Case((0, 0)),
    Case(SHORT_ROWS, heads=3, time=128, position=40),
    Case(BORDERS, dim=25, value_dim=50, time=32, position=200, sorted_times=False),
    Case((257, 2, 300), heads=1, dim=64, value_dim=64, time=128, position=300),
    Case((515,), heads=9, dim=16, value_dim=8, time=128, position=0),
    Case((130, 40), heads=2, dim=128, value_dim=32, time=0, position=64),
    Case((70, 12), heads=2, dim=256, value_dim=256, time=0, position=0),
    Case((100, 33, 2), causal=False, time=12),
    Case((90, 280), per_head=True, heads=3, time=20, position=100, borders=True, index_dtype=torch.int32),
    Case(SHORT_ROWS, targets=(1, 0, 7, 0, 5, 0, 0, 3, 9, 5, 12), contextual=2, per_head=True),
    Case((300, 140, 64), targets=(20, 0, 64), contextual=(3, 70, 1), window=40, full_tail=30, time=32, position=500),
    Case((400,), targets=(17,), window=5, heads=2, time=64, position=64, next_times=True),
    Case((150, 290), targets=(10, 100), contextual=(0, 35), causal=False, window=33, time=9),
    Case((20, 30), targets=(20, 15), contextual=(4, 20), time=9),
)

FUXI_CASES = tuple(
    replace(
        case, family="fuxi", time=max(case.time, 5), position=max(case.position, 3), causal=True, decay=number % 3 == 1
    )
    for number, case in enumerate(CASES)
)
