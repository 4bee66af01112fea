"""HSTU and FuXi attention, lowered for Ascend and run on x86, against the plain PyTorch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ascend import execution
from tests.ascend.calls import LARGEST_ERROR, errors, fuxi_call, hstu_call
from turbogr_plugin.kernels.reference import fuxi_attention as fuxi_reference
from turbogr_plugin.kernels.reference import jagged_attention as hstu_reference
from turbogr_plugin.kernels.triton import attention_launch, fuxi_attention, jagged_attention
from turbogr_plugin.kernels.triton.tiles import Tile

execution.install()

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MASKS = {"targets": True, "contextual": True}
DECAY = torch.tensor([1.1, 0.02, 0.3])
DECAY_PER_HEAD = torch.tensor([[1.1, 0.02, 0.3], [0.8, 0.5, 0.1]])

HSTU: dict[str, dict[str, Any]] = {
    "both biases in fp32": {"dtype": FP32},
    "both biases in fp16": {"dtype": FP16, **MASKS},
    "both biases in bf16": {"dtype": BF16, "targets": True},
    "no biases": {"dtype": FP32, "biases": False},
    "every mask": {"dtype": FP32, **MASKS, "window": 20, "full_tail": 5},
    "tables per head, odd dims, int32 offsets": {
        "dtype": BF16,
        "per_head": True,
        "dim": 25,
        "value_dim": 50,
        "heads": 3,
        "offsets_dtype": torch.int32,
    },
    "not causal, window": {"dtype": FP16, "causal": False, **MASKS, "window": 20, "full_tail": 3},
    "not causal, no window": {"dtype": FP32, "causal": False, "targets": True},
    "window without a tail, times of the next event": {"dtype": FP32, "window": 9, "targets": True, "next_times": True},
    "window of one": {"dtype": FP16, "window": 1, "targets": True},
    "full tail of one": {"dtype": FP32, "window": 4, "full_tail": 1, **MASKS},
    "many contextual tokens, window": {"dtype": FP32, "window": 5, "contextual": 120},
    "many targets, window": {"dtype": FP32, "window": 5, "targets": 120, "contextual": 3},
    "one entry per table": {"dtype": FP32, "buckets": 1, "positions": 1, "contextual": True},
    "a row of one token": {"dtype": FP32, "lengths": (1,)},
}

FUXI: dict[str, dict[str, Any]] = {
    "buckets in fp32": {"dtype": FP32, **MASKS},
    "buckets in fp16": {"dtype": FP16},
    "buckets in bf16, odd dims": {"dtype": BF16, "targets": True, "dim": 25, "value_dim": 50},
    "decay": {"dtype": FP32, "decay": DECAY},
    "many contextual tokens, window of one": {"dtype": FP32, "window": 1, "full_tail": 1, "contextual": 120},
    "decay per head, window": {"dtype": BF16, "decay": DECAY_PER_HEAD, "per_head": True, "window": 9, "targets": True},
}


@pytest.mark.parametrize("name", HSTU)
def test_hstu_agrees_with_the_reference(name: str) -> None:
    call = hstu_call(**HSTU[name])
    found = errors(jagged_attention, hstu_reference, call)
    assert found.largest <= LARGEST_ERROR[call.q.dtype], found


@pytest.mark.parametrize("name", FUXI)
def test_fuxi_agrees_with_the_reference(name: str) -> None:
    call = fuxi_call(**FUXI[name])
    found = errors(fuxi_attention, fuxi_reference, call)
    assert found.largest <= LARGEST_ERROR[call.q.dtype], found


@pytest.mark.parametrize("tile", [Tile(64, 32), Tile(16, 32)], ids=str)
def test_other_tile_shapes_give_the_same(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_tile(kernel: str, *_: Any) -> Tile:
        return Tile(16, 16) if kernel == "table_gradient" else tile

    monkeypatch.setattr(attention_launch, "attention_tile", other_tile)
    found = errors(jagged_attention, hstu_reference, hstu_call(FP32, **MASKS))
    assert found.largest <= LARGEST_ERROR[FP32], found


def test_repeats_are_bit_equal() -> None:
    call = hstu_call(FP32, **MASKS)
    grad = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(jagged_attention.forward(call), jagged_attention.forward(call))
    for once, again in zip(jagged_attention.backward(grad, call), jagged_attention.backward(grad, call), strict=True):
        assert once is not None and again is not None
        assert torch.equal(once, again)


@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=["no rows", "empty rows"])
def test_an_empty_batch_launches_nothing(lengths: tuple[int, ...]) -> None:
    call = hstu_call(FP32, lengths=lengths)
    before = execution.launches()
    gradients = jagged_attention.backward(jagged_attention.forward(call), call)
    assert [x.shape for x in gradients if x is not None] == [x.shape for x in (*call[:3], call[13], call[15])]
    assert all(not x.any() for x in gradients if x is not None)
    assert execution.launches() == before


def test_gradients_of_tables_are_left_out_where_nobody_asks() -> None:
    call = hstu_call(FP32)._replace(time_gradient=False, position_gradient=False)
    before = execution.launches()
    *_, time, position = jagged_attention.backward(torch.ones_like(call.v), call)
    assert time is None and position is None
    assert execution.launches() == before + 2
