from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from turbogr_plugin.kernels.keyed_random import Purpose, keyed_integers, keyed_words, philox4x32


# kat_vectors of Random123 (Salmon et al.): counter, key, result of philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert philox4x32((c0, c1, c2, c3), key).flatten().tolist() == list(expected)


def _words(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "seed": 3,
        "step": 5,
        "samples": torch.arange(6)[:, None, None],
        "lanes": torch.arange(4)[:, None],
        "blocks": torch.arange(3),
    }
    return keyed_words(**{"purpose": Purpose.DROPOUT, **arguments, **changes})


def test_a_draw_depends_on_its_own_key_alone() -> None:
    together = _words()
    assert together.shape == (4, 6, 4, 3)
    order = torch.tensor([4, 0, 5, 2])
    assert torch.equal(_words(samples=order[:, None, None]), together[:, order])
    for sample, lane, block in [(0, 0, 0), (5, 3, 2), (2, 1, 1)]:
        alone = _words(samples=torch.tensor([sample]), lanes=lane, blocks=torch.tensor([block]))
        assert torch.equal(alone[:, 0], together[:, sample, lane, block])


def test_no_two_keys_share_their_words() -> None:
    samples = torch.tensor([0, 1, 2, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 55, (1 << 56) - 1])
    small = torch.tensor([0, 1, 2, 1 << 24, (1 << 32) - 1])
    drawn = [
        _words(
            purpose=purpose, seed=seed, step=step, samples=samples[:, None, None], lanes=small[:, None], blocks=small
        ).flatten(1)
        for purpose, seed, step in itertools.product(Purpose, (0, 1, (1 << 32) - 1), (0, 1, 1 << 31))
    ]
    found = {tuple(words) for words in torch.cat(drawn, 1).T.tolist()}
    assert len(found) == len(Purpose) * 9 * 8 * 25


def _chi_square(values: Tensor, bins: int) -> float:
    counts = torch.bincount(values, minlength=bins).double()
    expected = values.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("shift", [0, 12, 24])
def test_every_byte_of_every_word_is_uniform(shift: int) -> None:
    words = _words(samples=torch.arange(2000)[:, None, None], blocks=torch.arange(4))
    for word in words:
        # 255 degrees of freedom: mean 255, deviation sqrt(510) = 22.6; five of them.
        assert abs(_chi_square(word.flatten() >> shift & 255, 256) - 255) < 113


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, r"seed must be in \[0, 2\^32\), got -1"),
        ({"seed": 1 << 32}, "seed must be"),
        ({"step": -1}, "step must be"),
        ({"step": 1 << 32}, "step must be"),
        ({"samples": torch.tensor([0, -1])[:, None, None]}, r"sample ids must be in \[0, 2\^56\), got -1 to 0"),
        ({"samples": torch.tensor([1 << 56])}, "sample ids must be"),
        ({"lanes": -1}, "lanes must be"),
        ({"lanes": torch.tensor([1 << 32])}, "lanes must be"),
        ({"blocks": torch.tensor([1 << 32])}, "blocks must be"),
    ],
    ids=str,
)
def test_keys_that_would_wrap_into_others_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _words(**changes)


def test_no_samples_draw_no_words() -> None:
    assert _words(samples=torch.empty(0, 1, 1, dtype=torch.int64)).shape == (4, 0, 4, 3)


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 1 << 32, (1 << 40) + 7, (1 << 62) - 1])
def test_integers_are_the_remainder_of_63_bits(bound: int) -> None:
    words = _words()
    drawn = keyed_integers(words, bound)
    first, second, third, fourth = words.flatten(1).tolist()
    expected = [
        [((a % 2**31) * 2**32 + b) % bound for a, b in zip(high, low, strict=True)]
        for high, low in ((first, second), (third, fourth))
    ]
    assert drawn.flatten(1).tolist() == expected
    assert torch.equal(words, _words())  # the words are left as they were


@pytest.mark.parametrize("bound", [7, 256])
def test_integers_are_uniform(bound: int) -> None:
    drawn = keyed_integers(_words(samples=torch.arange(4000)[:, None, None]), bound).flatten()
    freedom = bound - 1
    assert abs(_chi_square(drawn, bound) - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("bound", [0, -4, 1 << 62])
def test_a_bound_out_of_range_is_refused(bound: int) -> None:
    with pytest.raises(ValueError, match=f"bound must be in .*, got {bound}"):
        keyed_integers(_words(), bound)
