"""What is installed, what is pinned, and that the places which name a version name the same one."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

import turbogr_plugin

ROOT = Path(__file__).parents[1]
REQUIREMENT_FILES = ("requirements-cpu.txt", "requirements-npu.txt")
TEXTS = ("README.md", "Makefile", "turbogr_plugin/**/*.py", "benchmarks/**/*.py")


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def _requirements(name: str) -> tuple[dict[str, Requirement], list[str]]:
    """The named requirements of a file, by name, and its local paths."""
    named: dict[str, Requirement] = {}
    paths = []
    for line in (ROOT / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-e "):
            paths.append(text[3:].partition("[")[0])
        elif text.startswith("."):
            paths.append(text)
        elif text:
            requirement = Requirement(text)
            assert requirement.name not in named, text
            named[requirement.name] = requirement
    return named, paths


def _pin(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", requirement
    return specifier.version


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, turbogr_plugin, turbogr_plugin.errors\n"
        "heavy = {'torch', 'torchrec', 'fbgemm_gpu', 'triton', 'numpy', 'torchx'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_components_load_no_torch() -> None:
    code = (
        "import sys, turbogr_plugin.components.jobs\n"
        "heavy = {'torch', 'torchrec', 'fbgemm_gpu', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_package_has_the_version_of_its_distribution() -> None:
    assert turbogr_plugin.__version__ == _toml(ROOT / "pyproject.toml")["project"]["version"]
    assert turbogr_plugin.__version__ == importlib.metadata.version("turbogr-plugin")


@pytest.mark.parametrize("name", REQUIREMENT_FILES)
def test_a_requirements_file_holds_exact_pins_inside_the_ranges_of_pyproject(name: str) -> None:
    ranges = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, _toml(ROOT / "pyproject.toml")["project"]["dependencies"])
    }
    named, paths = _requirements(name)
    assert {"torch", "torchrec", "torchx"} <= set(named)
    for requirement in named.values():
        version = _pin(requirement)
        if requirement.name in ranges:
            assert version in ranges[requirement.name], requirement
    assert paths == ["./packaging/fbgemm-gpu-shim", "."]
    assert all((ROOT / path / "pyproject.toml").is_file() for path in paths)


def test_both_requirements_files_pin_the_same_host_and_only_one_has_the_ascend_parts() -> None:
    cpu, _ = _requirements("requirements-cpu.txt")
    npu, _ = _requirements("requirements-npu.txt")
    assert set(npu) - set(cpu) == {"torch_npu", "triton-ascend"}
    assert set(cpu) <= set(npu)
    assert {name: _pin(cpu[name]) for name in cpu} == {name: _pin(npu[name]) for name in cpu}
    # torch_npu is built for one torch and carries its number.
    assert Version(_pin(npu["torch_npu"])).release == Version(_pin(npu["torch"])).release


def test_the_stand_in_and_uv_take_the_same_fbgemm_and_pyproject_names_none() -> None:
    shim = _toml(ROOT / "packaging/fbgemm-gpu-shim/pyproject.toml")["project"]
    pyproject = _toml(ROOT / "pyproject.toml")
    assert shim["name"] == "fbgemm-gpu"
    assert shim["dependencies"] == [f"fbgemm-gpu-cpu=={shim['version']}"] == pyproject["dependency-groups"]["cpu"]
    extras = pyproject["project"]["optional-dependencies"]
    assert set(extras) == {"dev", "docs"}
    everything = [*pyproject["project"]["dependencies"], *extras["dev"], *extras["docs"]]
    assert not [requirement for requirement in everything if "fbgemm" in requirement]
    assert pyproject["tool"]["uv"]["override-dependencies"] == ["fbgemm-gpu ; sys_platform == 'never'"]
    # fbgemm_gpu is released with torchrec and has its number.
    assert Version(shim["version"]) == Version(_pin(_requirements("requirements-cpu.txt")[0]["torchrec"]))


def test_the_running_environment_is_the_pinned_one() -> None:
    named, _ = _requirements("requirements-cpu.txt")
    for name, requirement in named.items():
        assert Version(importlib.metadata.version(name)).public == _pin(requirement), name


def test_pip_finds_no_conflict_but_the_dependencies_recbole_is_installed_without() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line for line in result.stdout.splitlines() if line != "No broken requirements found."]
    assert [line for line in lines if not line.startswith("recbole ")] == []


def test_the_readme_names_the_pinned_versions() -> None:
    named, _ = _requirements("requirements-npu.txt")
    pins = {name.replace("_", "-"): _pin(requirement) for name, requirement in named.items()}
    pins["fbgemm-gpu-cpu"] = _toml(ROOT / "packaging/fbgemm-gpu-shim/pyproject.toml")["project"]["version"]
    readme = (ROOT / "README.md").read_text().replace("_", "-")
    told = re.findall(
        r"\b(torch-npu|triton-ascend|fbgemm-gpu-cpu|torchrec|torchx|torch)(?: |==)(\d+(?:\.\d+)+)", readme
    )
    assert set(told) == set(pins.items())


def test_every_place_that_installs_recbole_names_one_version() -> None:
    files = [path for pattern in TEXTS for path in sorted(ROOT.glob(pattern))]
    pins = {match for path in files for match in re.findall(r"recbole==([\d.]+\d)", path.read_text())}
    assert len(pins) == 1, pins
    assert f"--no-deps recbole=={pins.pop()}" in (ROOT / "Makefile").read_text()


def test_the_console_script_and_the_components_are_registered() -> None:
    entries = importlib.metadata.distribution("turbogr-plugin").entry_points
    assert {(entry.group, entry.name, entry.value) for entry in entries} == {
        ("console_scripts", "turbogr", "turbogr_plugin.cli:main"),
        ("torch.backends", "turbogr_plugin", "turbogr_plugin.backend.autoload:install"),
        ("torchx.components", "turbogr", "turbogr_plugin.components.jobs"),
        ("torchx.components", "dist", "torchx.components.dist"),
        ("torchx.components", "utils", "torchx.components.utils"),
    }


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "turbogr_plugin").rglob("*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []


def test_a_built_package_carries_its_c_sources_and_type_marker_and_no_root_link(tmp_path: Path) -> None:
    source, build = tmp_path / "source", tmp_path / "build"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "turbogr_plugin", source / "turbogr_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "sharding", "components"):
        (source / name).symlink_to(f"turbogr_plugin/{name}")
    planted = ["turbogr_plugin/top.cpp", "turbogr_plugin/kernels/deep/er/op.cpp", "turbogr_plugin/kernels/deep/op.h"]
    for name in planted:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("// planted\n")
    subprocess.run(
        [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_py", "--build-lib", str(build)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=100,
    )
    assert [path.name for path in build.iterdir()] == ["turbogr_plugin"]
    for name in [*planted, "turbogr_plugin/py.typed", "turbogr_plugin/components/jobs.py"]:
        assert (build / name).is_file(), name


def test_the_licence_is_the_one_declared() -> None:
    assert _toml(ROOT / "pyproject.toml")["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
