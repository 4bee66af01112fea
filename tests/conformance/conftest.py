"""Known failing inputs run on both devices: what CPU users get from fbgemm or from us, and what npu users get."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.kernels.fbgemm_cases import KERNELS
from tests.npu_device import npu
from turbogr_plugin.kernels.npu_operators import register

__all__ = ["npu"]


@pytest.fixture(params=["cpu", "npu"])
def device(request: pytest.FixtureRequest, npu: ModuleType) -> Iterator[torch.device]:
    """The device a test runs on; on npu fbgemm's operators are ours, and unordered uses of memory fail the test.

    The CPU half has the npu loaded too: torch's autograd engine counts the devices once, at the first backward.
    """
    assert [outcome for outcome in register(KERNELS) if outcome.status == "refused"] == []
    npu.reset()
    yield torch.device(request.param)
    assert npu.races() == []
    npu.reset()
