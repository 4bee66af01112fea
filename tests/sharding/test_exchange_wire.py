"""Messages of rows: what comes out is what went in, rounded as the wire rounds."""

from __future__ import annotations

import pytest
import torch

from turbogr_plugin.sharding.exchange_wire import WIRES, backward_pass, decode, encode, message_bytes
from turbogr_plugin.sharding.touched_rows import TableLayout

LAYOUT = TableLayout(rows=(9, 5, 7, 3), dims=(8, 4, 8, 12), feature_tables=(0, 1, 2, 3), pooling=0)
COUNTS = [2, 3, 0, 1]  # of tables 1, 0, 2, 3: by width


def blocks(magnitudes: tuple[float, float, float]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 4), (3, 8), (1, 12)]
    return [torch.randn(size, generator=generator) * scale for size, scale in zip(sizes, magnitudes, strict=True)]


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_rows_come_back(wire: torch.dtype) -> None:
    rows = blocks((1.0, 30.0, 0.5))
    message = encode(LAYOUT, COUNTS, rows, wire)
    assert message.numel() == message_bytes(LAYOUT, COUNTS, wire)
    assert backward_pass(message) == 1
    for sent, came in zip(rows, decode(LAYOUT, COUNTS, message, wire), strict=True):
        assert came.dtype == torch.float32
        bits = {torch.float32: 60, torch.bfloat16: 8, torch.float16: 11}[wire]
        assert torch.allclose(sent, came, rtol=2.0**-bits, atol=2.0**-bits * 1e-3 * float(sent.abs().max()))


def test_fp16_keeps_eleven_bits_of_the_largest_gradients_of_each_table_however_small_they_are() -> None:
    rows = blocks((1e-12, 1e9, 1e-30))
    for sent, came in zip(
        rows, decode(LAYOUT, COUNTS, encode(LAYOUT, COUNTS, rows, torch.float16), torch.float16), strict=True
    ):
        largest = float(sent.abs().max())
        assert float((sent - came).abs().max()) <= largest * 2.0**-11


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_arrives_as_such(value: float) -> None:
    rows = blocks((1.0, 1.0, 1.0))
    rows[1][0, 0] = value
    _, came, _ = decode(LAYOUT, COUNTS, encode(LAYOUT, COUNTS, rows, torch.float16), torch.float16)
    assert not bool(came[0, 0].isfinite())
    assert bool(came[1:].isfinite().all())


def test_zeros_of_a_lookup_without_gradient_say_so() -> None:
    rows = [torch.zeros_like(block) for block in blocks((1.0, 1.0, 1.0))]
    message = encode(LAYOUT, COUNTS, rows, torch.float16, backward_pass=0)
    assert backward_pass(message) == 0
    assert not any(bool(block.any()) for block in decode(LAYOUT, COUNTS, message, torch.float16))


def test_a_lookup_of_nothing_is_a_header() -> None:
    rows = [torch.zeros(0, dim) for dim in (4, 8, 12)]
    message = encode(LAYOUT, [0] * 4, rows, torch.float16)
    assert message.numel() == 32
    assert [block.shape[0] for block in decode(LAYOUT, [0] * 4, message, torch.float16)] == [0, 0, 0]


def test_fp16_is_never_scaled_beyond_its_largest_number() -> None:
    for exponent in (-30, 0, 14, 60):
        largest = (2 - 2.0**-20) * 2.0**exponent  # rounds to 2^(exponent + 1) in eleven bits
        rows = [torch.full_like(block, largest) for block in blocks((1.0, 1.0, 1.0))]
        for came in decode(LAYOUT, COUNTS, encode(LAYOUT, COUNTS, rows, torch.float16), torch.float16):
            assert bool((came == 2.0 ** (exponent + 1)).all())


def test_fp16_holds_elements_of_a_table_down_to_2_to_the_minus_38_of_the_largest() -> None:
    rows = [torch.full_like(block, 2.0**-38) for block in blocks((1.0, 1.0, 1.0))]
    for block in rows:
        block[0, 0] = 1.0
    for sent, came in zip(
        rows, decode(LAYOUT, COUNTS, encode(LAYOUT, COUNTS, rows, torch.float16), torch.float16), strict=True
    ):
        assert torch.equal(sent, came)
