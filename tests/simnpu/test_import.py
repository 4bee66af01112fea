"""Loading: what it refuses, what it leaves alone, how it is built. Most cases are processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests import forked


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(code)
    return forked.run_program(["program.py"], ranks=None, folder=folder, timeout=60, environment=environment)


def test_loading_again_keeps_the_device_and_sets_the_policy(npu: ModuleType) -> None:
    import torch

    npu.load(devices=8, policy="permissive")
    torch.ones(2, device="npu", dtype=torch.float64).add(1)
    with pytest.raises(RuntimeError, match=r"loaded with 8 devices of .* and cannot be changed to 2 devices"):
        npu.load(devices=2)
    with pytest.raises(RuntimeError, match="cannot be changed to 8 devices of 1048576 bytes"):
        npu.load(devices=8, memory=1 << 20)
    assert npu.is_loaded()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices must be 1 to 64, got 0"),
        ({"devices": 65}, "devices must be 1 to 64, got 65"),
        ({"memory": 0}, "memory must be a positive number of bytes, got 0"),
        ({"policy": "off"}, "policy must be one of strict, report, permissive, got 'off'"),
    ],
)
def test_arguments_out_of_range_are_refused(npu: ModuleType, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        npu.load(**arguments)


def test_a_process_with_torch_npu_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    done = python(
        "import sys, types, torch; sys.modules['torch_npu'] = types.ModuleType('torch_npu')\n"
        "from turbogr_plugin import simnpu\n"
        "try: simnpu.load()\n"
        "except RuntimeError as error: print(error)\n"
        "print(torch._C._get_privateuse1_backend_name(), torch.accelerator.is_available(), simnpu.is_loaded())\n"
        "try: simnpu.counters()\n"
        "except RuntimeError as error: print(error)\n"
        "torch.utils.rename_privateuse1_backend('other'); del sys.modules['torch_npu']\n"
        "try: simnpu.load()\n"
        "except RuntimeError as error: print(error)\n",
        tmp_path,
    )
    first, state, unloaded, other = done.stdout.splitlines()
    assert first.startswith("torch_npu is imported in this process")
    assert state == "privateuseone False False"
    assert "call turbogr_plugin.simnpu.load() first" in unloaded
    assert "this process has the backend 'other' already" in other


def test_devices_and_memory_are_as_many_as_asked_for(tmp_path: Path) -> None:
    done = python(
        "import torch, time; from turbogr_plugin import simnpu\n"
        "start = time.perf_counter(); simnpu.load(devices=2, memory=1 << 20); print(time.perf_counter() - start)\n"
        "print(torch.npu.device_count(), torch.npu.mem_get_info())\n"
        "kept = torch.ones(200_000, device='npu')\n"
        "try: torch.ones(200_000, device='npu')\n"
        "except torch.OutOfMemoryError as error: print(error)\n"
        "del kept; print(torch.ones(150_000, device='npu').sum().item())\n",
        tmp_path,
    )
    seconds, devices, error, value = done.stdout.splitlines()
    assert devices == "2 (1048576, 1048576)"
    assert "npu:0 is out of memory" in error
    assert value == "150000.0"
    assert float(seconds) > 0


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path) -> None:
    done = python(
        "from turbogr_plugin import simnpu\nsimnpu.load()",
        tmp_path,
        CXX="no-such-compiler",
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert done.returncode == 1
    assert "the compiler 'no-such-compiler' is not there" in done.stderr.splitlines()[-1]


def test_without_a_folder_for_the_build_the_message_says_how_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = python(
        "from turbogr_plugin import simnpu\nsimnpu.load()", tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path / "file/folder")
    )
    assert done.returncode == 1
    assert "set TORCH_EXTENSIONS_DIR to a folder that can be written" in done.stderr.splitlines()[-1]


def test_a_process_that_has_run_a_backward_pass_is_told_so_without_an_internal_assertion(tmp_path: Path) -> None:
    done = python(
        "import torch; torch.ones(1, requires_grad=True).backward()\nfrom turbogr_plugin import simnpu\nsimnpu.load()",
        tmp_path,
    )
    assert done.returncode == 1
    assert "a backward pass has run in this process" in done.stderr.splitlines()[-1]
