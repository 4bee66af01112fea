"""CUDA literals are found in sources by their syntax."""

from __future__ import annotations

from pathlib import Path

import pytest

from turbogr_plugin.simnpu.cuda_literals import find, imported_from_folder


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.cuda.synchronize()", ["torch.cuda.synchronize"]),
        ("with torch.cuda.amp.autocast(): pass", ["torch.cuda.amp.autocast"]),
        ("import torch.cuda as tc", ["import torch.cuda"]),
        ("from torch import cuda, nn", ["from torch import cuda"]),
        ("from torch.cuda.amp import GradScaler", ["from torch.cuda.amp import GradScaler"]),
        ("model.cuda()", [".cuda()"]),
        ('x.to("cuda")', ['"cuda"']),
        ('x.to("cuda:1")', ['"cuda:1"']),
        ('x.to(f"cuda:{rank}")', ['"cuda:..."']),
        ('init("nccl")', ['"nccl"']),
        ('init("cpu:gloo,cuda:nccl")', ['"cpu:gloo,cuda:nccl"']),
        ('"cuda" if torch.cuda.is_available() else "cpu"', ['"cuda"', "torch.cuda.is_available"]),
        ('"""Runs on cuda, or with nccl."""', []),
        ('x = "barracuda"; y = cuda; torch.npu.synchronize()', []),
        ("not python at all", []),
    ],
)
def test_a_source_is_searched_for_names_and_strings(tmp_path: Path, source: str, found: list[str]) -> None:
    (tmp_path / "script.py").write_text(source)
    assert [literal.text for literal in find(tmp_path / "script.py")] == found


def test_a_literal_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\n\n\nx = (torch\n     .cuda\n     .device_count())\ny = 'cuda'\n")
    assert [literal.line for literal in find(tmp_path / "script.py")] == [4, 7]


def test_modules_of_the_scripts_folder_are_followed_and_others_are_not(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "script.py").write_text("import torch, os\nimport helper\nfrom package.inner import f\n")
    (tmp_path / "helper.py").write_text("import script\n")  # in a circle
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from . import beside\nfrom .beside import g\n")
    (package / "beside.py").write_text("")
    (package / "unused.py").write_text("")
    names = {path.relative_to(tmp_path).as_posix() for path in imported_from_folder(tmp_path / "script.py")}
    assert names == {"script.py", "helper.py", "package/__init__.py", "package/inner.py", "package/beside.py"}
