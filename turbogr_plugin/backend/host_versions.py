"""The versions of what this package stands on; the only place that reads them.

The packages of one row of the pairing table were built for each other: fbgemm's shared libraries fit one minor version
of torch, torchrec calls operators of one fbgemm, torch_npu fits one release of torch. The adaptations were written for
these. The rest of the package asks for a named difference and never compares versions itself.

Left out: whether the installed sources are the expected ones. Each adaptation checks that by fingerprint.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from turbogr_plugin import __version__

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "torchx", "duckdb", "numpy")

NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class HostPin:
    """One host package and the releases of it that this package was written for."""

    name: str
    """What the pin is called in messages."""
    distributions: tuple[str, ...]
    """Names under which it is published; several may be installed at once, each has to fit."""
    release: str
    """Leading components of the version, as "2.13" for 2.13.x; empty where no release fits."""
    needed: bool
    """Whether adaptations and operators rest on it, so that registration is refused where it does not fit."""
    why: str
    """What another release breaks."""


#: The pairing table: the first three rows fit each other, the others fit them.
HOST_PINS = (
    HostPin("torch", ("torch",), "2.13", True, "fbgemm 1.8 is built against it"),
    HostPin("torchrec", ("torchrec",), "1.8", True, "its sources are what is adapted"),
    HostPin("fbgemm", ("fbgemm-gpu-cpu", "fbgemm-gpu"), "1.8", True, "its operators' schemas are what is registered"),
    HostPin("torch_npu", ("torch-npu",), "2.13", False, "it fits the torch of its own number only"),
    HostPin("triton-ascend", ("triton-ascend",), "3.2", False, "the kernels were compiled with it"),
    HostPin("fbgemm-ascend", ("fbgemm-ascend",), "", False, "it is built for torch 2.10, for the same operators"),
)


@dataclass(frozen=True)
class HostDifference:
    """A pin that is not met."""

    pin: HostPin
    distribution: str
    """The one that does not fit."""
    found: str
    """Its version, or "not installed"."""

    def __str__(self) -> str:
        installed = f"{self.distribution} is {self.found}"
        if self.found != NOT_INSTALLED:
            installed = f"{self.distribution} {self.found} is installed"
        wanted = f"{self.pin.release}.x is needed" if self.pin.release else "it must not be"
        return f"{installed}, {wanted}: {self.pin.why}"


def installed_version(distribution: str) -> str:
    """The version of one installed distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def installed_versions() -> dict[str, str]:
    """Version by name of this package, Python and the host packages; "not installed" where one is missing."""
    found = {"turbogr-plugin": __version__, "python": platform.python_version()}
    return found | {package: installed_version(package) for package in PACKAGES}


def unsupported_hosts(versions: Mapping[str, str] | None = None) -> list[HostDifference]:
    """The pins that are not met: a needed package that is missing, any package of another release.

    Args:
        versions: version by name of distribution, where an absent name is not installed; None reads what is installed.
    """
    differences = []
    for pin in HOST_PINS:
        found = {
            name: installed_version(name) if versions is None else versions.get(name, NOT_INSTALLED)
            for name in pin.distributions
        }
        installed = {name: version for name, version in found.items() if version != NOT_INSTALLED}
        if pin.needed and not installed:
            differences.append(HostDifference(pin, pin.distributions[0], NOT_INSTALLED))
        differences += [
            HostDifference(pin, name, version) for name, version in installed.items() if not _fits(version, pin.release)
        ]
    return differences


def _fits(version: str, release: str) -> bool:
    """Whether `version` begins with the components of `release`: "2.13.0+cpu" with "2.13", but not "2.130"."""
    wanted = release.split(".")
    return bool(release) and version.partition("+")[0].split(".")[: len(wanted)] == wanted
