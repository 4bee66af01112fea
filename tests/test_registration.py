"""What `register` does to a process, in processes of their own where it has not run yet."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchrec  # noqa: F401  # registration is about a process that has it

import turbogr_plugin
from turbogr_plugin import registration
from turbogr_plugin.backend import host_versions
from turbogr_plugin.backend.adaptation import Adaptation, Outcome
from turbogr_plugin.backend.adaptations import ADAPTATIONS as BACKEND
from turbogr_plugin.pipeline.adaptations import ADAPTATIONS as PIPELINE
from turbogr_plugin.sharding.adaptations import ADAPTATIONS as SHARDING

EVERY = (*BACKEND, *SHARDING, *PIPELINE)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "TURBOGR_AUTOLOAD": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=100, check=False
    )


def test_everything_fits_the_pinned_hosts() -> None:
    report = turbogr_plugin.register()
    assert report.refused == []
    names = [outcome.name for outcome in report.outcomes]
    assert {adaptation.target for adaptation in EVERY} <= set(names)
    assert sum(name.startswith("fbgemm::") for name in names) > 30
    assert len(set(names)) == len(names)


def test_no_family_of_kernels_is_forgotten() -> None:
    reported = {outcome.name for outcome in turbogr_plugin.register().outcomes}
    files = sorted((Path(turbogr_plugin.__file__).parent / "kernels").glob("*.py"))
    for file in [file for file in files if "\nKERNELS" in file.read_text()]:
        module = importlib.import_module(f"turbogr_plugin.kernels.{file.stem}")
        for kernel in getattr(module, "KERNELS", ()):
            assert f"{kernel.operator} [{kernel.key}]" in reported, file.name


def test_a_second_call_returns_the_report_of_the_first() -> None:
    assert turbogr_plugin.register() is registration.register() is turbogr_plugin.register()


@pytest.mark.parametrize("adaptation", EVERY, ids=lambda adaptation: adaptation.target)
def test_each_adaptation_says_what_it_replaces_why_where_and_until_when(adaptation: Adaptation) -> None:
    assert adaptation.target in adaptation.written_for
    assert all(len(digits) == 16 for digits in adaptation.written_for.values())
    assert adaptation.why
    assert adaptation.delete_when
    assert any(version in adaptation.upstream for version in ("1.8.0", "2.13", "torch_npu"))


def test_two_adaptations_do_not_replace_the_same_place() -> None:
    places = [place for adaptation in EVERY for place in (adaptation.target, *adaptation.also)]
    assert len(set(places)) == len(places)


@pytest.mark.timeout(120)
def test_torchrec_imported_before_torch_is_adapted_once_for_all_threads() -> None:
    code = """
import torchrec  # imports torch, whose entry point installs the hook in the middle of this import
import threading, sys
from turbogr_plugin import registration
report = registration._report
assert report is not None and not report.refused and report.outcomes
assert all(outcome.status == "applied" for outcome in report.outcomes)
import turbogr_plugin
found = []
threads = [threading.Thread(target=lambda: found.append(turbogr_plugin.register())) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
assert found == [report] * 8 and all(each is report for each in found)
import torch
assert torch._C._get_privateuse1_backend_name() == "privateuseone"  # the name is the backend's to give
print(report.lines())
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "turbogr_plugin" not in done.stderr
    assert done.stdout.startswith("['adaptations and operators: ")


@pytest.mark.timeout(120)
def test_threads_that_register_and_import_at_once_all_see_the_same_adapted_torchrec() -> None:
    code = """
import threading, turbogr_plugin
found, barrier = [], threading.Barrier(6)
def by_import():
    barrier.wait(); import torchrec
    from turbogr_plugin import registration
    found.append(registration._report)
def by_call():
    barrier.wait(); found.append(turbogr_plugin.register())
threads = [threading.Thread(target=target) for target in (by_import, by_call) * 3]
[thread.start() for thread in threads]; [thread.join(90) for thread in threads]
assert len(found) == 6 and len({id(report) for report in found}) == 1, found
assert all(outcome.status == "applied" for outcome in found[0].outcomes)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(120)
def test_nothing_is_done_where_another_backend_holds_the_dispatch_keys() -> None:
    code = """
import torch
torch.utils.rename_privateuse1_backend("other")
import torchrec, turbogr_plugin
report = turbogr_plugin.register()
print(report.lines())
from torchrec.distributed.planner import Topology
try:
    Topology(2, "npu")
except AssertionError as error:
    print(error)
assert not torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::invert_permute", "PrivateUse1")
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    reason = "npu: another backend holds PyTorch's PrivateUse1 keys: 'other'"
    assert "RuntimeWarning: turbogr_plugin has refused to adapt:\n  " + reason in done.stderr
    assert done.stdout.splitlines() == [
        f"['adaptations and operators: 1 refused', \"refused {reason}\"]",
        "unsupported compute device npu",
    ]


def test_nothing_is_done_on_versions_that_it_was_not_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host_versions.unsupported_hosts({"torch": "2.13.0", "torchrec": "1.9.2", "triton-ascend": "3.3.0"})
    assert [difference.pin.name for difference in found] == ["torchrec", "fbgemm", "triton-ascend"]
    monkeypatch.setattr(registration, "_report", None)
    monkeypatch.setattr(registration, "unsupported_hosts", lambda: found)
    report = registration.register()
    assert report.outcomes == [
        Outcome("torchrec", "refused", str(found[0])),
        Outcome("fbgemm", "refused", str(found[1])),
    ]
    assert report.refused == report.outcomes


def test_a_failure_leaves_no_report_behind_and_the_next_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_report", None)
    with monkeypatch.context() as broken:
        broken.setattr(registration, "_apply_all", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            registration.register()
    report = registration.register()
    assert report.refused == []
    assert {outcome.status for outcome in report.outcomes} == {"already applied"}
