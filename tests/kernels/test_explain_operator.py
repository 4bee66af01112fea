"""What is told of an operator is what the dispatcher does."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import turbogr_plugin
from turbogr_plugin import kernels
from turbogr_plugin.kernels import aten_embedding_bag
from turbogr_plugin.kernels.explain_operator import DEVICE_TYPES, explain_operator
from turbogr_plugin.kernels.reached_operators import REACHED

NAMES = [name for names in REACHED.values() for name in names]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    turbogr_plugin.register()


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_no_operator_is_listed_twice() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_every_listed_operator_has_an_explanation(device_type: str) -> None:
    choices = {explain_operator(name, device_type).choice.partition(" (")[0] for name in NAMES}
    ours = {"ours", "none: refused", "none: falls back to the CPU"} if device_type == "npu" else set()
    assert choices == {"fbgemm's", "none: raises", "none: not there"} | ours


@pytest.mark.parametrize("name", NAMES)
def test_ours_is_told_exactly_where_a_kernel_for_npu_is_registered(name: str) -> None:
    choice = explain_operator(name, "npu").choice
    if choice == "none: not there":
        return
    registered = _has(name, "PrivateUse1") or _has(name, "AutogradPrivateUse1")
    if registered and choice == "none: refused":
        assert explain_operator(name, "npu").reason == "kernels/fbgemm_lookup.py raises and says why"
        return
    assert choice.startswith("ours (kernels/fbgemm_") == registered
    if registered:
        file = choice.removeprefix("ours (kernels/").removesuffix(")")
        text = (Path(kernels.__path__[0]) / file).read_text()
        assert "KERNELS" in text


def test_the_docs_say_of_each_operator_without_a_kernel_of_ours_why_and_of_no_other() -> None:
    page = Path(__file__).parents[2] / "docs/fbgemm_operators.md"
    rows = [line.split("|")[1:3] for line in page.read_text().splitlines() if line.startswith("| `")]
    patterns = [f"fbgemm::{name}" for names, _ in rows for name in re.findall("`(.+?)`", names)]
    assert all(reason.strip() for _, reason in rows)
    choices = {name: explain_operator(name, "npu").choice for name in NAMES}
    found = {pattern: [name for name in NAMES if fnmatchcase(name, pattern)] for pattern in patterns}
    assert [pattern for pattern, names in found.items() if not names] == []
    told = sorted(name for names in found.values() for name in names)
    assert told == sorted(name for name, choice in choices.items() if not choice.startswith("ours"))


def test_the_cpu_gets_fbgemms_own_kernel_and_it_runs() -> None:
    assert explain_operator("fbgemm::invert_permute", "cpu").choice == "fbgemm's"
    permute = torch.tensor([2, 0, 1])
    assert torch.ops.fbgemm.invert_permute(permute).tolist() == [1, 2, 0]


def test_what_is_said_to_raise_raises() -> None:
    assert explain_operator("fbgemm::lxu_cache_locking_counter_decrement", "cpu").choice == "none: raises"
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(x, x)


def test_ours_for_an_operator_of_torch_is_told_as_ours() -> None:
    (operator,) = {kernel.operator for kernel in aten_embedding_bag.KERNELS}
    assert explain_operator(operator, "npu").choice == "ours (kernels/aten_embedding_bag.py)"


def test_a_kernel_that_only_refuses_is_not_told_as_one_that_serves() -> None:
    told = explain_operator("fbgemm::split_embedding_codegen_lookup_none_function_pt2", "npu")
    assert told.choice == "none: refused"


def test_an_operator_that_fbgemm_does_not_have_is_not_there() -> None:
    assert explain_operator("fbgemm::no_such_operator", "npu").choice == "none: not there"


@pytest.mark.parametrize(
    ("name", "device_type", "message"),
    [
        ("invert_permute", "npu", "name must be qualified"),
        ("fbgemm::invert_permute", "mtia", "device_type must be one of npu, cuda, cpu, got 'mtia'"),
    ],
)
def test_bad_input_is_refused(name: str, device_type: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_operator(name, device_type)
