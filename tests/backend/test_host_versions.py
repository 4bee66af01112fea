from __future__ import annotations

import pytest

from turbogr_plugin import __version__
from turbogr_plugin.backend.host_versions import HOST_PINS, PACKAGES, installed_versions, unsupported_hosts

FITTING = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "fbgemm-gpu": "1.8.0"}
ASCEND = {"torch-npu": "2.13.0", "triton-ascend": "3.2.0"}


def differences(**changed: str | None) -> list[str]:
    """The messages for the fitting versions with some of them changed, None for not installed."""
    names = {name.replace("_", "-"): version for name, version in changed.items()}
    versions = {name: version for name, version in {**FITTING, **names}.items() if version is not None}
    return [str(difference) for difference in unsupported_hosts(versions)]


def test_the_versions_that_this_environment_pins_fit_each_other() -> None:
    assert unsupported_hosts() == []


def test_an_ascend_host_with_the_pinned_versions_fits() -> None:
    assert unsupported_hosts({**FITTING, **ASCEND}) == []


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("torch", "2.14.1", "torch 2.14.1 is installed, 2.13.x is needed: fbgemm 1.8 is built against it"),
        ("torch", "2.130.0", "torch 2.130.0 is installed, 2.13.x is needed: fbgemm 1.8 is built against it"),
        ("torchrec", "1.9.2", "torchrec 1.9.2 is installed, 1.8.x is needed: its sources are what is adapted"),
        (
            "fbgemm-gpu",
            "1.9.0",
            "fbgemm-gpu 1.9.0 is installed, 1.8.x is needed: its operators' schemas are what is registered",
        ),
        ("torch-npu", "2.10.0", "torch-npu 2.10.0 is installed, 2.13.x is needed: it fits the torch of its own number"),
        ("fbgemm-ascend", "1.5.0", "fbgemm-ascend 1.5.0 is installed, it must not be: it is built for torch 2.10"),
    ],
)
def test_a_version_that_does_not_fit_is_named_with_what_is_needed(name: str, version: str, message: str) -> None:
    (found,) = unsupported_hosts({**FITTING, name: version})
    assert str(found).startswith(message)


def test_a_missing_package_is_named_where_it_is_needed_and_no_matter_where_it_is_not() -> None:
    assert differences(torchrec=None) == ["torchrec is not installed, 1.8.x is needed: its sources are what is adapted"]
    assert differences(fbgemm_gpu=None) == []  # one of the two distributions suffices
    assert len(differences(fbgemm_gpu=None, fbgemm_gpu_cpu=None)) == 1


def test_only_what_the_adaptations_rest_on_is_needed() -> None:
    assert [pin.name for pin in HOST_PINS if pin.needed] == ["torch", "torchrec", "fbgemm"]


def test_the_installed_versions_name_this_package_python_and_the_hosts() -> None:
    found = installed_versions()
    assert list(found) == ["turbogr-plugin", "python", *PACKAGES]
    assert found["turbogr-plugin"] == __version__
    assert found["torch"].startswith("2.13.")
