from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from turbogr_plugin.kernels import keyed_dropout as module
from turbogr_plugin.kernels.keyed_dropout import DropoutKey, keep_mask, keyed_dropout


def _key(lengths: list[int], samples: list[int], *, seed: int = 1, step: int = 2) -> DropoutKey:
    return DropoutKey(
        seed=seed,
        step=step,
        samples=torch.repeat_interleave(torch.tensor(samples), torch.tensor(lengths)),
        positions=torch.cat([torch.arange(length) for length in lengths]),
    )


def _ones(key: DropoutKey, width: int) -> Tensor:
    return torch.ones(key.samples.numel(), width, dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 4, 6, 25])
def test_the_gradient_is_zero_exactly_where_the_output_is(width: int) -> None:
    key = _key([3, 0, 30], [8, 2, 5])
    x = _ones(key, width).requires_grad_()
    y = keyed_dropout(x, key, layer=1, p=0.3)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.equal(y, (y != 0).double() * (1 / 0.7))
    assert x.grad is not None and torch.equal(x.grad, y)


def test_a_sample_keeps_its_mask_in_any_batch_and_order() -> None:
    whole = keyed_dropout(_ones(key := _key([3, 5, 2], [7, 4, 9]), 10), key, layer=3, p=0.5)
    other = keyed_dropout(_ones(key := _key([2, 1, 3, 4], [9, 100, 7, 4]), 10), key, layer=3, p=0.5)
    assert torch.equal(other[:2], whole[8:])
    assert torch.equal(other[3:6], whole[:3])
    assert torch.equal(other[6:], whole[3:7])


def test_masks_differ_between_seeds_steps_layers_samples_and_positions() -> None:
    key = _key([4], [7])
    masks = [
        keep_mask(key, 0, 64, 0.5),
        keep_mask(key, 1, 64, 0.5),
        keep_mask(dataclasses.replace(key, seed=2), 0, 64, 0.5),
        keep_mask(dataclasses.replace(key, step=3), 0, 64, 0.5),
        keep_mask(dataclasses.replace(key, samples=key.samples + 1), 0, 64, 0.5),
    ]
    rows = {tuple(row) for mask in masks for row in mask.tolist()}
    assert len(rows) == 5 * 4


def test_masks_do_not_depend_on_the_size_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    key = _key([9, 5], [1, 2])
    expected = keep_mask(key, 0, 7, 0.4)
    monkeypatch.setattr(module, "_CHUNK", 20)
    assert torch.equal(keep_mask(key, 0, 7, 0.4), expected)


@pytest.mark.parametrize("p", [0.01, 0.2, 0.9])
def test_the_share_of_zeros_is_p(p: float) -> None:
    key = _key([200] * 4, [1, 2, 3, 4])
    mask = keep_mask(key, 0, 100, p)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(float((~mask).double().mean()) - p) < 5 * deviation


# Half a unit in the last place is one rounding; in float32 the factor itself is rounded besides.
@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 1.0), (torch.bfloat16, 0.5), (torch.float16, 0.5)])
def test_the_output_is_rounded_in_the_dtype_of_the_input_and_the_factor_is_not(
    dtype: torch.dtype, units: float
) -> None:
    key = _key([50], [1])
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    found = keyed_dropout(x, key, layer=0, p=0.1)
    assert found.dtype == dtype
    exact = torch.where(keep_mask(key, 0, 6, 0.1), x.detach().double() / 0.9, 0)
    assert bool(((found - exact).abs() <= torch.finfo(dtype).eps * exact.abs() * 1.01 * units).all())
    found.sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype


def test_nothing_is_dropped_for_p_zero_or_without_tokens() -> None:
    key = _key([3], [1])
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_dropout(x, key, layer=0, p=0.0), x)
    empty = torch.empty(0, 5, requires_grad=True)
    result = keyed_dropout(empty, _key([0], [1]), layer=0, p=0.5)
    assert result.shape == (0, 5)
    result.sum().backward()
    assert empty.grad is not None
    assert keep_mask(_key([0], [1]), 0, 5, 0.5).shape == (0, 5)


def test_gradients_pass_gradcheck_in_float64() -> None:
    key = _key([2, 1], [5, 3])
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: keyed_dropout(x, key, layer=1, p=0.4), (x,))
    assert torch.autograd.gradgradcheck(lambda x: keyed_dropout(x, key, layer=1, p=0.4) ** 2, (x,))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_out_of_range_is_refused(p: float) -> None:
    key = _key([2], [1])
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        keyed_dropout(_ones(key, 3), key, layer=0, p=p)


@pytest.mark.parametrize("shape", [(3, 4), (2,), (2, 4, 1)], ids=str)
def test_a_key_of_other_tokens_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"one sample id and position per token.*\(2,\)"):
        keyed_dropout(torch.ones(shape), _key([2], [1]), layer=0, p=0.5)
