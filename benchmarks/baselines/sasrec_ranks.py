"""RecBole's SASRec on MovieLens-100K as ranks: exported to RecBole, scored there, ranked by this project's evaluator.

    store --export_inter--> ml-100k.inter --recbole_sasrec.py (own environment)--> scores.npy, record.json
          --ranks_from_scores (training/ranking.py)--> sasrec_ml100k_ranks.json

The file of ranks is what is kept: one filtered and one unfiltered rank per test user, in ascending order of raw user
id, and the record of the run that made them (configuration, checksum of the exported data, versions, machine). Metrics
are never stored; they follow from the ranks. How RecBole is trained is described in `recbole_sasrec.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.prepare import prepare
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.ranking import target_ranks

FOLDER = Path(__file__).resolve().parent
RANKS_FILE = FOLDER / "sasrec_ml100k_ranks.json"
SCRIPT = FOLDER / "recbole_sasrec.py"
REQUIREMENTS = FOLDER / "requirements-recbole.txt"
RECBOLE = "recbole==1.2.1"

FORMAT_VERSION = 1

# Halves the processor time of an epoch (9.1 s to 4.4 s a batch on two busy cores) and leaves every loss the same to the
# bit: waiting threads sleep, and freed memory is kept where large temporaries would be mapped and cleared every time.
PROCESS_SETTINGS = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(10**11),
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": str(2**28),
}

_REMAKE = "restore it, or make it with `python -m benchmarks.quality --rebuild-baseline`"

RECORD_KEYS = frozenset(
    {
        "model",
        "config",
        "changed_from_defaults",
        "data_sha256",
        "samples",
        "parameters",
        "versions",
        "machine",
        "epochs_run",
        "best_epoch",
        "best_valid_ndcg@10",
        "valid_ndcg@10_per_epoch",
        "train_loss_per_epoch",
        "seconds",
        "complete",
        "scores_sha256",
        "users_sha256",
        "items_sha256",
    }
)


@dataclass(frozen=True, kw_only=True)
class SasrecRanks:
    """The recorded baseline."""

    users: np.ndarray
    """[U] int64, raw user ids, ascending."""
    filtered: np.ndarray
    """[U] int64, 1-based rank of the test item among the items that the user has not seen."""
    unfiltered: np.ndarray
    """[U] int64, 1-based rank among all items."""
    record: dict[str, Any]
    """How the scores came about; the keys are at least `RECORD_KEYS`."""

    @classmethod
    def read(cls, path: Path = RANKS_FILE) -> SasrecRanks:
        """Reads and checks a file of ranks.

        Raises:
            InputError: the file is missing, of another version, incomplete, or its arrays do not fit together.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path} is missing: {_REMAKE}") from None
        except ValueError as error:
            raise InputError(f"{path} is not JSON ({error}): {_REMAKE}") from None
        if content.get("format_version") != FORMAT_VERSION:
            raise InputError(
                f"{path} has format version {content.get('format_version')}, not {FORMAT_VERSION}: {_REMAKE}"
            )
        users, filtered, unfiltered = (
            np.asarray(content[name], dtype=np.int64) for name in ("users", "filtered", "unfiltered")
        )
        if not users.size or not users.shape == filtered.shape == unfiltered.shape or (np.diff(users) <= 0).any():
            raise InputError(f"{path}: users must ascend and have one filtered and one unfiltered rank each")
        if (filtered < 1).any() or (filtered > unfiltered).any():
            raise InputError(f"{path}: ranks count from 1, and filtering never makes a rank worse")
        missing = RECORD_KEYS - set(content["record"])
        if missing:
            raise InputError(f"{path}: the record lacks {', '.join(sorted(missing))}")
        return cls(users=users, filtered=filtered, unfiltered=unfiltered, record=content["record"])

    def write(self, path: Path = RANKS_FILE) -> None:
        """Writes the file of ranks aside and renames it into place."""
        arrays = {"users": self.users, "filtered": self.filtered, "unfiltered": self.unfiltered}
        # One entry a line: short enough to keep in the repository, and a changed record shows in a diff.
        record = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in self.record.items())
        lines = [f'  "format_version": {FORMAT_VERSION}', f'  "record": {{\n{record}\n  }}']
        lines += [f"  {json.dumps(name)}: {json.dumps(values.tolist())}" for name, values in arrays.items()]
        aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        aside.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        aside.replace(path)


def movielens_store(folder: Path) -> InteractionStore:
    """Prepares MovieLens-100K as the baseline uses it: every rating an interaction, no k-core.

    Args:
        folder: where the store is written.

    Raises:
        InputError: the wheel that carries MovieLens-100K is not installed; the message has the command.
    """
    prepare(PrepareConfig(format="ml-100k", inputs=[], user_core=1, item_core=1), folder)
    return InteractionStore.open(folder)


def export_inter(store: InteractionStore) -> bytes:
    """The store as a RecBole `.inter` file.

    The third column is the position in the user's history, not the time: RecBole sorts by it, and times have ties whose
    order is the store's to decide.

    Args:
        store: any store.

    Returns:
        The file's bytes: a header, then one line per interaction, users ascending, positions ascending.
    """
    lengths = np.diff(store.offsets)
    users = np.repeat(store.raw_user_ids, lengths)
    items = store.raw_item_ids[store.item_ids]
    positions = np.arange(store.num_interactions) - np.repeat(store.offsets[:-1], lengths)
    rows = zip(users.tolist(), items.tolist(), positions.tolist(), strict=True)
    body = "".join(f"{user}\t{item}\t{position}\n" for user, item, position in rows)
    return f"user_id:token\titem_id:token\ttimestamp:float\n{body}".encode()


def ranks_from_scores(scores_path: Path, record_path: Path, store: InteractionStore) -> SasrecRanks:
    """Ranks the test items with the project's evaluator.

    Args:
        scores_path: `.npy` [U, I] float32; rows in ascending raw user id, columns in ascending raw item id.
        record_path: the JSON record that was written beside it.
        store: the store that was exported.

    Returns:
        The ranks with the record (`"complete": false` when the run had not ended).

    Raises:
        InputError: the scores are not those of the record, or the record is not of this store.
    """
    record = json.loads(record_path.read_text(encoding="utf-8"))
    expected = {
        "data_sha256": hashlib.sha256(export_inter(store)).hexdigest(),
        "users_sha256": hashlib.sha256(store.raw_user_ids.tobytes()).hexdigest(),
        "items_sha256": hashlib.sha256(store.raw_item_ids.tobytes()).hexdigest(),
        "scores_sha256": hashlib.sha256(scores_path.read_bytes()).hexdigest(),
    }
    for name, value in expected.items():
        if record.get(name) != value:
            raise InputError(f"{record_path}: {name} is {record.get(name)}, data and scores given here have {value}")
    scores = torch.from_numpy(np.load(scores_path, allow_pickle=False))
    if tuple(scores.shape) != (store.num_users, store.num_items):
        raise InputError(f"{scores_path} has shape {list(scores.shape)}, not [{store.num_users}, {store.num_items}]")
    item_ids, offsets = torch.tensor(store.item_ids), torch.tensor(store.offsets)
    last = offsets[1:] - 1
    before_last = torch.ones_like(item_ids, dtype=torch.bool)
    before_last[last] = False
    filtered, unfiltered = target_ranks(
        scores, item_ids[last], item_ids[before_last], offsets - torch.arange(offsets.numel())
    )
    return SasrecRanks(
        users=np.array(store.raw_user_ids), filtered=filtered.numpy(), unfiltered=unfiltered.numpy(), record=record
    )


def rebuild(
    store: InteractionStore,
    *,
    environment: Path,
    output: Path,
    threads: int,
    say: Callable[[str], None],
) -> SasrecRanks:
    """Makes the baseline again: its environment, the export, the training (hours, at low priority), the ranks.

    Args:
        store: MovieLens-100K, from `movielens_store`.
        environment: folder of the virtual environment; made where missing.
        output: folder for export, scores, record and log.
        threads: threads that torch may use.
        say: takes one line of progress at a time.

    Returns:
        The new ranks (not written anywhere).

    Raises:
        InputError: this Python is too new for numpy < 2.
        subprocess.CalledProcessError: pip or the training failed; the log is in `output`.
    """
    if sys.version_info >= (3, 13):
        raise InputError("RecBole needs numpy < 2, which has no wheels for Python 3.13: use 3.10, 3.11 or 3.12")
    python = environment / "bin" / "python"
    marker = environment / "installed"
    if not marker.exists():
        say(f"making {environment}")
        venv.create(environment, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
        subprocess.run([*pip, "--no-deps", RECBOLE], check=True)
        marker.touch()
    output.mkdir(parents=True, exist_ok=True)
    inter, scores, record, log = (output / name for name in ("ml-100k.inter", "scores.npy", "record.json", "train.log"))
    inter.write_bytes(export_inter(store))
    say(f"training SASRec in the background's priority, one line an epoch in {log}")
    command = [str(python), "-W", "ignore", str(SCRIPT), "--inter", str(inter), "--scores", str(scores)]
    command += ["--record", str(record), "--threads", str(threads)]
    with log.open("w", encoding="utf-8") as lines:
        subprocess.run(
            ["nice", "-n", "19", *command],
            check=True,
            stdout=lines,
            stderr=subprocess.STDOUT,
            env={**os.environ, **PROCESS_SETTINGS},
        )
    return ranks_from_scores(scores, record, store)
