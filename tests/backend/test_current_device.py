from __future__ import annotations

import pytest
import torch

from turbogr_plugin.backend.current_device import available_device_types, current_device
from turbogr_plugin.errors import InputError


def test_cpu_is_always_there() -> None:
    assert current_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda:0", "tpu", "", "CPU"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(InputError, match=f"device '{name}' is not available.*use one of cpu"):
        current_device(name)


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with two accelerators, as far as torch.accelerator tells; the indices made current."""
    made_current: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", made_current.append)
    return made_current


def test_the_local_rank_picks_the_accelerator(accelerators: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert current_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert current_device("cuda") == torch.device("cuda", 1)
    assert accelerators == [0, 1]


def test_more_processes_than_accelerators_are_refused(accelerators: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match=r"LOCAL_RANK 2 has no device.*shows 2.*at most 2 processes"):
        current_device("cuda")
    assert accelerators == []


def test_the_cpu_is_used_where_an_accelerator_is_there(accelerators: list[int]) -> None:
    assert available_device_types() == ("cpu", "cuda")
    assert current_device("cpu") == torch.device("cpu")
    assert accelerators == []


def test_a_device_of_another_type_than_the_accelerator_is_refused(accelerators: list[int]) -> None:
    with pytest.raises(InputError, match=r"device 'npu' is not available.*use one of cpu, cuda"):
        current_device("npu")
    assert accelerators == []
