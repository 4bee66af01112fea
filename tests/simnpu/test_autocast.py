"""autocast("npu")."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrix_products_run_in_low_precision_and_losses_in_float32(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(4, 4, device="npu")
    x = torch.randn(2, 4, device="npu")
    with torch.autocast("npu", dtype=dtype):
        y = linear(x)
        assert y.dtype == dtype
        assert (y @ y.t()).dtype == dtype
        assert torch.nn.functional.mse_loss(y, y).dtype == torch.float32
        assert torch.nn.functional.layer_norm(y, (4,)).dtype == torch.float32
        assert torch.softmax(y, -1).dtype == torch.float32
        with torch.autocast("npu", enabled=False):
            assert linear(x).dtype == torch.float32
    assert linear(x).dtype == torch.float32


def test_gradients_come_back_in_the_precision_of_the_parameters() -> None:
    linear = torch.nn.Linear(4, 1, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        loss = linear(torch.randn(3, 4, device="npu")).square().mean()
    loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_autocast_of_the_cpu_is_another_one() -> None:
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch.nn.Linear(2, 2)(torch.randn(1, 2)).dtype == torch.float32


def test_the_loss_scaler_of_torch_is_refused_for_its_float64(npu: ModuleType) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="npu"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("npu", init_scale=4.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    with pytest.raises(NotImplementedError, match=r"aten::reciprocal.* Double"):
        scaler.step(optimizer)
    npu.set_policy("report")
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1]
    assert scaler.get_scale() == 2.0
    assert npu.cpu_fallbacks() == {"aten::reciprocal (Double)": 1}
