"""Checkpoints without processes: what is stored, what is refused, and what a kill at any moment leaves behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupStage

from turbogr_plugin.errors import InputError
from turbogr_plugin.training.checkpoints import (
    find_checkpoint,
    initialize_optimizer_state,
    latest_checkpoint,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def _state(step: int) -> dict[str, Any]:
    """A state that tells its step by every value."""
    return {
        "model": {"weight": torch.full((5, 3), float(step)), "bias": torch.full((3,), -float(step))},
        "optimizer": {"count": torch.tensor(step), "groups": [{"lr": 0.1 * step, "names": ["weight", "bias"]}]},
    }


def _save(directory: Path, step: int, **options: Any) -> Path:
    return save_checkpoint(directory, step=step, state=_state(step), extra={"step": step}, **options)


def _assert_holds(directory: Path, steps: set[int], name: str | None = None) -> None:
    """The checkpoint found is one of these steps, whole and unmixed."""
    found = latest_checkpoint(directory) if name is None else find_checkpoint(directory, name)
    assert found is not None
    assert found.step in steps
    state = _state(0)
    extra = load_checkpoint(found, state)
    assert extra == {"step": found.step} == found.extra
    expected = _state(found.step)
    assert torch.equal(state["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(state["model"]["bias"], expected["model"]["bias"])
    assert torch.equal(state["optimizer"]["count"], expected["optimizer"]["count"])
    assert state["optimizer"]["groups"] == expected["optimizer"]["groups"]


def _names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


# --- content ----------------------------------------------------------------------------------------------------------


def test_every_element_type_and_odd_shape_comes_back_bit_equal(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        for shape in [(), (1,), (0, 4), (7, 3)]:
            bits = torch.randint(2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
            tensors[f"{dtype}{list(shape)}".replace(".", "_")] = bits.to(torch.uint8).view(dtype).reshape(shape)
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    tensors["every second"] = torch.arange(12)[::2]
    path = save_checkpoint(tmp_path, step=1, state={"model": tensors}, extra={})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found = latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(found, {"model": loaded})
    raw = load_file(path / "rank-00000.safetensors")  # the format's own reader agrees
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        bits = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(loaded[name].contiguous().reshape(-1).view(torch.uint8), bits), name
        if tensor.numel():
            stored = next(value for key, value in raw.items() if key.split("[0:")[0] == f"model.{name}")
            assert torch.equal(stored.reshape(-1).view(torch.uint8), bits), name


def test_tensors_longer_than_the_copy_buffer_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbogr_plugin.training.safetensors_storage._COPY_BYTES", 24)
    weight = torch.arange(101, dtype=torch.float64)
    save_checkpoint(tmp_path, step=1, state={"model": {"weight": weight}}, extra={})
    found, loaded = latest_checkpoint(tmp_path), torch.zeros_like(weight)
    assert found is not None
    load_checkpoint(found, {"model": {"weight": loaded}})
    assert torch.equal(loaded, weight)


def test_numbers_strings_lists_and_tuples_come_back_exactly(tmp_path: Path) -> None:
    def values(scale: float) -> dict[str, Any]:
        return {"lr": 0.1 * scale, "betas": (0.9, 0.95 * scale), "on": scale > 0, "none": None, "list": [1, "a", [2.5]]}

    save_checkpoint(tmp_path, step=1, state={"optimizer": {"groups": [values(1 / 3)], 7: {"n": 2**62}}}, extra={})
    state = {"optimizer": {"groups": [values(0)], 7: {"n": 0}}}
    found = latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(found, state)
    assert state == {"optimizer": {"groups": [values(1 / 3)], 7: {"n": 2**62}}}


def test_parts_that_are_not_asked_for_are_left_out(tmp_path: Path) -> None:
    _save(tmp_path, 4)
    found, state = latest_checkpoint(tmp_path), {"model": _state(0)["model"]}
    assert found is not None
    load_checkpoint(found, state)
    assert torch.equal(state["model"]["weight"], _state(4)["model"]["weight"])


def test_random_numbers_continue_where_the_saved_generator_stood(tmp_path: Path) -> None:
    torch.manual_seed(11)
    save_checkpoint(tmp_path, step=1, state={}, extra={}, per_rank=rng_state())
    expected = torch.rand(5)
    torch.manual_seed(12)
    own, found = rng_state(), latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(found, {}, per_rank=own)
    set_rng_state(own)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize("wrapped", ["warmup(clip(adamw))", "combined"])
def test_an_optimizer_that_never_stepped_takes_over_state_and_learning_rate(tmp_path: Path, wrapped: str) -> None:
    def build(seed: int) -> tuple[torch.nn.Linear, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 4)
        optimizer: Any = KeyedOptimizerWrapper(
            dict(model.named_parameters()), lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)
        )
        optimizer = GradientClippingOptimizer(optimizer, clipping=GradientClipping.NORM, max_gradient=0.5)
        optimizer = WarmupOptimizer(optimizer, [WarmupStage(max_iters=8, value=0.1)], lr=0.1)
        return model, CombinedOptimizer([("dense", optimizer)]) if wrapped == "combined" else optimizer

    def train(model: torch.nn.Linear, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = build(0)
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_checkpoint(tmp_path, step=3, state=state, extra={})
    expected = train(model, optimizer, range(3, 7))

    model, optimizer = build(1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    initialize_optimizer_state(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(found, state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 * 3 / 8))
    initialize_optimizer_state(optimizer)  # has its state: nothing to do
    assert train(model, optimizer, range(3, 7)) == expected


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    found, other = latest_checkpoint(tmp_path), _state(1)
    assert found is not None
    other["model"] = {"weight": torch.zeros(5, 4), "bias": torch.zeros(3, dtype=torch.float64), "gate": torch.zeros(1)}
    del other["optimizer"]["groups"][0]["lr"]
    with pytest.raises(InputError, match="another model") as raised:
        load_checkpoint(found, other)
    text = str(raised.value)
    assert "model.weight has the shape [5, 3], the model [5, 4]" in text
    assert "model.bias is torch.float32, in the model torch.float64" in text
    assert "model.gate is missing in the checkpoint" in text
    assert "optimizer.groups.0.lr is unknown to the model" in text
    assert torch.equal(other["model"]["weight"], torch.zeros(5, 4))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path / "rank-00000.safetensors", 60), "has 60 bytes"),
        (lambda path: (path / "rank-00000.safetensors").unlink(), "is missing"),
        (lambda path: (path / "index.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "index.json").write_text('{"format_version": 1}'), "not an index"),
        (lambda path: (path / "index.json").unlink(), "cannot be read"),
        (lambda path: (path / "extra.json").write_text("[]"), "format_version"),
        (lambda path: (path / "extra.json").write_text('{"format_version": 2}'), "format_version 2"),
    ],
    ids=["cut", "no-file", "half-index", "empty-index", "no-index", "odd-extra", "later-version"],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(_save(tmp_path, 1))
    with pytest.raises(InputError, match=message):  # noqa: PT012 (either may find it)
        found = latest_checkpoint(tmp_path)
        assert found is not None
        load_checkpoint(found, _state(0))


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    file = _save(tmp_path, 1) / "rank-00000.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(InputError, match=r"rank-00000\.safetensors"):
        load_checkpoint(found, _state(0))


def test_later_checkpoints_of_another_run_are_never_overwritten(tmp_path: Path) -> None:
    _save(tmp_path, 7)
    with pytest.raises(InputError, match="step-00000007"):
        _save(tmp_path, 3)
    _assert_holds(tmp_path, {7})
    assert _names(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("name", ["", "a/b", "..", "step-00000001", ".hidden", "b.old"])
def test_names_that_would_leave_the_folder_or_mimic_a_step_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name is"):
        _save(tmp_path, 1, name=name)
    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"layer": object()}}, "model.layer is a object"),
        ({"model": {"weight": torch.zeros(1, dtype=torch.complex64)}}, "complex64"),
        ({"model": {"a.b": 1, "a": {"b": 2}}}, "two values"),
        ({"per_rank": {}}, "per_rank"),
    ],
    ids=["object", "complex", "ambiguous", "reserved"],
)
def test_state_that_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        save_checkpoint(tmp_path / "new", step=1, state=state, extra={})
    assert not (tmp_path / "new").exists()


# --- folders ----------------------------------------------------------------------------------------------------------


def test_only_the_newest_are_kept_and_a_named_one_is_not_counted(tmp_path: Path) -> None:
    _save(tmp_path, 1, name="best")
    for step in range(1, 6):
        _save(tmp_path, step, keep=2)
    assert _names(tmp_path) == ["best", "step-00000004", "step-00000005"]
    _assert_holds(tmp_path, {5})
    _assert_holds(tmp_path, {1}, "best")
    _save(tmp_path, 5, name="best")
    _assert_holds(tmp_path, {5}, "best")


def test_no_folder_and_an_empty_folder_hold_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path, "best") is None


def test_leftovers_of_every_kind_at_once_are_removed_and_a_former_one_without_successor_returns(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    for kind in ("tmp", "old", "trash"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / f".step-00000001.{kind}")
    _save(tmp_path, 1, name="best")
    os.rename(tmp_path / "best", tmp_path / ".best.old")
    _assert_holds(tmp_path, {1}, "best")
    (tmp_path / "notes").mkdir()
    (tmp_path / ".notes.txt").touch()
    _save(tmp_path, 2)
    assert _names(tmp_path) == [".notes.txt", "best", "notes", "step-00000001", "step-00000002"]


def _in_child(action: Callable[[], None]) -> int:
    """Run `action` in a fork; returns the exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill_at(event_number: int) -> None:
    """Let this process be killed by SIGKILL just before its n-th change of the file system."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (lambda directory: _save(directory, 2, keep=1), None),
        (lambda directory: _save(directory, 1), None),
        (lambda directory: _save(directory, 2, name="best"), "best"),
    ],
    ids=["next-step", "same-step-again", "named"],
)
def test_a_kill_before_any_change_of_the_disk_leaves_a_complete_checkpoint(
    tmp_path: Path, save: Callable[[Path], Any], name: str | None
) -> None:
    before = tmp_path / "before"
    _save(before, 1)
    _save(before, 1, name="best")
    for event_number in range(1, 100):
        directory = tmp_path / f"killed-{event_number}"
        shutil.copytree(before, directory)

        def save_and_die(directory: Path = directory, event_number: int = event_number) -> None:
            _kill_at(event_number)
            save(directory)

        status = _in_child(save_and_die)
        _assert_holds(directory, {1, 2}, name)
        _assert_holds(directory, {1, 2}, "best")
        if status == 0:
            break
        assert status == -signal.SIGKILL
        # The same once more, on top of the leftovers (it may get further), and then a save that clears them.
        _in_child(save_and_die)
        _assert_holds(directory, {1, 2}, name)
        _save(directory, 3, keep=1)
        assert _names(directory) == ["best", "step-00000003"]
        _assert_holds(directory, {3})
    assert status == 0
    assert event_number > 8, "the hook saw too few changes to mean anything"


def test_a_write_that_the_system_refuses_leaves_the_former_checkpoint_and_no_remains(tmp_path: Path) -> None:
    _save(tmp_path, 1)

    def save_large() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            save_checkpoint(tmp_path, step=2, state={"model": {"weight": torch.zeros(100_000)}}, extra={})
        except InputError as error:
            os._exit(42 if "File too large" in str(error) else 43)

    assert _in_child(save_large) == 42
    assert _names(tmp_path) == ["step-00000001"]
    _assert_holds(tmp_path, {1})


def test_the_index_is_json_that_lists_every_tensor(tmp_path: Path) -> None:
    index = json.loads((_save(tmp_path, 1) / "index.json").read_text())
    assert {key: entry["shape"] for key, entry in index["tensors"].items()} == {
        "model.weight": [5, 3],
        "model.bias": [3],
        "optimizer.count": [],
    }
