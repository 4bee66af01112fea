"""What `turbogr doctor` prints: what is installed, what fits what, and which kernels TorchRec's operators and ours get.

It looks and changes nothing on disk. Each finding is "ok", "absent" (needed elsewhere, nothing wrong) or "problem".

Left out: what a device does. Whether an NPU works is asked of a training script; `turbogr dryrun` asks a simulated one.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from turbogr_plugin.backend.host_versions import (
    HOST_PINS,
    NOT_INSTALLED,
    installed_version,
    installed_versions,
    unsupported_hosts,
)

WIDTH = 100
State = Literal["ok", "absent", "problem"]
Operators = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Choice by group, operator and device type."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    findings: list[Finding]
    operators: Operators = field(default_factory=dict)
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By device type and operator of this package: implementation, details and who was passed over."""

    @property
    def problems(self) -> list[Finding]:
        """What does not fit."""
        return [finding for finding in self.findings if finding.state == "problem"]

    def as_json(self) -> dict[str, Any]:
        """The diagnosis as values for JSON."""
        return {
            "problems": len(self.problems),
            "findings": [asdict(finding) for finding in self.findings],
            "versions": installed_versions(),
            "operators": self.operators,
            "kernels": self.kernels,
        }

    def lines(self, *, every_operator: bool = False) -> list[str]:
        """The diagnosis as text.

        Args:
            every_operator: a row for each operator instead of a summary.
        """
        lines = []
        for finding in self.findings:
            head = f"{finding.state:<8} {finding.name:<16} "
            lines += wrap(finding.text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        if self.operators:
            lines += ["", "which implementation an operator of fbgemm gets here (--operators lists them one by one)"]
            lines += _every_operator(self.operators) if every_operator else _summary(self.operators)
        lines += _kernel_lines(self.kernels) if self.kernels else []
        problems = len(self.problems)
        return [*lines, "", f"{problems} problem{'s' * (problems != 1)}" if problems else "everything fits"]


def diagnose() -> Diagnosis:
    """Looks at this environment. Imports torch and torchrec and registers this package's parts in this process."""
    findings = [*_packages(), *_cann()]
    if _torch_npu_would_fail():
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # or torch cannot be imported, and the rest not looked at
    try:
        findings += [*_compiler(), *_accelerator(), *_registration()]
        return Diagnosis(findings, _operators(), _kernels())
    except Exception as error:  # a broken installation raises anything, and the other findings tell why
        return Diagnosis([*findings, Finding("import", "problem", f"{type(error).__name__}: {error}")])


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", installed_versions()["python"])
    differences = {difference.distribution: difference for difference in unsupported_hosts()}
    for pin in HOST_PINS:
        installed = [name for name in pin.distributions if installed_version(name) != NOT_INSTALLED]
        for name in installed:
            shim = " (an empty project)" if _is_empty(name) else ""
            if name in differences:
                yield Finding(pin.name, "problem", str(differences[name]))
            else:
                yield Finding(pin.name, "ok", f"{name} {installed_version(name)}{shim}, {pin.release}.x is needed")
        if len([name for name in installed if not _is_empty(name)]) > 1:
            text = f"{' and '.join(installed)} overwrite each other's files: install one of them"
            yield Finding(pin.name, "problem", text)
        if not installed and pin.needed:
            yield Finding(pin.name, "problem", str(differences[pin.distributions[0]]))
        elif not installed:
            needed = "needed on an Ascend host" if pin.release else "its operators come with this package"
            yield Finding(pin.name, "absent", f"not installed: {needed}")


def _is_empty(distribution: str) -> bool:
    """Whether a distribution has no module: a project that only keeps another from being installed."""
    return not any(file.suffix in (".py", ".so") for file in metadata.files(distribution) or ())


def _cann_folder() -> Path | None:
    home = os.environ.get("ASCEND_HOME_PATH")
    return Path(home) if home and Path(home).is_dir() else None


def _torch_npu_would_fail() -> bool:
    return installed_version("torch-npu") != NOT_INSTALLED and _cann_folder() is None


def _cann() -> Iterator[Finding]:
    home, folder = os.environ.get("ASCEND_HOME_PATH"), _cann_folder()
    if folder is not None:
        yield Finding("CANN", "ok", f"{folder} (ASCEND_HOME_PATH)")
    elif _torch_npu_would_fail():
        where = f"ASCEND_HOME_PATH is {home}, no folder" if home else "ASCEND_HOME_PATH is not set"
        yield Finding("CANN", "problem", f"{where}, and torch_npu without CANN makes `import torch` fail")
    elif home:
        yield Finding("CANN", "problem", f"ASCEND_HOME_PATH is {home}, which is no folder")
    else:
        yield Finding("CANN", "absent", "ASCEND_HOME_PATH is not set: no Ascend host")


def _compiler() -> Iterator[Finding]:
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name, needed in (("C++ compiler", compiler), ("ninja", "ninja")):
        found = shutil.which(needed, path=path)
        text = found or f"{needed} is not there: `turbogr dryrun` cannot build the simulated npu"
        yield Finding(name, "ok" if found else "absent", text)


def _accelerator() -> Iterator[Finding]:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        yield Finding("accelerator", "absent", "none in this process: torch runs on the CPU")
    else:
        count = torch.accelerator.device_count()
        yield Finding("accelerator", "ok", f"{count} of type {accelerator.type}")


def _registration() -> Iterator[Finding]:
    from turbogr_plugin.registration import register

    report = register()
    counts = Counter(outcome.status for outcome in report.outcomes)
    done = counts["applied"] + counts["already applied"]
    yield Finding("TorchRec", "ok", f"{done} adaptations and operators are in place, {counts['refused']} refused")
    for outcome in report.refused:
        yield Finding("refused", "problem", f"{outcome.name}: {outcome.reason}")


def _operators() -> Operators:
    from turbogr_plugin.kernels.explain_operator import DEVICE_TYPES, explain_operator
    from turbogr_plugin.kernels.reached_operators import REACHED

    return {
        group: {
            name: {device: explain_operator(name, device).choice for device in DEVICE_TYPES} for name in sorted(names)
        }
        for group, names in REACHED.items()
    }


def _kernels() -> Mapping[str, Mapping[str, Any]]:
    import torch

    from turbogr_plugin.kernels.dispatch import explain
    from turbogr_plugin.kernels.usual_calls import usual_calls

    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        devices.append(accelerator)
    return {
        device.type: {
            name: {
                "implementation": (choice := explain(call)).implementation,
                "details": dict(choice.details),
                "passed_over": dict(choice.passed_over),
            }
            for name, call in usual_calls(device).items()
        }
        for device in devices
    }


def _kernel_lines(kernels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Operators that take the same implementation for the same reasons stand together."""
    lines = ["", "which implementation a usual call of this package's operators takes here"]
    for device, choices in kernels.items():
        alike: dict[str, list[str]] = {}
        for name, choice in choices.items():
            how = ", ".join(f"{what} {value}" for what, value in choice["details"].items())
            text = choice["implementation"] + (f" ({how})" if how else "")
            text += "".join(f"; not {other}: {reason}" for other, reason in choice["passed_over"].items())
            alike.setdefault(text, []).append(name)
        for text, names in alike.items():
            head = f"    {device:<5} "
            told = f"{text}: {', '.join(names)}"
            lines += wrap(told, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def _summary(operators: Operators) -> list[str]:
    lines = []
    for group, choices in operators.items():
        lines.append(f"  {group}: {len(choices)} operators")
        for device in ("npu", "cuda", "cpu"):
            by_choice: dict[str, list[str]] = {}
            for name, choice in choices.items():
                by_choice.setdefault(choice[device].partition(" (")[0], []).append(name.removeprefix("fbgemm::"))
            for made_by, names in sorted(by_choice.items(), key=lambda item: -len(item[1])):
                # Names only where a user of an NPU would miss something.
                missed = device == "npu" and made_by.startswith("none") and not group.startswith("inside")
                told = f": {', '.join(names)}" if missed else ""
                head = f"    {device:<5} {len(names):>3}  "
                lines += wrap(f"{made_by}{told}", WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def _every_operator(operators: Operators) -> list[str]:
    lines = []
    for group, choices in operators.items():
        lines.append(f"  {group}")
        for name, choice in choices.items():
            lines.append(f"    {name}")
            lines.append(f"      npu {choice['npu']:<42} cuda {choice['cuda']:<20} cpu {choice['cpu']}")
    return lines
