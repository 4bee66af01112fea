"""Saving, loading and moving between devices."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch


def saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_a_tensor_comes_back_to_its_device() -> None:
    tensor = torch.arange(6, device="npu:2").view(2, 3)
    back = torch.load(saved(tensor))
    assert back.device == tensor.device
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("target", ["cpu", "npu:5", "npu"])
def test_map_location_moves_it(target: str) -> None:
    tensor = torch.arange(6.0, device="npu:2")
    back = torch.load(saved({"x": tensor}), map_location=target)["x"]
    assert back.device.type == torch.device(target).type
    assert back.device.index == (5 if target == "npu:5" else 0 if target == "npu" else None)
    assert back.tolist() == tensor.tolist()


def test_what_was_saved_on_the_cpu_loads_to_npu() -> None:
    assert torch.load(saved(torch.ones(2)), map_location="npu:1").device == torch.device("npu", 1)


def test_shared_storage_stays_shared() -> None:
    base = torch.zeros(4, device="npu")
    back_base, back_view = torch.load(saved((base, base[1:])))
    back_view.fill_(3)
    assert back_base.tolist() == [0, 3, 3, 3]


def test_a_module_and_its_optimizer_come_back(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2, device="npu")
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3, device="npu")).sum().backward()
    optimizer.step()
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    twin = torch.nn.Linear(3, 2, device="npu")
    twin.load_state_dict(state["module"])
    assert torch.equal(twin.weight, module.weight)
    again = torch.optim.AdamW(twin.parameters())
    again.load_state_dict(state["optimizer"])
    assert torch.equal(again.state[twin.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"])


def test_pickle_keeps_device_and_values() -> None:
    tensor = torch.arange(3, device="npu:1")
    back = pickle.loads(pickle.dumps(tensor))
    assert back.device == tensor.device
    assert torch.equal(back, tensor)


def test_printing_shows_values_and_device() -> None:
    assert repr(torch.tensor([1.5, 2.0], device="npu:1")) == "tensor([1.5000, 2.0000], device='npu:1')"
    assert str(torch.tensor(3, device="npu")) == "tensor(3, device='npu:0')"
