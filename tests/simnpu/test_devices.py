"""Devices: their number, which one is current, and what an operator across them does."""

from __future__ import annotations

import threading

import pytest
import torch


def test_the_accelerator_of_torch_is_npu() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == torch.npu.device_count() == 8
    assert torch.get_device_module("npu") is torch.npu


def test_the_name_says_that_it_is_simulated() -> None:
    assert torch.npu.get_device_name() == torch.npu.get_device_name(7) == "simulated Ascend 910B3"
    assert torch.npu.get_device_properties(0).total_memory == 64 << 30


def test_tensors_are_made_on_the_current_device() -> None:
    torch.npu.set_device(3)
    assert torch.empty(1, device="npu").device == torch.device("npu", 3)
    assert torch.accelerator.current_device_index() == 3
    with torch.npu.device(5):
        assert torch.ones(1, device="npu").device.index == 5
        with torch.npu.device_of(torch.ones(1, device="npu:6")):
            assert torch.npu.current_device() == 6
        with torch.npu.device_of(torch.ones(1)):
            assert torch.npu.current_device() == 5
    assert torch.npu.current_device() == 3
    with torch.device("npu:1"):
        assert torch.zeros(2).device.index == 1


def test_every_thread_has_a_current_device() -> None:
    seen = []
    torch.npu.set_device(4)
    thread = threading.Thread(target=lambda: seen.append(torch.npu.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert torch.npu.current_device() == 4


@pytest.mark.parametrize("call", [lambda: torch.npu.set_device(8), lambda: torch.empty(1, device="npu:8")])
def test_a_device_that_is_not_there_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(RuntimeError, match="invalid device ordinal 8, there are 8 simulated devices"):
        call()
    assert torch.npu.current_device() == 0


def test_a_device_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an npu device, got cpu"):
        torch.npu.set_device("cpu")


def test_an_operator_runs_on_the_device_of_its_tensors() -> None:
    a = torch.ones(3, device="npu:2")
    assert (a + 1).device.index == 2
    assert torch.cat([a, a]).device.index == 2
    assert a.to("npu:5").device.index == 5
    assert torch.nn.Linear(3, 1).to("npu:2")(a).device.index == 2


def test_tensors_of_two_devices_in_one_operator_are_refused() -> None:
    a = torch.ones(3, device="npu:0")
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, npu:0 and npu:1"):
        a + torch.ones(3, device="npu:1")
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, npu:0 and cpu"):
        a + torch.ones(3)
    with pytest.raises(RuntimeError, match="found at least two devices, npu:0 and cpu"):
        torch.cat([a, torch.ones(1)])
    with pytest.raises(RuntimeError, match="found at least two devices"):
        torch.add(a, a, out=torch.empty(3))


def test_a_cpu_scalar_is_legal_and_so_is_an_index_on_the_cpu() -> None:
    a = torch.arange(4.0, device="npu")
    assert (a * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert a[torch.tensor([3, 0])].tolist() == [3, 0]
    a[torch.tensor([1])] = 9.0
    assert a.tolist() == [0, 9, 2, 3]


def test_torch_compile_and_checkpointing_work() -> None:
    function = torch.compile(lambda x: (x * 2).relu(), backend="aot_eager")
    x = torch.tensor([-1.0, 2.0], device="npu", requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2]
