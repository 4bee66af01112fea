"""Checkpoints of a distributed run: complete or not there, on any number of ranks, without pickle.

A checkpoint holds the state dicts of model and optimizers (tensors, ShardedTensors, DTensors, numbers), tensors that
belong to one rank (random generators), and a JSON object of the caller (loader position, best metric).
torch.distributed.checkpoint (DCP) plans who writes what and reshards on reading; `safetensors_storage` stores it.

    directory/step-00000123/          complete: index.json, extra.json, rank-00000.safetensors, ...
    directory/best/                   a named one, replaced by the next of its name
    directory/.step-00000123.tmp/     being written; becomes complete by one rename, after every file is on the disk
    directory/.best.old/              the former one, for the moment between the two renames of a replacement
    directory/.step-00000100.trash/   being deleted

So a kill at any moment leaves the last complete one. What a killed save left is removed by the next. An error on one
rank (a full disk) is raised on all of them with the same text.

Left out: asynchronous saving, remote storage, checksums, two runs that write into one folder at the same time. The
generators of `random` and `numpy` are not kept: nothing here draws from them. A rank that dies, unlike one that fails,
ends the others only through the error or timeout of their process group.
"""

from __future__ import annotations

import contextlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turbogr_plugin.errors import InputError
from turbogr_plugin.training.checkpoint_folders import HELPER_NAME, discard, publish, remove_leftovers, step_folders
from turbogr_plugin.training.checkpoint_state import (
    PER_RANK,
    Leaf,
    differences_of,
    initialize_optimizer_state,
    of_parts,
    rng_state,
    set_rng_state,
    split_state,
    type_and_shape,
)
from turbogr_plugin.training.safetensors_storage import (
    DTYPE_NAMES,
    FORMAT_VERSION,
    DamagedStorageError,
    SafetensorsReader,
    SafetensorsWriter,
    read_index,
    read_json,
    write_json,
)

__all__ = [
    "Checkpoint",
    "find_checkpoint",
    "initialize_optimizer_state",
    "latest_checkpoint",
    "load_checkpoint",
    "rng_state",
    "save_checkpoint",
    "set_rng_state",
]

_EXTRA_FILE = "extra.json"

_SAVE_ADVICE = "Earlier checkpoints are untouched: mend this and resume from the last one."
_LOAD_ADVICE = "Delete this checkpoint to go on from the one before it."

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    """Its folder."""
    step: int
    """Training steps done when it was written."""
    world_size: int
    """Number of ranks that wrote it."""
    extra: dict[str, Any]
    """The JSON object that the caller gave."""


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    state: dict[str, Any],
    extra: dict[str, Any],
    per_rank: dict[str, torch.Tensor] | None = None,
    keep: int = 2,
    name: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint. A collective: every rank of the group calls it with the same arguments but for its shards.

    Args:
        directory: Folder of the run's checkpoints, on a file system that all ranks share; made if missing.
        step: Training steps done. A step that is there already is replaced.
        state: Nested dicts and lists of tensors and of JSON values (numbers, strings, ...; the first rank's are kept).
            Its top-level keys are the parts that `load_checkpoint` can load alone, for example "model".
        extra: JSON object of the caller; the first rank's is kept.
        per_rank: Tensors of this rank alone, with the same keys on every rank; see `rng_state`.
        keep: How many checkpoints `step-*` to keep, the newest; at least 1.
        name: Write `directory/name` instead of `directory/step-*`, for example "best"; `keep` does not apply to it.
        process_group: Ranks that take part; default all. One for the CPU (gloo) saves copies of messages to the device.

    Returns:
        The folder of the complete checkpoint.

    Raises:
        InputError: It could not be written (disk full, no permission), or the folder holds later steps of another run.
            Nothing that was there is lost.
        TypeError: A value of `state` is neither a tensor nor JSON.
    """
    directory = Path(directory)
    folder = f"step-{step:08d}" if name is None else name
    writing = directory / f".{folder}.tmp"
    first = _rank(process_group) == 0
    attempt = _Attempt(f"{directory}: the checkpoint of step {step} was not written", _SAVE_ADVICE, process_group)

    def prepare() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must be kept")
        if not HELPER_NAME.fullmatch(writing.name) or (name is not None and name.startswith("step-")):
            raise ValueError(f"name is {name!r}; allowed are letters, digits, _ and -, not beginning with 'step-'")
        tensors, values = split_state(state, per_rank, _rank(process_group))
        for key, tensor in tensors.items():
            dtype, _ = type_and_shape(tensor)
            if dtype is not None and dtype not in DTYPE_NAMES:
                raise TypeError(f"{key} has element type {dtype}; allowed are {sorted(map(str, DTYPE_NAMES))}")
        json.dumps(extra)
        if first:
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
            later = [old for number, old in step_folders(directory) if number > step]
            if later and name is None:
                raise InputError(f"it holds later ones ({', '.join(later)}): resume from them or use another folder")
            writing.mkdir()
        return tensors, {path: leaf.value for path, leaf in values.items()}

    tensors, values = attempt.on_all_ranks(prepare)

    def finish() -> None:
        if first:
            about = {"step": step, "world_size": _world_size(process_group), "extra": extra, "values": values}
            write_json(writing / _EXTRA_FILE, {"format_version": FORMAT_VERSION, **about})
            publish(directory, folder)
            if name is None:
                for _, old in step_folders(directory)[:-keep]:
                    discard(directory, old)

    try:
        with attempt.dcp_call():
            save(
                tensors,
                storage_writer=SafetensorsWriter(writing),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
        attempt.on_all_ranks(finish)
    except BaseException:
        if first:
            # Gives the space of a full disk back at once, and takes back a replacement that went half way.
            with contextlib.suppress(OSError):
                remove_leftovers(directory)
        raise
    return directory / folder


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """The complete checkpoint of the most steps, or None where there is none (or no folder).

    Raises:
        InputError: Its description cannot be read.
    """
    found = step_folders(Path(directory))
    return find_checkpoint(directory, found[-1][1]) if found else None


def find_checkpoint(directory: Path, name: str) -> Checkpoint | None:
    """The complete checkpoint of that folder name, for example "best", or None.

    Raises:
        InputError: Its description cannot be read.
    """
    # The name again at the end: a replacement may go from "former aside" to "new in place" between the looks.
    for candidate in (name, f".{name}.old", name):
        path = Path(directory) / candidate
        if path.is_dir():
            about = _read_about(path)
            return Checkpoint(path, about["step"], about["world_size"], about["extra"])
    return None


def load_checkpoint(
    checkpoint: Checkpoint,
    state: dict[str, Any],
    *,
    per_rank: dict[str, torch.Tensor] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into `state`, in place. A collective like `save_checkpoint`, on any number of ranks.

    Tensors are filled where they are, numbers are set in their dict or list; call `load_state_dict` of model and
    optimizer with the result. An optimizer that has not stepped yet has no state to load into: call
    `initialize_optimizer_state` before its `state_dict`.

    Args:
        checkpoint: What `latest_checkpoint` or `find_checkpoint` found; the same on every rank.
        state: As given to `save_checkpoint`, of a model of the same sizes. Parts of the checkpoint (top-level keys)
            that are not asked for are left out.
        per_rank: As given to `save_checkpoint`. Filled if the number of ranks is that of the checkpoint; on another
            number it stays as it is, because there is no rank to continue.
        process_group: Ranks that take part; default all.

    Returns:
        The caller's JSON object.

    Raises:
        InputError: The checkpoint is of another model (the message names what differs), damaged, or unreadable.
    """
    attempt = _Attempt(f"{checkpoint.path}: the checkpoint cannot be loaded", _LOAD_ADVICE, process_group)
    rank, world_size = _rank(process_group), _world_size(process_group)
    if world_size != checkpoint.world_size:
        per_rank = None

    def read() -> tuple[Any, dict[str, Any], dict[str, torch.Tensor], dict[str, Leaf]]:
        metadata, about = read_index(checkpoint.path), _read_about(checkpoint.path)
        return (metadata, about, *split_state(state, per_rank, rank))

    metadata, about, tensors, values = attempt.on_all_ranks(read)

    # A rank that holds no shard of a table may not know its type, and per-rank keys differ: compare what all expect.
    expected: dict[str, tuple[torch.dtype | None, tuple[int, ...]]] = {}
    for of_rank in _gather({key: type_and_shape(tensor) for key, tensor in tensors.items()}, process_group):
        for key, (dtype, shape) in of_rank.items():
            expected[key] = (expected.get(key, (None, shape))[0] or dtype, shape)
    parts = {str(part) for part in state} | ({PER_RANK} if per_rank is not None else set())
    found = {key: (entry.properties.dtype, tuple(entry.size)) for key, entry in metadata.state_dict_metadata.items()}
    differences = [
        *differences_of(of_parts(found, parts), expected),
        *differences_of(of_parts(dict.fromkeys(about["values"]), parts), dict.fromkeys(values)),
    ]
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise InputError(
            f"{checkpoint.path} is a checkpoint of another model: {shown}. Use the configuration it was trained with, "
            "or train anew in another folder."
        )

    with attempt.dcp_call():
        load(
            tensors,
            storage_reader=SafetensorsReader(checkpoint.path, metadata),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
    for key, leaf in values.items():
        value = about["values"][key]
        leaf.container[leaf.key] = tuple(value) if isinstance(leaf.value, tuple) else value
    extra: dict[str, Any] = about["extra"]
    return extra


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = read_json(path / _EXTRA_FILE)
    except DamagedStorageError as error:
        raise InputError(f"{error}. {_LOAD_ADVICE}") from error
    if not about.keys() >= {"step", "world_size", "extra", "values"}:
        raise InputError(f"{path / _EXTRA_FILE} does not describe a checkpoint. {_LOAD_ADVICE}")
    return about


# --- ranks ------------------------------------------------------------------------------------------------------------


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """`value` of every rank, by rank."""
    values: list[T] = [value] * _world_size(group)
    if dist.is_initialized():
        dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class _Failure:
    """What a rank tells the others of its error: a text, because not every exception survives the way."""

    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            return cls(InputError, f"{error.strerror or error}{where}")
        if isinstance(error, (InputError, DamagedStorageError)):
            return cls(InputError, str(error).rstrip("."))
        for kind in (TypeError, ValueError):
            if type(error) is kind:
                return cls(kind, str(error))
        return cls(RuntimeError, "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class _Attempt:
    """What is attempted, for the errors that all ranks raise when one of them fails."""

    failing: str
    advice: str
    group: dist.ProcessGroup | None

    def on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run `action`, which must not communicate, on every rank; raise on all if it failed on any."""
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        failures = _gather(None if error is None else _Failure.of(error), self.group)
        self._raise({rank: failure for rank, failure in enumerate(failures) if failure is not None}, error)
        return result

    @contextlib.contextmanager
    def dcp_call(self) -> Iterator[None]:
        """Turn DCP's report of failed ranks, which every rank gets, into our errors."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
            try:
                yield
            except CheckpointException as report:
                failures = {rank: _Failure.of(error) for rank, (error, _) in report.failures.items()}
                self._raise(failures, report)

    def _raise(self, failures: dict[int, _Failure], cause: BaseException | None) -> None:
        if not failures:
            return
        texts = {rank: failure.text for rank, failure in failures.items()}
        alike = len(set(texts.values())) == 1 and len(texts) == _world_size(self.group)
        said = texts[0] if alike else "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        kind = next((f.kind for f in failures.values() if f.kind is not InputError), InputError)
        raise kind(f"{self.failing}: {said}. {self.advice if kind is InputError else ''}".rstrip()) from cause
