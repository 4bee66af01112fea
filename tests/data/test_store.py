from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.prepare import prepare
from turbogr_plugin.data.store import FORMAT_VERSION, InteractionStore, NpyWriter, replace_on_success
from turbogr_plugin.errors import InputError


def make_store(folder: Path, *, items: int = 4) -> Path:
    log = folder / "store.txt"
    log.write_text("".join(f"{user} {item} {item * 10}\n" for user in (30, 7, 12) for item in range(items)))
    prepare(PrepareConfig(format="text", inputs=[str(log)], user_core=1, item_core=1), folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_store(folder)
    return folder


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A store of the test's own in tmp_path, a copy of the one that was prepared."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "store"


def test_a_store_gives_back_sequences_by_dense_and_raw_user(path: Path) -> None:
    store = InteractionStore.open(path)

    assert (store.num_users, store.num_items, store.num_interactions, store.time_unit) == (3, 4, 12, "s")
    assert store.user_indices([12, 30]).tolist() == [1, 2]
    items, times = store.sequence(2)
    assert items.tolist() == [0, 1, 2, 3] and times.tolist() == [0, 10, 20, 30]
    assert isinstance(items, np.memmap) and not items.flags.writeable


@pytest.mark.parametrize("raw", [[8], [7, 31, 2**63 - 1], [-1]])
def test_unknown_users_are_named(path: Path, raw: list[int]) -> None:
    store = InteractionStore.open(path)

    with pytest.raises(InputError, match=f"no user .*{raw[-1]}"):
        store.user_indices(raw)


def edit_manifest(folder: Path, key: str, value: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[key] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another version": (lambda s: edit_manifest(s, "format_version", FORMAT_VERSION + 1), "format version 2"),
    "no version": (lambda s: edit_manifest(s, "format_version", None), "format version None"),
    "another format": (lambda s: edit_manifest(s, "format", "something"), "does not describe a store"),
    "counts that do not fit": (lambda s: edit_manifest(s, "num_users", 2), "offsets.npy holds"),
    "no manifest": (lambda s: (s / "manifest.json").unlink(), "manifest.json does not exist"),
    "half a manifest": (lambda s: os.truncate(s / "manifest.json", 100), "not readable JSON"),
    "a changed byte": (lambda s: flip_last_byte(s / "item_ids.npy"), "item_ids.npy does not have the sha256"),
    "a cut file": (lambda s: os.truncate(s / "times.npy", 150), "times.npy has 150 bytes"),
    "a missing file": (lambda s: (s / "offsets.npy").unlink(), "offsets.npy is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_refused_with_the_command_that_mends_it(path: Path, damage: str) -> None:
    break_it, message = DAMAGE[damage]
    break_it(path)

    with pytest.raises(InputError, match=message) as error:
        InteractionStore.open(path)
    assert "turbogr prepare" in str(error.value)


def test_a_changed_byte_passes_only_when_verification_is_turned_off(path: Path) -> None:
    flip_last_byte(path / "times.npy")

    InteractionStore.open(path, verify=False)


def test_a_missing_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is not a prepared store"):
        InteractionStore.open(tmp_path / "nowhere")


def test_a_store_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path: Path, path: Path) -> None:
    (tmp_path / "store.txt").write_text("".join(f"1 {item}\n" for item in range(9)))

    prepare(
        PrepareConfig(format="text", inputs=[str(tmp_path / "store.txt")], user_core=1, item_core=1, threads=1), path
    )

    assert InteractionStore.open(path).num_items == 9
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["store", "store.txt"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_output_that_is_no_store_is_not_touched(tmp_path: Path, what: str) -> None:
    output = tmp_path / "thesis"
    if what == "folder":
        output.mkdir()
        (output / "chapter1").write_text("words")
    else:
        output.write_text("words")

    with pytest.raises(InputError, match="exists and is not a prepared store"), replace_on_success(output):
        raise AssertionError("the block must not run")
    assert (output / "chapter1" if what == "folder" else output).read_text() == "words"


def test_an_output_in_no_folder_is_one_error_that_names_it_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    for output, reason in (
        ("/proc/x", r"No such file or directory: /proc/x\.tmp-\d+"),
        ("/proc/x/y", "No such file or directory: /proc/x"),
        (f"{tmp_path}/file/out", f"{tmp_path}/file is not a folder"),
        (f"{tmp_path}/file/deeper/out", f"{tmp_path}/file is not a folder"),
        (f"{tmp_path}/{'x' * 300}", "File name too long"),
    ):
        expected = pytest.raises(InputError, match=f"{output} cannot be made: {reason}")
        with expected as error, replace_on_success(Path(output)):
            raise AssertionError("the block must not run")
        assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "words"


def test_an_output_where_the_user_may_not_write_is_one_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", denied)  # the superuser may write everywhere
    expected = pytest.raises(InputError, match=f"{path} cannot be made: Permission denied: {path.parent}")
    with expected, replace_on_success(path):
        raise AssertionError("the block must not run")


def test_a_failure_leaves_the_old_store_and_no_new_folder(tmp_path: Path, path: Path) -> None:
    before = (path / "manifest.json").read_bytes()

    def interrupted() -> None:
        with replace_on_success(path) as work:
            (work / "item_ids.npy").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert (path / "manifest.json").read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["store", "store.txt"]


def test_what_a_killed_run_left_is_removed_by_the_next_one_and_a_living_one_is_spared(
    tmp_path: Path, path: Path
) -> None:
    # Slow to lock, so that one child meets what the other has made and not yet locked.
    script = (
        "import fcntl, os, sys, time\nfrom pathlib import Path\n"
        "from turbogr_plugin.data.store import replace_on_success\nflock = fcntl.flock\n"
        "def slow(file, how):\n    time.sleep(0.5 * (how == fcntl.LOCK_EX))\n    flock(file, how)\nfcntl.flock = slow\n"
        "with replace_on_success(Path(sys.argv[1])) as work:\n"
        "    (work / 'item_ids.npy').write_bytes(b'half')\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        children[0].send_signal(signal.SIGKILL)
        children[0].wait(timeout=30)
        assert InteractionStore.open(path).num_interactions == 12
        assert (tmp_path / f"store.tmp-{children[0].pid}").exists()

        make_store(tmp_path, items=5)

        assert InteractionStore.open(path).num_interactions == 15
        assert not (tmp_path / f"store.tmp-{children[0].pid}").exists()
        assert (tmp_path / f"store.tmp-{children[1].pid}").exists()
    finally:
        for child in children:
            child.kill()
            child.wait(timeout=30)
            assert child.stdout is not None
            child.stdout.close()


def test_a_replacement_cut_off_between_its_renames_is_explained(tmp_path: Path, path: Path) -> None:
    path.rename(tmp_path / "store.old-123")

    with pytest.raises(InputError, match=r"mv .*store\.old-123 .*store"):
        InteractionStore.open(path)


def test_an_array_is_written_as_numpy_would_in_chunks(tmp_path: Path) -> None:
    values = np.array([2**63 - 1, -(2**63), 0, 9007199254740993, 5])
    with NpyWriter(tmp_path / "a.npy", length=5) as writer:
        writer.append(values[:2])
        writer.append(values[2:2])
        writer.append(values[2:])
        entry = writer.close()
    np.save(tmp_path / "b.npy", values)

    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    assert entry["bytes"] == (tmp_path / "a.npy").stat().st_size


@pytest.mark.parametrize("array", ["item_ids.npy", "times.npy", "users.npy"])
def test_a_full_disk_is_one_clear_error_and_leaves_the_old_store(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, array: str
) -> None:
    before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    append = NpyWriter.append

    def fail(self: NpyWriter, chunk: np.ndarray) -> None:
        if self._path.name == array:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        append(self, chunk)

    monkeypatch.setattr(NpyWriter, "append", fail)
    with pytest.raises(InputError, match=r"No space left on device.*is as it was"):
        make_store(tmp_path)

    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["store", "store.txt"]


def test_a_refused_write_of_the_engine_is_one_clear_error(tmp_path: Path, path: Path) -> None:
    """The operating system refuses writes beyond a file size, as a full disk does: here already in the engine's."""
    script = (
        "import resource, sys\nfrom turbogr_plugin.data.config import PrepareConfig\n"
        "from turbogr_plugin.data.prepare import prepare\n"
        "from turbogr_plugin.errors import InputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
        "try:\n    prepare(PrepareConfig(format='text', inputs=[sys.argv[1]], user_core=1, item_core=1), sys.argv[2])\n"
        "except InputError as error:\n    print(error)\n    sys.exit(2)\n"
    )
    rng = np.random.default_rng(0)
    pairs = zip(rng.integers(0, 20_000, 100_000).tolist(), rng.integers(0, 2**62, 100_000).tolist(), strict=True)
    (tmp_path / "log.txt").write_text("".join(f"{user} {item}\n" for user, item in pairs))

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log.txt"), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 2, done.stderr
    assert "is full (" in done.stdout and len(done.stdout.splitlines()) == 1
    assert InteractionStore.open(path).num_interactions == 12
    assert not list(tmp_path.glob("store.tmp-*"))
