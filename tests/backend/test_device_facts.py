from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from turbogr_plugin.backend.device_facts import FACTS, DeviceFacts, device_facts, facts_of

ASCEND = sorted(name for name in FACTS if name.startswith("Ascend"))
NVIDIA = sorted(name for name in FACTS if name.startswith("NVIDIA"))


def test_the_table_has_the_devices_that_the_figures_are_public_of() -> None:
    assert {"Ascend910B1", "Ascend910B3", "Ascend910B4", "Ascend910_9392"} <= set(ASCEND)
    assert {"NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"} <= set(NVIDIA)


@pytest.mark.parametrize("name", [*ASCEND, *NVIDIA])
def test_every_row_names_itself_and_its_source(name: str) -> None:
    facts = facts_of(name)
    assert facts.name == name
    assert facts.source


@pytest.mark.parametrize("name", ["", "Ascend910B5", "Ascend950PR_9589", "ascend910b3", "NVIDIA H100 PCIe", "unknown"])
def test_of_a_device_outside_the_table_nothing_is_known(name: str) -> None:
    facts = facts_of(name)
    assert facts == DeviceFacts(name=name)
    assert facts.peak("bf16") is None
    assert all(getattr(facts, field.name) in (None, {}) for field in fields(facts) if field.name != "name")


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        FACTS["mine"] = DeviceFacts(name="mine")  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        facts_of("NVIDIA H200").memory_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        facts_of("NVIDIA H200").peak_flops["bf16"] = 1.0  # type: ignore[index]


def test_the_compilers_limits_of_an_ascend_910b3() -> None:
    facts = facts_of("Ascend910B3")
    assert (facts.matrix_cores, facts.vector_cores) == (20, 40)
    assert facts.unified_buffer_bytes == 1_572_864 // 8  # bits in the compiler's target table
    assert facts.l1_bytes == 4_194_304 // 8
    assert (facts.l0a_bytes, facts.l0b_bytes, facts.l0c_bytes) == (524_288 // 8, 524_288 // 8, 1_048_576 // 8)
    assert facts.peak("fp16") is None  # no data sheet is published


def test_the_peaks_of_a_gpu_are_dense() -> None:
    facts = facts_of("NVIDIA H100 80GB HBM3")
    assert facts.peak("bf16") == 989.4e12
    assert facts.peak("hf32") == pytest.approx(facts.peak_flops["bf16"] / 2)
    assert facts_of("NVIDIA A100-SXM4-80GB").peak("bf16") == 312e12


def test_a_cpu_has_no_figures() -> None:
    facts = device_facts(torch.device("cpu"))
    assert (facts.name, facts.peak("fp32"), facts.memory_bytes) == ("cpu", None, None)
    assert facts.float64
