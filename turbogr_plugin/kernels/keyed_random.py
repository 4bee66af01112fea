"""Random numbers that belong to a sample, not to a rank or a process.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a 64-bit key and a 128-bit
counter into four 32-bit words. The key is (seed, step or epoch), the counter (block, lane, sample id, purpose): whoever
holds a sample draws the same numbers for it, whatever the number of ranks, the batch around it, or the order of calls.

Written on int64 tensors alone, so that it runs on any device, `npu` included, that has integer arithmetic.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(enum.IntEnum):
    """What a stream of random numbers is for: streams of different purposes are independent."""

    NEGATIVES = 1
    DROPOUT = 2
    TABLE_INIT = 3
    ROUNDING = 4


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 of 32-bit counters.

    Args:
        counter: four int64 tensors with values in [0, 2^32), of shapes that broadcast together.
        key: two integers in [0, 2^32).

    Returns:
        int64 [4, *broadcast shape], values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        # A product of two 32-bit numbers wraps in int64 but keeps its bits; the mask takes the sign extension off.
        p0, p1 = c0 * m0, c2 * m1
        c0, c2 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3))


def _check_range(name: str, values: Tensor | int, bits: int) -> None:
    """A value that does not fit its bits would draw the numbers of another one."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu" or values.numel() == 0:  # reading the values would wait for a device
            return
        low, high = (int(bound) for bound in values.aminmax())
    else:
        low = high = values
    if low < 0 or high >= 1 << bits:
        raise ValueError(f"{name} must be in [0, 2^{bits}), got {low} to {high}")


def keyed_words(
    purpose: Purpose, *, seed: int, step: int, samples: Tensor, lanes: Tensor | int, blocks: Tensor
) -> Tensor:
    """Four random 32-bit words for each (sample, lane, block).

    Args:
        purpose: the stream.
        seed: in [0, 2^32).
        step: training step or epoch, in [0, 2^32).
        samples: int64 sample ids in [0, 2^56).
        lanes: what tells draws of one sample apart (a position, a layer), in [0, 2^32).
        blocks: running number inside a lane, in [0, 2^32); each gives four words.

    Returns:
        int64 [4, *broadcast shape of samples, lanes and blocks], values in [0, 2^32).

    Raises:
        ValueError: a seed, step or lane out of range, or (looked at on CPU only) a sample id or block.
    """
    for name, value in (("seed", seed), ("step", step)):
        if not 0 <= value <= _MASK:
            raise ValueError(f"{name} must be in [0, 2^32), got {value}")
    _check_range("sample ids", samples, 56)
    _check_range("blocks", blocks, 32)
    _check_range("lanes", lanes, 32)
    lane = lanes if isinstance(lanes, Tensor) else torch.full_like(samples, lanes)
    high = (samples >> 32) | (int(purpose) << 24)
    return philox4x32((blocks, lane, samples & _MASK, high), (seed, step))


def keyed_integers(words: Tensor, bound: int) -> Tensor:
    """Uniform integers in [0, bound) from words [4, ...]: int64 [2, ...].

    Two words make one 63-bit number, of which the remainder is taken; the bias is below bound / 2^63.
    """
    if not 0 < bound < 1 << 62:
        raise ValueError(f"bound must be in (0, 2^62), got {bound}")
    wide = ((words[0::2] & 0x7FFFFFFF) << 32) | words[1::2]
    return wide.remainder_(bound)
