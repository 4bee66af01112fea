"""What a build is kept by, and what a machine that cannot build is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from turbogr_plugin import native_build
from turbogr_plugin.native_build import Extension, library_path, missing_tools


@pytest.fixture
def extension(tmp_path: Path) -> Extension:
    (tmp_path / "kernel.cpp").write_text('#include <vector>\n#include "outer.h"\n')
    (tmp_path / "outer.h").write_text('  #  include "inner.h"\n')
    (tmp_path / "inner.h").write_text("int x;\n")
    (tmp_path / "other.h").write_text("int y;\n")
    return Extension("kernel", "the kernel", tmp_path, ["kernel.cpp"], ["-O1"])


def test_a_build_is_kept_by_its_sources_their_headers_and_its_flags(extension: Extension) -> None:
    kept = library_path(extension)
    assert library_path(extension) == kept
    assert library_path(replace(extension, flags=["-O2"])) != kept
    assert library_path(replace(extension, link_flags=["-lm"])) != kept
    (extension.folder / "other.h").write_text("int z;\n")
    assert library_path(extension) == kept, "a header that is not included changed it"
    (extension.folder / "inner.h").write_text("int changed;\n")
    assert library_path(extension) != kept


def test_builds_are_kept_where_all_extensions_of_torch_are(
    extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    assert library_path(extension).is_relative_to(tmp_path / "kept")


def test_a_missing_compiler_is_named_with_the_way_out(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    said = missing_tools(extension)
    assert said is not None
    assert "the compiler '/nowhere/c++' is not there" in said
    assert "install g++" in said


def test_missing_ninja_is_named_with_the_way_out(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_search_path", lambda: "/nowhere")
    monkeypatch.setenv("CXX", "true")
    said = missing_tools(extension)
    assert said == "the kernel is built by ninja, which is not there: pip install ninja"


def test_a_build_that_cannot_be_kept_says_where(
    extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file/folder"))
    with pytest.raises(RuntimeError, match="TORCH_EXTENSIONS_DIR"):
        native_build.load(extension)
