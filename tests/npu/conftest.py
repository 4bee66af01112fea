from __future__ import annotations

from tests.npu_device import _clean_npu, npu

__all__ = ["_clean_npu", "npu"]
