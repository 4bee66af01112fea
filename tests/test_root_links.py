"""The links at the root are for readers: nothing can be imported through them, and no tool walks a file twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("kernels", "sharding", "components")


@pytest.mark.parametrize("name", LINKS)
def test_a_root_link_is_relative_and_leads_into_the_package(name: str) -> None:
    assert os.readlink(ROOT / name) == f"turbogr_plugin/{name}"
    assert (ROOT / name / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKS)
def test_importing_through_a_root_link_names_the_right_import(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ImportError: ")
    assert f"import turbogr_plugin.{name}" in result.stderr.splitlines()[-1]


def test_a_module_below_a_root_link_is_refused_as_well() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import components.launcher"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert "import turbogr_plugin.components" in result.stderr.splitlines()[-1]


def test_the_three_packages_import_under_their_own_names() -> None:
    code = "; ".join(f"import turbogr_plugin.{name}" for name in LINKS)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_ruff_reads_no_file_through_a_root_link() -> None:
    ruff = Path(sys.executable).parent / "ruff"
    shown = subprocess.run(
        [ruff, "check", "--show-files", "."], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    files = [Path(line).relative_to(ROOT) for line in shown.stdout.splitlines()]
    assert Path("turbogr_plugin/components/jobs.py") in files
    assert [file for file in files if file.parts[0] in LINKS] == []
