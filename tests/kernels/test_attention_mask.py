"""Who sees whom: the ids and the pairs made of them against what the tokens are, token by token."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kernels.attention_cases import Case, sees
from turbogr_plugin.kernels.attention_mask import allowed_pairs, check_mask, check_mask_values, token_ids
from turbogr_plugin.kernels.offsets import lengths_to_offsets


def _mask(length: int, targets: int | None, contextual: int | None, case: Case) -> list[list[bool]]:
    offsets = torch.tensor([0, length])
    n, c = (None if count is None else torch.tensor([count]) for count in (targets, contextual))
    ids = token_ids(offsets, length, n, c)
    allowed = allowed_pairs(
        ids.ids,
        ids.ids,
        ids.last[0],
        None if c is None else c[0],
        first_query=0,
        first_key=0,
        causal=case.causal,
        window=case.window,
        full_tail=case.full_tail,
    )
    return allowed.tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 4])
def test_every_small_row_is_masked_as_its_tokens_say(causal: bool, window: int | None) -> None:
    for length, full_tail in product((1, 2, 5, 6), (0, 1, 3, 9)):
        case = Case((length,), causal=causal, window=window, full_tail=full_tail)
        for targets, contextual in product(range(length + 1), range(length + 2)):
            wanted = [[sees(i, j, length, targets, contextual, case) for j in range(length)] for i in range(length)]
            assert _mask(length, targets, contextual, case) == wanted, (case, targets, contextual)
            if not targets:
                assert _mask(length, None, contextual, case) == wanted, (case, contextual)
            if not contextual:
                assert _mask(length, targets, None, case) == wanted, (case, targets)


def test_a_published_example_reads_as_drawn() -> None:
    # Two contextual tokens, four of history, two targets; window 2 with the last of history exempt.
    drawn = """
        11 1111 00
        11 1111 00
        11 1000 00
        11 1100 00
        00 1110 00
        11 1111 00
        11 1111 10
        11 1111 01
    """
    rows = [[digit == "1" for digit in line.replace(" ", "")] for line in drawn.strip().splitlines()]
    assert _mask(8, 2, 2, Case((8,), window=2, full_tail=1)) == rows


def test_ids_of_a_batch_are_those_of_its_rows() -> None:
    lengths, targets, contextual = [3, 0, 6, 1, 4], [1, 0, 2, 1, 0], [0, 3, 2, 1, 5]
    for dtype in (torch.int32, torch.int64):
        offsets = lengths_to_offsets(torch.tensor(lengths, dtype=dtype))
        n, c = torch.tensor(targets, dtype=dtype), torch.tensor(contextual, dtype=dtype)
        whole = token_ids(offsets, sum(lengths), n, c)
        assert whole.ids.dtype == whole.last.dtype == torch.int64
        for row, ids in enumerate(whole.ids.split(lengths)):
            alone = token_ids(torch.tensor([0, lengths[row]]), lengths[row], n[row : row + 1], c[row : row + 1])
            assert torch.equal(ids, alone.ids)
            assert int(whole.last[row]) == int(alone.last[0])
    assert token_ids(torch.tensor([0]), 0, None, None).ids.shape == (0,)


def test_a_chunk_of_a_row_is_that_part_of_its_mask() -> None:
    case = Case((9,), window=2, full_tail=1)
    n, c = torch.tensor([2]), torch.tensor([2])
    ids = token_ids(torch.tensor([0, 9]), 9, n, c)
    whole = torch.tensor(_mask(9, 2, 2, case))
    for first, last in ((0, 4), (4, 5), (5, 9)):
        part = allowed_pairs(
            ids.ids[first:last],
            ids.ids[1:],
            ids.last[0],
            c[0],
            first_query=first,
            first_key=1,
            causal=True,
            window=2,
            full_tail=1,
        )
        assert torch.equal(part, whole[first:last, 1:])


def test_what_fits_is_accepted() -> None:
    offsets = torch.tensor([0, 2, 2])
    check_mask(offsets, torch.tensor([2, 0]), torch.tensor([5, 0], dtype=torch.int32), 1, 0)
    check_mask_values(offsets, torch.tensor([2, 0]), torch.tensor([5, 0]))
    check_mask(offsets[:1], torch.empty(0, dtype=torch.int64), None, None, 3)
