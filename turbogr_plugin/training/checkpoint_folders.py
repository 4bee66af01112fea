"""Names and renames of checkpoint folders, such that a kill between any two steps leaves the last complete one.

A folder is complete if it has its own name (`step-00000123`, `best`), or that name as `.best.old` while no folder has
it. The other hidden names are `.best.tmp` (being written) and `.best.trash` (being deleted). Every change is one
rename. One process calls what changes folders; any may call `step_folders`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_STEP_NAME = re.compile(r"step-(\d{8,})")
HELPER_NAME = re.compile(r"\.(step-\d{8,}|[A-Za-z][\w-]*)\.(tmp|old|trash)")
"""A hidden folder of ours: the name it stands for, and its state."""


def step_folders(directory: Path) -> list[tuple[int, str]]:
    """Steps and names of the complete checkpoints `step-*`, oldest first."""
    found = set()
    for entry in directory.iterdir() if directory.is_dir() else ():
        helper = HELPER_NAME.fullmatch(entry.name)
        name = helper[1] if helper and helper[2] == "old" else entry.name
        if match := _STEP_NAME.fullmatch(name):
            found.add((int(match[1]), name))
    return sorted(found)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(directory: Path, name: str) -> None:
    """Give the written folder its name, in place of a former one of that name."""
    writing, final, former = (directory / entry for entry in (f".{name}.tmp", name, f".{name}.old"))
    _sync_folder(writing)
    if final.exists():
        os.rename(final, former)
    os.rename(writing, final)
    _sync_folder(directory)
    if former.exists():
        discard(directory, former.name)


def discard(directory: Path, entry: str) -> None:
    """Delete a folder; it loses its name first, so that half of it never looks complete."""
    helper = HELPER_NAME.fullmatch(entry)
    trash = directory / f".{helper[1] if helper else entry}.trash"
    if trash.name != entry:
        if trash.exists():
            shutil.rmtree(trash)
        os.rename(directory / entry, trash)
    shutil.rmtree(trash)


def remove_leftovers(directory: Path) -> None:
    """Delete what a killed or failed save left; a former checkpoint that has no successor gets its name back."""
    for entry in sorted(directory.iterdir(), reverse=True):  # of one name the trash first: the others pass through it
        helper = HELPER_NAME.fullmatch(entry.name)
        if helper and helper[2] == "old" and not (directory / helper[1]).exists():
            os.rename(entry, directory / helper[1])
        elif helper:
            discard(directory, entry.name)
