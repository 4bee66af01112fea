"""What one process of a dry run has done, as it is written to disk for the process that prints the report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "TURBOGR_DRYRUN"
"""Environment variable with the folder of the settings and records (also named in bootstrap/sitecustomize.py)."""
SETTINGS = "settings.json"


@dataclass(frozen=True)
class Place:
    """A line of Python: who has written it, and where."""

    owner: str
    """"script" (and what it imports from outside of the installed packages), or the package: "torchrec"."""
    path: str
    line: int


@dataclass(frozen=True)
class Use:
    """An operator, or another call, at one place."""

    name: str
    place: Place | None
    """The innermost line that belongs to neither torch nor Python; None where there is none."""
    script: Place | None
    """The innermost line of the script; None where it was not in the call, as in a backward pass."""
    count: int
    detail: str = ""
    other: Place | None = None
    """A second place: of a race, where the earlier use is."""


@dataclass
class ProcessRecord:
    """One process."""

    pid: int
    name: str = "script"
    rank: int | None = None
    operators: dict[str, int] = field(default_factory=dict)
    """Calls by operator on npu."""
    missing: list[Use] = field(default_factory=list)
    """Operators without any kernel: the call has raised."""
    fallbacks: list[Use] = field(default_factory=list)
    lacking_dtypes: list[Use] = field(default_factory=list)
    host_syncs: list[Use] = field(default_factory=list)
    races: list[Use] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """By device, "npu:0"."""
    modules: list[str] = field(default_factory=list)
    """Source files that do not belong to installed packages or to Python."""
    cuda_reached: list[Use] = field(default_factory=list)
    """Uses of torch.cuda by the script."""
    failures: list[Use] = field(default_factory=list)
    """Exceptions that ended the process; `name` is the type, `detail` the message."""
    torch_npu_imports: list[Place] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Replaces what this process has written before."""
        target = folder / f"process-{self.pid}.json"
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, target)


def read_all(folder: Path) -> list[ProcessRecord]:
    """The records of all processes that have written one, ranks first."""
    records = [_record(json.loads(path.read_text())) for path in folder.glob("process-*.json")]
    return sorted(records, key=lambda record: (record.rank is None, record.rank or 0, record.pid))


def _record(values: dict[str, Any]) -> ProcessRecord:
    for name in ("missing", "fallbacks", "lacking_dtypes", "host_syncs", "races", "cuda_reached", "failures"):
        values[name] = [
            Use(**{**use, **{key: _place(use[key]) for key in ("place", "script", "other")}}) for use in values[name]
        ]
    values["torch_npu_imports"] = [Place(**place) for place in values["torch_npu_imports"]]
    return ProcessRecord(**values)


def _place(values: dict[str, Any] | None) -> Place | None:
    return None if values is None else Place(**values)
