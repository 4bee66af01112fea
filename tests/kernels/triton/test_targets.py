from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from turbogr_plugin.kernels.attention_call import HSTUAttentionCall
from turbogr_plugin.kernels.dispatch import MissingTool
from turbogr_plugin.kernels.gated_norm_call import GatedNormCall
from turbogr_plugin.kernels.triton import gated_norm, jagged_attention, targets


def test_the_package_imports_no_triton() -> None:
    modules = ("jagged_attention", "fuxi_attention", "gated_norm", "jagged_lookup", "coalesce_rows", "fused_update")
    code = "; ".join(f"import turbogr_plugin.kernels.triton.{name}" for name in modules)
    code += "; import sys; print(any(name.partition('.')[0] == 'triton' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_tensors_on_cpu_are_refused() -> None:
    q = torch.zeros(2, 1, 8)
    call = HSTUAttentionCall(q, q, q, torch.tensor([0, 2]), 1.0, 1.0)
    assert "not on cpu" in str(jagged_attention.refuses(call))
    assert "not on cpu" in str(gated_norm.refuses(GatedNormCall(q[0], q[0], None, None, "layer", 1, 1e-6)))


@pytest.mark.skipif(find_spec("triton") is not None, reason="lane cpu: an environment without triton")
@pytest.mark.parametrize(("device_type", "package"), [("cuda", "triton"), ("npu", "triton-ascend")])
def test_a_missing_package_is_named(device_type: str, package: str) -> None:
    reason = targets.refuses_device(device_type)
    assert isinstance(reason, MissingTool)
    assert reason == f"{package} is not installed"


def test_dtypes_and_dims_that_no_kernel_serves_are_refused() -> None:
    assert targets.refuses_tensors(torch.zeros(1, dtype=torch.bfloat16), D=256, E=25) is None
    assert "float64" in str(targets.refuses_tensors(torch.zeros(1, dtype=torch.float64)))
    assert "float64" in str(targets.refuses_tensors(torch.zeros(1), None, torch.zeros(1, dtype=torch.float64)))
    assert targets.refuses_tensors(torch.zeros(1), D=8, E=257) == "E = 257 is not in [1, 256]"
