"""Fixtures of tests that run on the simulated npu; their folders' conftest.py take them from here.

The device stays in the process once it is loaded, so these tests share one and each starts from a clean state.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from turbogr_plugin import simnpu

DEVICES = 8


def load_npu() -> None:
    """Loads eight devices; operators outside of the allow-list raise."""
    simnpu.load(devices=DEVICES, policy="strict")


@pytest.fixture(scope="session")
def npu() -> ModuleType:
    """The package turbogr_plugin.simnpu, which tests/conftest.py has loaded before the first test."""
    assert simnpu.is_loaded()
    return simnpu


@pytest.fixture(autouse=True)
def _clean_npu(npu: ModuleType) -> Iterator[None]:
    """Counts from zero; whatever a test has set or left in flight is gone after it."""
    npu.reset()
    yield
    for index in range(DEVICES):
        torch.npu.synchronize(index)
        torch.npu.set_stream(torch.npu.default_stream(index))
    torch.npu.set_device(0)
    npu.set_policy("strict")
    npu.trace_sources(False)
    npu.check_streams(True)
    npu.reset()
