"""Every path of the C++ kernels that this machine can take, each forced in a process of its own.

ATEN_CPU_CAPABILITY chooses the vectors (a build of its own), ONEDNN_MAX_CPU_ISA what oneDNN may generate for products:
below AVX2 ATen's BLAS serves float32, and bf16 is computed as float32 wherever packed products are not to be had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from turbogr_plugin.kernels.cpu import build

if reason := build.missing("jagged_attention"):
    pytest.skip(f"lane cpu: {reason}", allow_module_level=True)

LEVELS = ("DEFAULT", "AVX2", "AVX512")
HERE = LEVELS.index(build.capability())

CHILD = """
import json, torch
from tests.kernels.attention_cases import assert_as_exact_as_reference
from tests.kernels.cpu.attention_shapes import CASES
from turbogr_plugin.kernels.cpu import build

torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    for case in (CASES[2], CASES[6], CASES[10]):
        assert_as_exact_as_reference(case, dtype, "cpu")
with torch.backends.mkldnn.flags(enabled=False):
    without_onednn = build.describe()
    for dtype in (torch.float32, torch.bfloat16):
        assert_as_exact_as_reference(CASES[2], dtype, "cpu")
print(json.dumps({"with": build.describe(), "without": without_onednn}))
"""

FUXI_CHILD = """
import json, torch
from tests.kernels.attention_cases import assert_as_exact_as_reference
from tests.kernels.cpu.attention_shapes import FUXI_CASES
from turbogr_plugin.kernels.cpu import build

torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    for case in (FUXI_CASES[2], FUXI_CASES[6], FUXI_CASES[10]):
        assert_as_exact_as_reference(case, dtype, "cpu")
print(json.dumps({"with": build.describe("fuxi_attention")}))
"""


def _paths_taken(child: str = CHILD, **variables: str) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", child], env={**os.environ, **variables}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(900)  # the first time, it builds
@pytest.mark.parametrize("capability", ["avx2", pytest.param("default", marks=pytest.mark.full)])
def test_kernels_for_lesser_vectors_are_as_exact(capability: str) -> None:
    if LEVELS.index(capability.upper()) >= HERE:
        pytest.skip(f"lane cpu: this machine's own vectors are {build.capability()}, which all tests take")
    taken = _paths_taken(ATEN_CPU_CAPABILITY=capability)["with"]
    assert taken["vectors"] == {"avx2": "AVX2"}.get(capability, taken["vectors"])
    assert "packed" not in taken["bfloat16"]


@pytest.mark.full
@pytest.mark.timeout(900)  # the first time, it builds
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_fuxi_for_lesser_vectors_is_as_exact(capability: str) -> None:
    if LEVELS.index(capability.upper()) >= HERE:
        pytest.skip(f"lane cpu: this machine's own vectors are {build.capability()}, which all tests take")
    taken = _paths_taken(FUXI_CHILD, ATEN_CPU_CAPABILITY=capability)["with"]
    assert taken["vectors"] == {"avx2": "AVX2"}.get(capability, taken["vectors"])


@pytest.mark.timeout(300)  # a process of its own
@pytest.mark.parametrize(
    "isa",
    ["AVX512_CORE", pytest.param("AVX2", marks=pytest.mark.full), pytest.param("SSE41", marks=pytest.mark.full)],
)
def test_products_of_a_held_back_onednn_are_as_exact(isa: str) -> None:
    found = _paths_taken(ONEDNN_MAX_CPU_ISA=isa)
    assert "packed" not in found["with"]["bfloat16"]
    assert ("BLAS" in found["with"]["float32"]) == (isa == "SSE41")
    assert "packed" not in found["without"]["bfloat16"]
    assert "BLAS" in found["without"]["float32"]


def test_the_paths_of_this_process_are_told() -> None:
    build.load("jagged_attention")
    found = build.describe()
    assert set(found) == {"vectors", "float32", "bfloat16", "float16"}
    assert ("packed" in found["bfloat16"]) <= torch.cpu._is_avx512_bf16_supported()


def test_the_yardstick_is_a_rate_of_this_machine() -> None:
    assert 1e8 < build.brgemm_rate(torch.float32) < 1e14
    with pytest.raises(ValueError, match=r"torch\.float32 or torch\.bfloat16, got torch\.float16"):
        build.brgemm_rate(torch.float16)
