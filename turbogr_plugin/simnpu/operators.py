"""What an NPU's torch can run: the operators that torch_npu registers, and the dtypes that the chips lack.

The lists are data (operator_lists/, each with a header that says how it was read), so that a newer torch_npu is a new
file. They name what the public wheel registers; whether a chip serves every dtype and shape of it, no list says.

Left out: operators of this plugin. Who enforces the lists adds what is registered in the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

TORCH_NPU_VERSION = "2.13.0"
"""Version of the wheel that the lists were read from."""

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu})
_NO_UNIT = frozenset({torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})

LACKING_DTYPES: Mapping[str, frozenset[torch.dtype]] = MappingProxyType(
    {"910B": _NO_UNIT | _FLOAT8, "910_93": _NO_UNIT | _FLOAT8, "950": _NO_UNIT}
)
"""By SoC family: dtypes for which the cube and vector units of its AI cores have no arithmetic. They can be stored,
copied and cast. torch_npu runs some operators on them on the chip's scalar AI CPUs, orders of magnitude slower; which
ones is published nowhere, so all computation on them counts as lacking."""

_MOVING = """
    _copy_from _copy_from_and_resize _local_scalar_dense _reshape_alias _to_copy as_strided as_strided_ cat.out cat
    clone copy_ detach empty.memory_format empty_like empty_strided fill_.Scalar fill_.Tensor index_select is_set_to
    new_empty new_empty_strided ones_like record_stream resize_ set_ set_.source_Storage
    set_.source_Storage_storage_offset set_.source_Tensor stack stack.out unfold view view_as_complex view_as_real zero_
    zeros_like
"""
ANY_DTYPE = frozenset(f"aten::{name}" for name in _MOVING.split())
"""Operators that store, move or cast values without arithmetic, and so take every dtype."""


@cache
def torch_npu_operators() -> frozenset[str]:
    """Overload names ("aten::add.Tensor", "npu::npu_rotary_mul") for which torch_npu has a kernel."""
    folder = Path(__file__).parent / "operator_lists"
    names: set[str] = set()
    for namespace in ("aten", "npu"):
        lines = (folder / f"torch_npu_{TORCH_NPU_VERSION}_{namespace}.txt").read_text().splitlines()
        names.update(line for line in lines if not line.startswith("#"))
    return frozenset(names)
