"""Storage of torch.distributed.checkpoint (DCP) without pickle: one safetensors file per rank and an index in JSON.

Why not DCP's own. `FileSystemReader` loads its index with `pickle.load` and values that are not tensors with
`torch.load(weights_only=False)`: a checkpoint from elsewhere could run code. `HuggingFaceStorageWriter` (torch 2.13)
names a tensor in the file by its state-dict key alone, so of a column-sharded table with two pieces on one rank only
the last piece is kept, without a word; it also builds a whole file in memory before writing it.

Here DCP still plans who writes and who reads what (replicas once, any resharding), and these two classes store the
pieces. A piece is named `key[start:stop,...]`, as one would slice it out of the whole tensor, and any safetensors
reader opens the files. `index.json` is written last, by the coordinator, and lists every tensor with its pieces.

Left out: values that are not tensors (the caller keeps them elsewhere), the atomic rename (`checkpoints`), checksums.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

INDEX_FILE = "index.json"
FORMAT_VERSION = 1
# Bytes of a tensor that are brought to the host at once: a table shard of many GB is never copied whole.
_COPY_BYTES = 64 << 20

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that the safetensors format gives to element types; other types cannot be saved."""

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class DamagedStorageError(Exception):
    """The files of a checkpoint are not what its index says: missing, cut short or edited."""


@dataclass(frozen=True)
class _StoredPiece:
    """Where one piece of a tensor lies."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def _piece_name(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """`key[start:stop,...]`; the bare key for a scalar."""
    spans = ",".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))
    return f"{key}[{spans}]" if spans else key


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(json.dumps(content, indent=1).encode())
        _sync(file)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Append the elements of `tensor` (any device) in row-major order."""
    elements = tensor.contiguous().reshape(-1).view(torch.uint8)
    for part in elements.split(_COPY_BYTES):
        file.write(part.cpu().numpy().data)


def _write_file(path: Path, pieces: list[tuple[str, torch.Tensor]]) -> None:
    """Write a safetensors file: 8 bytes with the length of the header, the header in JSON, the elements.

    Wide element types come first, so that every piece starts at a multiple of its element size.
    """
    pieces = sorted(pieces, key=lambda piece: -piece[1].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in pieces:
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype_name = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype_name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in pieces:
            _write_tensor(file, tensor)
        _sync(file)


class SafetensorsWriter(StorageWriter):
    """Writes the tensors of a state dict into an existing, empty folder that all ranks see.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that this rank sees the folder that the first rank made."""
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path.parent} is not on a file system that all ranks share")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the plan of this rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank a file of its own."""
        return [replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the pieces that fall to this rank and wait until they are on the disk."""
        pieces: list[tuple[str, torch.Tensor]] = []
        results: list[WriteResult] = []
        for item in plan.items:
            tensor = _tensor_of(item, planner)
            offsets = item.index.offset or torch.Size([0] * tensor.ndim)
            pieces.append((_piece_name(item.index.fqn, offsets, tensor.shape), tensor))
            stored = _StoredPiece(plan.storage_data, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            results.append(WriteResult(item.index, tensor.numel() * tensor.element_size(), stored))
        # An empty piece (a rank without rows of a small table) would share its offsets with others of its kind.
        pieces = [piece for piece in pieces if piece[1].numel()]
        if pieces:
            _write_file(self.path / plan.storage_data, pieces)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index: every tensor with its pieces, every file with its size."""
        tensors: dict[str, Any] = {}
        files: set[str] = set()
        for result in (result for of_rank in results for result in of_rank):
            key, piece = result.index.fqn, result.storage_data
            whole = metadata.state_dict_metadata[key]
            assert isinstance(whole, TensorStorageMetadata)
            entry = tensors.setdefault(key, {"dtype": piece.dtype, "shape": list(whole.size), "pieces": []})
            if result.size_in_bytes:
                offsets = list(result.index.offset or [0] * len(piece.shape))
                entry["pieces"].append({"offsets": offsets, "sizes": list(piece.shape), "file": piece.file})
                files.add(piece.file)
        sizes = {name: (self.path / name).stat().st_size for name in sorted(files)}
        write_json(self.path / INDEX_FILE, {"format_version": FORMAT_VERSION, "files": sizes, "tensors": tensors})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by the form of a path."""
        return False


def _tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    assert item.type != WriteItemType.BYTE_IO, f"{item.index.fqn} is not a tensor"
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of this format version.

    Raises:
        DamagedStorageError: The file is missing, is no JSON object, or was written in another format version.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedStorageError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version") if isinstance(content, dict) else None
        raise DamagedStorageError(f"{path} has format_version {found}; this version reads {FORMAT_VERSION}")
    return content


def read_index(path: Path) -> Metadata:
    """Read what the checkpoint folder `path` holds, and check that its files are there in full size.

    Returns:
        DCP's description: sizes and types of the tensors; `storage_data` gives file and name of each piece.

    Raises:
        DamagedStorageError: A file is missing, cut short or of another format version.
    """
    index = read_json(path / INDEX_FILE)
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, tuple[str, str]] = {}
    try:
        for name, size in index["files"].items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise DamagedStorageError(f"{path / name} {state}; the index says {size} bytes")
        for key, entry in index["tensors"].items():
            chunks = []
            for piece in entry["pieces"]:
                offsets, sizes = piece["offsets"], piece["sizes"]
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(key, offsets)] = (piece["file"], _piece_name(key, offsets, sizes))
            properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedStorageError(f"{path / INDEX_FILE} is not an index of tensors ({error!r})") from error
    return Metadata(state_dict_metadata=tensors, storage_data=places)


class SafetensorsReader(StorageReader):
    """Reads the pieces that a rank needs into the tensors that it gives.

    Args:
        path: The checkpoint folder.
        metadata: What `read_index(path)` returned.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self.metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index that was read before."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan of this rank."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans: reads need no coordination."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every planned piece into its place; files are mapped, so only what is needed is read."""
        of_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            file, piece = self.metadata.storage_data[item.storage_index]
            of_file[file].append((piece, item))
        for file, items in of_file.items():
            try:
                self._read_file(self.path / file, items, planner)
            except Exception as error:
                # As our own type: ranks exchange their errors, and the library's error type does not travel.
                raise DamagedStorageError(f"{self.path / file}: {error}") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, path: Path, items: list[tuple[str, ReadItem]], planner: LoadPlanner) -> None:
        with safe_open(path, framework="pt") as file:
            for piece, item in items:
                target = planner.resolve_tensor(item).detach()
                if target.ndim == 0:
                    target.copy_(file.get_tensor(piece))
                else:
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    target.copy_(file.get_slice(piece)[tuple(slice(start, start + size) for start, size in spans)])
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by the form of a path."""
        return False
