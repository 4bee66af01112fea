"""The C++ of the dense operators on lesser vectors and without oneDNN's products, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from turbogr_plugin.kernels.cpu import build

if reason := build.missing("gated_norm"):
    pytest.skip(f"lane cpu: {reason}", allow_module_level=True)

LEVELS = ("DEFAULT", "AVX2", "AVX512")

CHILD = """
import sys
from tests.kernels.cpu import dense_shapes

for family in sys.argv[1:]:
    dense_shapes.assert_like_the_reference(family)
"""


def _run(*families: str, **variables: str) -> None:
    command = [sys.executable, "-c", CHILD, *families]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.full
@pytest.mark.timeout(900)  # the first time, it builds
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_kernels_for_lesser_vectors_draw_the_same_masks_and_numbers(capability: str) -> None:
    if LEVELS.index(capability.upper()) >= LEVELS.index(build.capability()):
        pytest.skip(f"lane cpu: this machine's own vectors are {build.capability()}, which all tests take")
    _run("gated_norm", "uvqk_projection", "output_projection", ATEN_CPU_CAPABILITY=capability)


def test_projections_are_served_where_onednn_has_no_products_for_the_machine() -> None:
    _run("uvqk_projection", "output_projection", ONEDNN_MAX_CPU_ISA="SSE41")
