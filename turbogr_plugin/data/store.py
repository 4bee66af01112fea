"""The interaction store: the one on-disk form of a prepared data set, memory-mapped and shared by all ranks.

A folder of five one-dimensional int64 `.npy` arrays and a manifest:

    item_ids.npy   [T]    dense item index of every interaction, user after user, in time order within a user
    times.npy      [T]    its time, in the unit of the source (`time_unit` of the manifest; all 0 where it is "none")
    offsets.npy    [U+1]  interactions of dense user u are item_ids[offsets[u]:offsets[u + 1]]
    users.npy      [U]    raw user ids, ascending: the dense user index is the position here
    items.npy      [I]    raw item ids, ascending: the dense item index is the position here
    manifest.json         format and version, counts, time unit, sha256 and bytes per file, config and report

A store is written aside (`<output>.tmp-<pid>`) and renamed into place when it is complete, so a reader sees the old
store or the new one, never a half. Replacing an existing folder takes two renames (the old one steps aside as
`<output>.old-<pid>` first); a kill exactly between them leaves the old store under that name, and `open` says so.

Left out: splits (train, validation and test are views of the sequences) and item or user features.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, cast

import numpy as np

from turbogr_plugin.errors import InputError

FORMAT = "turbogr-store"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
ARRAYS = ("item_ids", "times", "offsets", "users", "items")
TimeUnit = Literal["s", "ms", "none"]

_HASH_BLOCK = 1 << 22
_LOCK = "lock"


class NpyWriter:
    """Writes a one-dimensional `.npy` file chunk by chunk, in memory of one chunk, and hashes it on the way.

    Args:
        path: file to create.
        length: number of elements; `close` asserts that exactly so many were appended.
        dtype: element type of the file; chunks are cast to it (same kind only).
    """

    def __init__(self, path: Path, *, length: int, dtype: str = "<i8") -> None:
        self._path = path
        self._length = length
        self._dtype = np.dtype(dtype)
        self._written = 0
        self._hash = hashlib.sha256()
        self._bytes = 0
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (length,)}
        )
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed in close)
        self._write(memoryview(header.getvalue()))

    def _write(self, data: memoryview) -> None:
        self._hash.update(data)
        self._bytes += data.nbytes
        while data.nbytes:  # an unbuffered write may be short: on a nearly full disk the next one then raises ENOSPC
            data = data[self._file.write(data) :]

    def append(self, chunk: np.ndarray) -> None:
        """Append `chunk` ([n], an integer type)."""
        chunk = np.ascontiguousarray(chunk.astype(self._dtype, casting="same_kind", copy=False))
        if chunk.size:
            self._write(chunk.data.cast("B"))
            self._written += chunk.size

    def close(self) -> dict[str, Any]:
        """Flush to disk and return the manifest entry of the file: its sha256 and bytes."""
        assert self._written == self._length, f"{self._path}: {self._written} elements of {self._length} written"
        os.fsync(self._file.fileno())
        self._file.close()
        return {"sha256": self._hash.hexdigest(), "bytes": self._bytes}

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def write_array(path: Path, values: np.ndarray) -> dict[str, Any]:
    """Write `values` ([n]) as int64 to `path`; returns the manifest entry."""
    with NpyWriter(path, length=len(values)) as writer:
        writer.append(values)
        return writer.close()


def write_manifest(
    folder: Path,
    *,
    files: dict[str, dict[str, Any]],
    num_users: int,
    num_items: int,
    num_interactions: int,
    time_unit: TimeUnit,
    config: dict[str, Any],
    report: dict[str, Any],
) -> None:
    """Complete the store in `folder`: the manifest is written last, so a folder without one is no store."""
    assert set(files) == {f"{name}.npy" for name in ARRAYS}, sorted(files)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "num_users": num_users,
        "num_items": num_items,
        "num_interactions": num_interactions,
        "time_unit": time_unit,
        "files": files,
        "config": config,
        "report": report,
    }
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def is_store(path: Path) -> bool:
    """Whether `path` is a folder whose manifest says that it is a store (of any version, complete or not)."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


@contextmanager
def refused_folder(folder: Path) -> Iterator[None]:
    """Turn an error of the system while `folder` is looked at or made into an InputError that names it and the reason.

    Raises:
        InputError: instead of any OSError of the block.
    """
    try:
        yield
    except OSError as error:
        there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
        reason = f"{error.strerror}: {error.filename}"
        if os.path.lexists(there) and not os.path.isdir(there):
            reason = f"{there} is not a folder"
        raise InputError(f"the folder {folder} cannot be made: {reason}. Name another output.") from error


@contextmanager
def replace_on_success(output: Path) -> Iterator[Path]:
    """Yield an empty folder beside `output` that takes its place when the block ends, and is removed when it raises.

    Files that the block leaves in the folder are the result, all of them: it removes its own temporary files.
    Folders that a killed run left behind are removed first; a run that is still alive holds a lock in its own.

    Raises:
        InputError: `output` is there and is neither a store nor an empty folder, or no folder can be made beside it.
    """
    output = Path(os.path.abspath(output))
    work = output.with_name(f"{output.name}.tmp-{os.getpid()}")
    with refused_folder(output):
        if output.exists() and not is_store(output) and not (output.is_dir() and not any(output.iterdir())):
            raise InputError(
                f"{output} exists and is not a prepared store: nothing was touched. Name another output, or remove it."
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _make_locked(work, output)
    try:
        with lock:
            yield work
            (work / _LOCK).unlink()
            _replace(work, output)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _make_locked(work: Path, output: Path) -> BinaryIO:
    """Makes the folder of a run, after removing those of killed runs, and returns its lock, held.

    One run at a time does so: another one would take a folder that is there but not yet locked for a killed run's.
    """
    parent = os.open(output.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        _remove_leftovers(output)
        work.mkdir()
        lock = open(work / _LOCK, "wb")  # noqa: SIM115 the caller closes it
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent)
    return lock


def _replace(work: Path, output: Path) -> None:
    old = output.with_name(f"{output.name}.old-{os.getpid()}")
    if output.exists():
        os.rename(output, old)
    try:
        os.rename(work, output)
    except OSError:
        if old.exists():
            os.rename(old, output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(output: Path) -> None:
    if output.exists():
        for old in output.parent.glob(f"{glob.escape(output.name)}.old-*"):
            shutil.rmtree(old, ignore_errors=True)
    for work in output.parent.glob(f"{glob.escape(output.name)}.tmp-*"):
        try:
            with open(work / _LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(work, ignore_errors=True)
        except OSError:  # locked by a run that is alive, or not one of ours
            continue


@dataclass(frozen=True)
class InteractionStore:
    """A prepared data set, opened read-only; the arrays are memory maps, so ranks of a host share the pages."""

    path: Path
    manifest: dict[str, Any]
    item_ids: np.ndarray
    times: np.ndarray
    offsets: np.ndarray
    raw_user_ids: np.ndarray
    raw_item_ids: np.ndarray

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> InteractionStore:
        """Open the store at `path`.

        Args:
            path: the folder that `turbogr prepare` wrote.
            verify: compare every file's sha256 with the manifest (reads all bytes once; sizes are always compared).

        Raises:
            InputError: no store there, another format version, a missing file, a wrong size or checksum.
        """
        folder = Path(path)
        manifest = _read_manifest(folder)
        lengths = {
            "item_ids": manifest["num_interactions"],
            "times": manifest["num_interactions"],
            "offsets": manifest["num_users"] + 1,
            "users": manifest["num_users"],
            "items": manifest["num_items"],
        }
        arrays = {name: _open_array(folder, manifest, name, length, verify) for name, length in lengths.items()}
        return cls(
            path=folder,
            manifest=manifest,
            item_ids=arrays["item_ids"],
            times=arrays["times"],
            offsets=arrays["offsets"],
            raw_user_ids=arrays["users"],
            raw_item_ids=arrays["items"],
        )

    @property
    def num_users(self) -> int:
        """Users, U."""
        return len(self.raw_user_ids)

    @property
    def num_items(self) -> int:
        """Items, I."""
        return len(self.raw_item_ids)

    @property
    def num_interactions(self) -> int:
        """Interactions of all users, T."""
        return len(self.item_ids)

    @property
    def time_unit(self) -> TimeUnit:
        """Unit of `times`; "none" where the source has no times and they are all 0."""
        return cast(TimeUnit, self.manifest["time_unit"])

    def user_indices(self, raw_ids: np.ndarray | list[int]) -> np.ndarray:
        """Dense user indices (int64 [n]) of raw user ids ([n]).

        Raises:
            InputError: names the ids that are not in the store.
        """
        wanted = np.asarray(raw_ids, dtype=np.int64)
        found = np.searchsorted(self.raw_user_ids, wanted)
        known = (found < self.num_users) & (
            self.raw_user_ids[np.minimum(found, self.num_users - 1)] == wanted
            if self.num_users
            else np.zeros(wanted.shape, dtype=bool)
        )
        if not known.all():
            unknown = wanted[~known].tolist()
            shown = ", ".join(str(raw) for raw in unknown[:10]) + (", ..." if len(unknown) > 10 else "")
            raise InputError(
                f"{self.path} has no user {shown} ({len(unknown)} unknown of {len(wanted)} asked): users with too few "
                f"interactions are dropped by `turbogr prepare`. The {self.num_users} users that are there are in "
                f"users.npy."
            )
        return found.astype(np.int64)

    def sequence(self, user_index: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of one user's item indices and times (int64 [n] each), oldest first."""
        begin, end = int(self.offsets[user_index]), int(self.offsets[user_index + 1])
        return self.item_ids[begin:end], self.times[begin:end]


def _mend(folder: Path) -> str:
    return f"Make it again: `turbogr prepare ... --output {folder}`."


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        stranded = sorted(folder.absolute().parent.glob(f"{glob.escape(folder.name)}.old-*"))
        if stranded:
            raise InputError(
                f"{folder} is missing, but {stranded[-1]} is there: a replacement was cut off between its two renames. "
                f"Rename it back: `mv {stranded[-1]} {folder}`."
            ) from None
        raise InputError(f"{folder} is not a prepared store: {path} does not exist. {_mend(folder)}") from None
    except ValueError as error:
        raise InputError(f"{path} is not readable JSON ({error}). {_mend(folder)}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f'{path} does not describe a store (no "format": "{FORMAT}"). {_mend(folder)}')
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{folder} is a store of format version {manifest.get('format_version')}, this program reads version "
            f"{FORMAT_VERSION}. {_mend(folder)}"
        )
    missing = {"num_users", "num_items", "num_interactions", "time_unit", "files"} - set(manifest)
    if missing:
        raise InputError(f"{path} lacks the keys {', '.join(sorted(missing))}. {_mend(folder)}")
    return manifest


def _open_array(folder: Path, manifest: dict[str, Any], name: str, length: int, verify: bool) -> np.ndarray:
    path = folder / f"{name}.npy"
    recorded = manifest["files"].get(path.name, {})
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{path} is missing. {_mend(folder)}") from None
    if size != recorded.get("bytes"):
        raise InputError(
            f"{path} has {size} bytes, its manifest says {recorded.get('bytes')}: it is cut off or was changed. "
            f"{_mend(folder)}"
        )
    if verify and _sha256(path) != recorded.get("sha256"):
        raise InputError(f"{path} does not have the sha256 of its manifest: it was changed. {_mend(folder)}")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False) if length else np.load(path, allow_pickle=False)
    except ValueError as error:
        raise InputError(f"{path} is not a .npy file ({error}). {_mend(folder)}") from None
    if array.dtype != np.dtype("<i8") or array.shape != (length,):
        raise InputError(
            f"{path} holds {array.dtype} {list(array.shape)}, the manifest asks for int64 [{length}]. {_mend(folder)}"
        )
    return array


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
