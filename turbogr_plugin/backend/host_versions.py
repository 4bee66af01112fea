"""The versions of what this package stands on; the only place that reads them."""

from __future__ import annotations

import platform
from importlib import metadata

from turbogr_plugin import __version__

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "torchx", "duckdb", "numpy")


def installed_versions() -> dict[str, str]:
    """Version by name of this package, Python and the host packages; "not installed" where one is missing."""
    found = {"turbogr-plugin": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
