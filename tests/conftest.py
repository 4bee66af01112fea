"""Fixtures of the whole suite: runs of the command line on a tiny store, made once and looked at by many tests.

One thread for torch: the tensors of the tests are too small to gain from more, and ranks share the cores.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from tests import runs
from tests.npu.ranks import RankPool

torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads the simulated npu before the first test, if any test runs on it.

    torch's autograd engine counts the devices at the first backward pass of a process; one that comes later has no
    thread and every backward pass on it dies of an internal assertion.
    """
    if any("npu" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests.npu_device import load_npu

        load_npu()
    _build_kernels({item.path.relative_to(session.config.rootpath).parts[1] for item in session.items})


def _build_kernels(folders: set[str]) -> None:
    """Builds the C++ kernels before the first test of a folder that uses them: it takes longer than a test may."""
    if not folders & {"kernels", "models", "training", "pipeline", "npu", "sharding", "test_cli.py"}:
        return
    from turbogr_plugin.kernels.cpu import build

    for family in build.families():
        if build.missing(family) is None:
            build.load(family)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `log.txt`, `tiny.yaml` and the store made of the log; runs of the command line go there."""
    folder = tmp_path_factory.mktemp("tiny")
    runs.write_inputs(folder)
    rules = ["--format", "text", "--user_core", "1", "--item_core", "1"]
    outcome = runs.run_here("prepare", str(folder / "log.txt"), *rules, "--output", str(folder / "store"))
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes with the simulated npu and the plugin registered, in which functions run as ranks; see RankPool."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks(tiny: Path) -> dict[str, list[runs.Outcome]]:
    """Commands on two ranks, by name: one outcome per rank."""
    train = ["train", "--config", "tiny.yaml"]
    recommend = ["recommend", "--run", "two", "--users"]
    commands = {
        "train": [*train, "--output", "two"],
        "train, shared negatives": [
            *(*train, "--output", "two-shared", "--negatives.sharing", "sequence", "--training.epochs", "2"),
        ],
        "recommend": [*recommend, "1014", "1000", "1420", "1007", "--k", "7"],
        "recommend to one user": [*recommend, "1420", "--k", "7"],
        "train again": [*train, "--output", "two"],
        "missing store": [*train, "--data.store", "nowhere", "--output", "never"],
        "file in the way": [*train, "--output", "log.txt"],
    }
    return runs.run_commands(commands, ranks=2, folder=tiny)


@pytest.fixture(scope="session")
def kills(tiny: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """A run on two ranks that is killed twice and resumed twice, each time by the same command and --resume.

    `killed-early` and `killed-late` are copies of its folder `killed` after the first and the second kill, and
    `killed-to-one-rank` another of the first, for a single rank to go on with.
    """
    train = ["--config", "tiny.yaml", "--output", "killed"]
    program = str(Path(__file__).with_name("killed_train.py"))
    done = {"in an epoch": runs.launch([program, "1", "step", "26", *train], ranks=2, folder=tiny)}
    for copy in ("killed-early", "killed-to-one-rank"):
        shutil.copytree(tiny / "killed", tiny / copy)
    done["in a checkpoint"] = runs.launch([program, "0", "checkpoint", "56", *train, "--resume"], ranks=2, folder=tiny)
    shutil.copytree(tiny / "killed", tiny / "killed-late")
    last, _ = runs.run_commands({"resume": ["train", *train, "--resume"]}, ranks=2, folder=tiny)["resume"]
    done["to the end"] = subprocess.CompletedProcess(train, last.code, last.out, last.err)
    return done


@pytest.fixture(scope="session")
def small_disk(tiny: Path, two_ranks: dict[str, list[runs.Outcome]]) -> Iterator[Path | None]:
    """A disk with room for two checkpoints of the tiny run, but not for a third; None where mounting is not allowed."""
    checkpoint = sum(file.stat().st_size for file in (tiny / "two/checkpoints/best").iterdir())
    path = tiny / "disk"
    path.mkdir()
    options = f"size={int(2.6 * checkpoint) + 60_000}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield path if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=20)


@pytest.fixture(scope="session")
def one_rank(
    tiny: Path,
    two_ranks: dict[str, list[runs.Outcome]],
    kills: dict[str, subprocess.CompletedProcess[str]],
    small_disk: Path | None,
) -> dict[str, runs.Outcome]:
    """Commands on one rank, by name; some go on with what the runs on two ranks left."""
    shutil.copytree(tiny / "two", tiny / "patient")
    for name in ("store-damaged", "store-version"):
        shutil.copytree(tiny / "store", tiny / name)
    lines = map(str.split, (tiny / "log.txt").read_text().splitlines())
    shifted = [f"{user} {int(item) + 1} {time}" for user, item, time in lines]
    (tiny / "shifted.txt").write_text("\n".join(shifted) + "\n")
    rules = ["--format", "text", "--user_core", "1", "--item_core", "1", "--output", str(tiny / "store-shifted")]
    assert runs.run_here("prepare", str(tiny / "shifted.txt"), *rules).code == 0
    # A run that knows how its store was made, and whose store is gone.
    shutil.copytree(tiny / "two", tiny / "storeless")
    config = yaml.safe_load((tiny / "storeless/config.yaml").read_text())
    prepare = {"format": "text", "inputs": [str(tiny / "log.txt")], "user_core": 1, "item_core": 1}
    config["data"] |= {"store": str(tiny / "store-gone"), "prepare": prepare}
    (tiny / "storeless/config.yaml").write_text(yaml.safe_dump(config))
    times = bytearray((tiny / "store-damaged/times.npy").read_bytes())
    times[-3] ^= 1
    (tiny / "store-damaged/times.npy").write_bytes(times)
    manifest = json.loads((tiny / "store/manifest.json").read_text())
    (tiny / "store-version/manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    train, recommend = ["train", "--config", "tiny.yaml"], ["recommend", "--run", "two", "--users"]
    commands = {
        "train": [*train, "--output", "one"],
        "train, shared negatives": [
            *(*train, "--output", "one-shared", "--negatives.sharing", "sequence", "--training.epochs", "2"),
        ],
        "train, seldom validating, in bf16": [
            *(*train, "--output", "seldom", "--training.precision", "bf16", "--training.epochs", "3"),
            *("--training.evaluate_every", "2", "--training.checkpoint_every", "6", "--training.keep", "9"),
        ],
        "train from config.yaml": [
            "train",
            "--config",
            "one/config.yaml",
            "--output",
            "anew",
            "--training.epochs",
            "2",
        ],
        "resume what two ranks left": [*train, "--output", "killed-to-one-rank", "--resume"],
        "evaluate": ["evaluate", "--run", "two"],
        "recommend": [*recommend, "1014", "1000", "1420", "1007", "--k", "7"],
        "unknown user": [*recommend, "1000", "5"],
        "negative k": [*recommend, "1000", "--k", "-1"],
        "huge user id": [*recommend, str(1 << 63)],
        "unknown checkpoint": ["evaluate", "--run", "two", "--checkpoint", "step-1"],
        "damaged store": ["evaluate", "--run", "two", "--store", "store-damaged"],
        "store of another version": ["evaluate", "--run", "two", "--store", "store-version"],
        "other items": ["evaluate", "--run", "two", "--store", "store-shifted"],
        "store is gone": ["evaluate", "--run", "storeless"],
        "another model": [*train, "--output", "two", "--resume", "--model.dim", "24"],
        "other batches": [*train, "--output", "two", "--resume", "--training.global_batch_size", "10"],
        "resume after the end": [*train, "--output", "anew", "--resume", "--training.epochs", "2"],
        "resume with more patience": [
            *(*train, "--output", "patient", "--resume", "--training.patience", "99", "--training.epochs", "17"),
        ],
        "resume of nothing": [*train, "--output", "of-nothing", "--resume", "--training.epochs", "1"],
        "other heads": [*train, "--output", "two", "--resume", "--model.heads", "4", "--model.qk_dim", "4"],
    }
    if small_disk is not None:
        commands["full disk"] = [*train, "--output", str(small_disk / "run")]
    return {name: outcomes[0] for name, outcomes in runs.run_commands(commands, ranks=None, folder=tiny).items()}
