"""Where the Triton kernels can run, and what differs between Ascend and CUDA.

Differences are facts of a `Target`; the kernels themselves are one source. Huawei's own fused operators are not used:
`npu_fusion_attention` and its kin are softmax attention, and none has a SiLU mode, so none covers a call of ours
exactly. fbgemm-ascend's jagged operators carry no attention at all.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr_plugin.backend.streams import device_module
from turbogr_plugin.kernels.dispatch import MissingTool

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_DIM = 256
ASCEND_SOCS = ("Ascend910B", "Ascend910_93", "Ascend950")
"""Beginnings of the names of the SoCs that the kernels are compiled for in `make ascend`."""


class Target(NamedTuple):
    """What the kernels have to know about the device that Triton compiles for."""

    ascend: bool
    soc: str
    """Name of the SoC on Ascend ("Ascend910B3"), the compute capability on CUDA ("90")."""
    cores: int
    """Programs that run at a time: cube cores on Ascend (each with two vector cores), multiprocessors on CUDA."""
    vector_cores: int
    """The same for kernels without matrix products."""

    @property
    def tiled_positions(self) -> bool:
        """Whether position biases come as ready tiles: an Ascend core gathers one element at a time."""
        return self.ascend


@cache
def refuses_device(device_type: str) -> str | None:
    """Why no Triton kernel can run on tensors of this device type; None if it can. Imports no Triton."""
    if device_type not in ("cuda", "npu"):
        return f"Triton kernels run on cuda and npu, not on {device_type}"
    if find_spec("triton") is None:
        package = "triton-ascend" if device_type == "npu" else "triton"
        return MissingTool(f"{package} is not installed")
    if device_type == "npu":
        # The simulated npu of this package lives without torch_npu, and has no core that a kernel could run on.
        if find_spec("torch_npu") is None:
            return MissingTool("torch_npu is not installed")
        try:
            version("triton-ascend")
        except PackageNotFoundError:
            return MissingTool("the installed triton is not triton-ascend")
        soc = device_module(torch.device("npu")).get_device_name()
        if not soc.startswith(ASCEND_SOCS):
            return f"no tile shapes are known for {soc}, only for {', '.join(ASCEND_SOCS)}"
    return None


def refuses_tensors(*tensors: Tensor | None, **dims: int) -> str | None:
    """Why a dtype or a dim cannot be served; None if all can."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"dtype {tensor.dtype} is not one of {', '.join(str(dtype) for dtype in DTYPES)}"
    for name, dim in dims.items():
        if not 1 <= dim <= LARGEST_DIM:
            return f"{name} = {dim} is not in [1, {LARGEST_DIM}]"
    return None


def current_target(device: torch.device) -> Target:
    """The target that Triton's active driver compiles for."""
    import triton

    driver: Any = triton.runtime.driver.active
    target = driver.get_current_target()
    if target.backend == "npu":
        properties = driver.utils.get_device_properties(driver.get_current_device())
        return Target(True, str(target.arch), int(properties["num_aicore"]), int(properties["num_vectorcore"]))
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return Target(False, str(target.arch), cores, cores)


def dot_precision(dtype: torch.dtype, target: Target) -> str:
    """How float32 products are computed: as the process has set it (backend/matmul_precision.py), IEEE by default."""
    if dtype != torch.float32:
        return "ieee"
    if target.ascend:
        switch = getattr(getattr(torch, "npu", None), "matmul", None)
        return "hf32" if getattr(switch, "allow_hf32", False) else "ieee"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"
