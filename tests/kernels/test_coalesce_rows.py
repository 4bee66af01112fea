"""Sums of the gradients of equal ids, against dictionaries in float64 and in the order of positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turbogr_plugin.kernels.coalesce_rows import coalesce_rows

IMPLEMENTATIONS = ("reference", "cpu")


def sums_of(ids: Tensor, grads: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
    """Added in the order of positions, starting from the first."""
    found: dict[int, Tensor] = {}
    for row, gradient in zip(ids.tolist(), grads.to(dtype), strict=True):
        found[row] = found[row] + gradient if row in found else gradient
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 4, 7, 128])
@pytest.mark.parametrize("ids", ["few", "equal", "different", "far", "none"])
def test_each_id_comes_once_with_its_sum_in_the_order_of_positions(
    ids: str, width: int, dtype: torch.dtype, implementation: str
) -> None:
    generator = torch.Generator().manual_seed(width)
    values = {
        "few": torch.randint(0, 6, (200,), generator=generator),
        "equal": torch.full((200,), 3),
        "different": torch.randperm(200, generator=generator),
        "far": torch.tensor([2**24, 2**24 + 1, 2**62, -1, 2**24 + 1, -(2**40), 2**62, -1]),
        "none": torch.zeros(0, dtype=torch.int64),
    }[ids]
    grads = torch.randn(len(values), width, generator=generator).to(dtype)
    found, rows = coalesce_rows(values, grads, implementation=implementation)
    wanted = sums_of(values, grads, torch.float32)
    assert found.tolist() == sorted(wanted)
    assert rows.dtype == torch.float32
    assert rows.shape == (len(wanted), width)
    if wanted:  # to the bit
        assert torch.equal(rows, torch.stack([wanted[row] for row in sorted(wanted)]))
    dyadic = torch.randint(-16, 17, grads.shape, generator=generator) / 8
    _, rows = coalesce_rows(values, dyadic, implementation=implementation)
    exact = sums_of(values, dyadic, torch.float64)
    if exact:
        assert torch.equal(rows.double(), torch.stack([exact[row] for row in sorted(exact)]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_and_gradients_may_have_any_strides_and_ids_be_int32(implementation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 5, (60, 2), generator=generator, dtype=torch.int32)[:, 0]
    wide = torch.randn(60, 16, generator=generator)
    for grads in (wide[:, ::2], wide.t().contiguous().t(), wide[:1].expand(60, 16), wide[:, :1].expand(60, 4)):
        found, rows = coalesce_rows(ids, grads, implementation=implementation)
        wanted = sums_of(ids, grads, torch.float32)
        assert found.dtype == torch.int32
        assert found.tolist() == sorted(wanted)
        assert torch.equal(rows, torch.stack([wanted[row] for row in sorted(wanted)]))


def test_gradients_in_float64_are_summed_in_float64() -> None:
    grads = torch.tensor([[1.0], [2.0**-40], [1.0]], dtype=torch.float64)
    _, rows = coalesce_rows(torch.tensor([1, 1, 1]), grads)
    assert rows.dtype == torch.float64
    assert float(rows) == 2.0 + 2.0**-40


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_finite_stays_with_its_id(implementation: str) -> None:
    grads = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [2.0, 2.0], [-torch.inf, 1.0]])
    _, rows = coalesce_rows(torch.tensor([0, 1, 2, 1]), grads, implementation=implementation)
    assert rows.isnan().tolist() == [[False, True], [True, False], [False, False]]
    assert float(rows[1, 1]) == 2.0


@pytest.mark.parametrize(
    ("ids", "grads", "message"),
    [
        (torch.ones(3), torch.ones(3, 2), "ids must be int32 or int64, got torch.float32"),
        (torch.ones(3).int(), torch.ones(2, 2), r"grads must be .* with N = 3, got torch.float32 of shape \(2, 2\)"),
        (torch.ones(3).int(), torch.ones(3), r"grads must be .* got torch.float32 of shape \(3,\)"),
        (torch.ones(3).int(), torch.ones(3, 2).int(), "grads must be floating point .* got torch.int32"),
        (torch.ones(3).int(), torch.ones(3, 2, device="meta"), "grads must be on the device of ids"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ids: Tensor, grads: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coalesce_rows(ids, grads)
