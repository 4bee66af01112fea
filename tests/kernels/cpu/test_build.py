"""Which C++ kernels there are, what they are built with, and what is said where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.attention_cases import Case, inputs
from turbogr_plugin import cli
from turbogr_plugin.kernels import dispatch
from turbogr_plugin.kernels.cpu import build, jagged_attention
from turbogr_plugin.kernels.dispatch import MissingTool


def test_each_family_has_sources_and_a_module_of_its_name() -> None:
    assert {"jagged_attention", "fuxi_attention"} <= set(build.families())
    for family in build.families():
        assert build.extension(family).sources
        assert (Path(build.__file__).parent / f"{family}.py").exists()


def test_no_flag_leaves_the_machine_open() -> None:
    for capability in ("AVX512", "AVX2", "DEFAULT"):
        for bf16 in (False, True):
            assert not any("native" in flag for flag in build.compiler_flags(capability, bf16=bf16))
    assert "-mavx512bf16" in build.compiler_flags("AVX512", bf16=True)
    assert "-mavx512bf16" not in build.compiler_flags("AVX512", bf16=False)


def test_without_a_compiler_the_reference_runs_and_the_kernel_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_loaded", {})
    build._missing.cache_clear()
    try:
        x = inputs(Case((3, 2)), torch.float32)
        call = jagged_attention.HSTUAttentionCall(x.q, x.k, x.v, x.offsets, 1.0, 1.0)
        reason = jagged_attention.refuses(call)
        assert isinstance(reason, MissingTool)
        assert "the compiler '/nowhere/c++' is not there" in reason
        with pytest.warns(UserWarning, match="runs as reference: cpu cannot serve here"):
            assert x.call().shape == x.v.shape
        assert build.describe()["float32"] == "not known before turbogr build"
    finally:
        build._missing.cache_clear()


def test_a_failed_build_is_the_reason_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failed", {})

    def fail(_: object) -> None:
        raise RuntimeError("line 7: error")

    monkeypatch.setattr(build.native_build, "load", fail)
    with pytest.raises(RuntimeError, match="line 7"):
        build.load("jagged_attention")
    assert build.missing("jagged_attention") == "its build failed: line 7: error"


def test_a_call_whose_build_fails_is_served_by_the_reference_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failed", {})
    monkeypatch.setattr(dispatch, "_warned", set())

    def fail(_: object) -> None:
        raise RuntimeError("line 7: error")

    monkeypatch.setattr(build.native_build, "load", fail)
    x = inputs(Case((3, 2)), torch.float32)
    with pytest.warns(UserWarning, match="cpu cannot serve here, its build failed: line 7"):
        found = x.call()
    assert torch.equal(found, x.call(implementation="reference"))
    with pytest.raises(ValueError, match=r"'cpu' cannot serve this call.*its build failed: line 7"):
        x.call(implementation="cpu")


def test_the_build_command_refuses_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", "everything"]) == 2
    assert "FAMILY must be one of" in capsys.readouterr().err
