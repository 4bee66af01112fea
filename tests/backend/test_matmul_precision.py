from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from turbogr_plugin.backend import matmul_precision
from turbogr_plugin.backend.matmul_precision import available_matmul_precisions, set_matmul_precision
from turbogr_plugin.errors import InputError

CPU, CUDA, NPU = torch.device("cpu"), torch.device("cuda"), SimpleNamespace(type="npu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def _product_error() -> float:
    """Largest relative error of a float32 product against float64."""
    generator = torch.Generator().manual_seed(3)
    left, right = torch.rand(64, 64, generator=generator), torch.rand(64, 64, generator=generator)
    exact = left.double() @ right.double()
    return float(((left @ right).double() - exact).abs().max() / exact.abs().max())


def test_float32_is_exact_to_its_rounding() -> None:
    set_matmul_precision("fp32", CPU)
    assert _product_error() < 1e-6


@pytest.mark.parametrize("has_instructions", [True, False], ids=["with bf16 instructions", "without"])
def test_a_cpu_has_bf16_only_by_instructions(has_instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    assert available_matmul_precisions(CPU) == (("fp32", "bf16") if has_instructions else ("fp32",))
    if has_instructions:
        set_matmul_precision("bf16", CPU)
        assert torch.get_float32_matmul_precision() == "medium"
    else:
        with pytest.raises(InputError, match="'bf16' is not available on device 'cpu': use one of fp32"):
            set_matmul_precision("bf16", CPU)


@pytest.mark.parametrize("precision", ["hf32", "tf32", "", "FP32"])
def test_a_precision_that_the_device_lacks_is_refused_with_those_it_has(precision: str) -> None:
    with pytest.raises(InputError, match=f"matmul_precision '{precision}' is not available on device 'cpu'.*fp32"):
        set_matmul_precision(precision, CPU)  # type: ignore[arg-type]
    assert torch.get_float32_matmul_precision() == "highest"


def test_hf32_on_cuda_is_tf32_and_fp32_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    set_matmul_precision("hf32", CUDA)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    set_matmul_precision("fp32", CUDA)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    with pytest.raises(InputError, match="use one of fp32, hf32"):
        set_matmul_precision("bf16", CUDA)


def test_hf32_on_npu_sets_the_switches_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = SimpleNamespace(matmul=SimpleNamespace(allow_hf32=False), conv=SimpleNamespace(allow_hf32=True))
    monkeypatch.setattr(matmul_precision, "device_module", lambda device: switches)
    set_matmul_precision("hf32", NPU)  # type: ignore[arg-type]
    assert (switches.matmul.allow_hf32, switches.conv.allow_hf32) == (True, True)
    set_matmul_precision("fp32", NPU)  # type: ignore[arg-type]
    assert (switches.matmul.allow_hf32, switches.conv.allow_hf32) == (False, False)


def test_an_npu_without_the_switches_has_float32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_precision, "device_module", lambda device: SimpleNamespace())
    set_matmul_precision("fp32", NPU)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'hf32' is not available on device 'npu': use one of fp32"):
        set_matmul_precision("hf32", NPU)  # type: ignore[arg-type]
