"""Philox4x32-10 on the device, with the counters of kernels/keyed_random.py: the same words to the bit.

The host splits sample ids into 32-bit halves, so that the kernels need no 64-bit arithmetic.
"""
# Triton's language has types of its own, which Python's annotations cannot say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _high_product(x, FACTOR: tl.constexpr):
    """Upper half of x times a 32-bit constant, uint32, from products of 16-bit halves.

    Not tl.umulhi: triton-ascend 3.2.0 lowers it to a signed product.
    """
    LOW: tl.constexpr = FACTOR % 65536
    HIGH: tl.constexpr = FACTOR // 65536
    x_low = x & 0xFFFF
    x_high = x >> 16
    low_high = x_low * HIGH
    high_low = x_high * LOW
    middle = ((x_low * LOW) >> 16) + (low_high & 0xFFFF) + (high_low & 0xFFFF)
    return x_high * HIGH + (low_high >> 16) + (high_low >> 16) + (middle >> 16)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random words, uint32, from counters of uint32 (of one shape) and a key of two uint32 scalars."""
    for _ in range(10):
        low0 = c0 * 0xD2511F53
        high0 = _high_product(c0, 0xD2511F53)
        low1 = c2 * 0xCD9E8D57
        high1 = _high_product(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _keep(words, threshold):
    """1 where an unsigned word is at least the threshold (given minus 2^31, signed), else 0: float32."""
    return tl.where((words ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold, 1.0, 0.0)


@triton.jit
def kept(
    Counters,
    tokens,
    token,
    first_block,
    seed,
    step,
    layer,
    threshold,
    dropped,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """1 for each element of a [ROWS, WIDTH] tile that dropout keeps, else 0: float32. All ones unless `dropped`.

    `dropped` is a number and not a constant, because bishengir 1.2.0 cannot schedule the interleaving of words in one
    block of code with reductions over rows: the branch keeps them apart.

    Counters: int32 [3, T], the bits of (position * blocks of a token, sample id, sample id >> 32 with the purpose).
    first_block: block of four elements in the token at which the tile begins.
    """
    keep = tl.zeros((ROWS, WIDTH), dtype=tl.float32) + 1.0
    if dropped > 0:
        there = token < tokens
        base = tl.load(Counters + token, mask=there, other=0)
        sample = tl.load(Counters + tokens + token, mask=there, other=0)
        high = tl.load(Counters + 2 * tokens + token, mask=there, other=0)
        zeros = tl.zeros((ROWS, WIDTH // 4), dtype=tl.int32)
        c0 = (base[:, None] + (first_block + tl.arange(0, WIDTH // 4))[None, :]).to(tl.uint32, bitcast=True)
        c1 = (zeros + layer).to(tl.uint32, bitcast=True)
        c2 = (zeros + sample[:, None]).to(tl.uint32, bitcast=True)
        c3 = (zeros + high[:, None]).to(tl.uint32, bitcast=True)
        w0, w1, w2, w3 = philox4x32(c0, c1, c2, c3, seed.to(tl.uint32, bitcast=True), step.to(tl.uint32, bitcast=True))
        even = tl.interleave(_keep(w0, threshold), _keep(w2, threshold))
        odd = tl.interleave(_keep(w1, threshold), _keep(w3, threshold))
        keep = tl.interleave(even, odd)
    return keep
