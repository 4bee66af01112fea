"""`turbogr doctor` tells what fits and what does not."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from turbogr_plugin import doctor, registration
from turbogr_plugin.backend.adaptation import Outcome
from turbogr_plugin.kernels.reached_operators import REACHED
from turbogr_plugin.kernels.usual_calls import usual_calls


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What is put in here is installed in that version, or not at all (None)."""
    told: dict[str, str | None] = {}
    read = metadata.version

    def version(name: str) -> str:
        found = told.get(name, "")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found or read(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "files", lambda name: [])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # set by the doctor where torch_npu cannot work
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    return told


def _states(name: str) -> list[tuple[str, str]]:
    return [(finding.state, finding.text) for finding in doctor.diagnose().findings if finding.name == name]


@pytest.fixture(scope="module")
def outcome() -> runs.Outcome:
    return runs.run_here("doctor")


def test_in_this_environment_everything_fits(outcome: runs.Outcome) -> None:
    assert outcome.code == 0, outcome.out
    assert outcome.out.rstrip().endswith("everything fits")


def test_the_text_names_packages_compiler_and_adaptations(outcome: runs.Outcome) -> None:
    for part in ("torch 2.13.", "torchrec 1.8.", "fbgemm-gpu-cpu 1.8.", "C++ compiler", "adaptations and operators"):
        assert part in outcome.out


@pytest.mark.parametrize("options", [[], ["--operators"]])
def test_the_text_fits_a_terminal_of_100_columns(options: list[str]) -> None:
    assert max(map(len, runs.run_here("doctor", *options).out.splitlines())) <= 100


def test_json_holds_the_choice_for_every_operator_and_device_type() -> None:
    report = json.loads(runs.run_here("doctor", "--json").out)
    assert report["problems"] == 0
    assert {group: set(names) for group, names in report["operators"].items()} == {
        group: set(names) for group, names in REACHED.items()
    }
    one = report["operators"]["TorchRec"]["fbgemm::invert_permute"]
    assert one == {"npu": "ours (kernels/fbgemm_permute.py)", "cuda": "none: raises", "cpu": "fbgemm's"}


def test_json_and_text_tell_who_serves_this_packages_operators(outcome: runs.Outcome) -> None:
    kernels = json.loads(runs.run_here("doctor", "--json").out)["kernels"]
    assert set(kernels["cpu"]) == set(usual_calls(torch.device("cpu")))
    for choice in kernels["cpu"].values():
        assert set(choice) == {"implementation", "details", "passed_over"}
        assert choice["implementation"] == "cpu" or choice["passed_over"]["cpu"]
    assert "which implementation a usual call of this package's operators takes here" in outcome.out
    for name in kernels["cpu"]:
        assert name in outcome.out


@pytest.mark.parametrize(
    ("package", "version", "name", "told"),
    [
        ("torch", "2.14.1", "torch", "torch 2.14.1 is installed, 2.13.x is needed"),
        ("torchrec", "1.9.2", "torchrec", "torchrec 1.9.2 is installed, 1.8.x is needed"),
        ("torchrec", None, "torchrec", "torchrec is not installed, 1.8.x is needed"),
        ("fbgemm-gpu", "1.9.0", "fbgemm", "fbgemm-gpu 1.9.0 is installed, 1.8.x is needed"),
        ("torch-npu", "2.10.0", "torch_npu", "torch-npu 2.10.0 is installed, 2.13.x is needed"),
        ("fbgemm-ascend", "1.5.0", "fbgemm-ascend", "it must not be"),
    ],
)
def test_a_package_that_does_not_fit_is_a_problem(
    versions: dict[str, str | None], package: str, version: str | None, name: str, told: str
) -> None:
    versions[package] = version
    assert any(state == "problem" and told in text for state, text in _states(name)), _states(name)
    assert runs.run_here("doctor").code == 1


def test_two_builds_of_fbgemm_are_a_problem(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    versions.update({"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"})
    assert [state for state, _ in _states("fbgemm")] == ["ok", "ok"]  # both empty, as the shim is
    monkeypatch.setattr(metadata, "files", lambda name: [Path("fbgemm_gpu/__init__.py")])
    assert ("problem", "fbgemm-gpu-cpu and fbgemm-gpu overwrite each other's files: install one of them") in _states(
        "fbgemm"
    )


def test_torch_npu_without_cann_is_a_problem_and_with_it_is_none(
    versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions["torch-npu"] = "2.13.0"
    assert _states("torch_npu") == [("ok", "torch-npu 2.13.0 (an empty project), 2.13.x is needed")]
    assert [state for state, _ in _states("CANN")] == ["problem"]
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    assert [state for state, _ in _states("CANN")] == ["problem"]
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert _states("CANN") == [("ok", f"{tmp_path} (ASCEND_HOME_PATH)")]


def test_no_compiler_is_told_and_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert _states("C++ compiler") == [
        ("absent", "no-such-compiler is not there: `turbogr dryrun` cannot build the simulated npu")
    ]


def test_a_refused_adaptation_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Outcome("torchrec.x:y", "refused", "has fingerprint 1"), Outcome("torchrec.x:z", "applied", "why")]
    monkeypatch.setattr(registration, "register", lambda: registration.RegistrationReport(outcomes))
    assert _states("TorchRec") == [("ok", "1 adaptations and operators are in place, 1 refused")]
    assert _states("refused") == [("problem", "torchrec.x:y: has fingerprint 1")]


def test_an_import_that_fails_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise OSError("fbgemm_gpu_config.so: cannot open shared object file")

    monkeypatch.setattr(registration, "register", fail)
    diagnosis = doctor.diagnose()
    assert [finding.text for finding in diagnosis.problems] == [
        "OSError: fbgemm_gpu_config.so: cannot open shared object file"
    ]
    assert any(finding.name == "torch" for finding in diagnosis.findings)
