"""From interaction logs to a store, in memory that does not grow with the number of rows.

    files --DuckDB, parallel--> table rows (user, item, time, rule) in file order, on disk
          --ORDER BY user, time, rowid (spills)--> stream: count ties and duplicates, number users and items
          --> two flat files in the final order: item index, time
          --k-core, one pass over them per round--> counts per user and item
          --one pass--> the arrays of the store

rowid is the position in the files, so rows of equal time keep their file order whatever the threads do. Everything
temporary lies in the folder that becomes the store and is gone when it does. Memory: the engine's limit, 1 M rows at a
time, and arrays over users and items.

Every row that is read is either in the store or counted under the rule that removed it; the counts are checked.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from turbogr_plugin.data.config import MIN_INTERACTIONS, PrepareConfig
from turbogr_plugin.data.k_core import KCore, k_core
from turbogr_plugin.data.readers import Source, open_source
from turbogr_plugin.data.scan import HATED, KEPT, NO_FEEDBACK, first_problem, scan_query
from turbogr_plugin.data.store import NpyWriter, replace_on_success, write_array, write_manifest
from turbogr_plugin.data.tie_runs import count_ties, tie_runs
from turbogr_plugin.errors import InputError

_BLOCK = 1 << 20

RULES = {
    "hated": "is_hate is positive",
    "no_feedback": "none of the feedback columns is positive",
    "duplicate": "repeats an earlier row (dedup)",
    "item_core": "the item has too few rows",
    "user_core": "the user has too few rows",
    "min_interactions": f"the user has fewer than {MIN_INTERACTIONS} rows left",
}
"""Why a row can be missing from the store, in the order in which the rules apply."""


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """What was read, what each rule removed, and what is left: rows_read = num_interactions + sum(removed)."""

    files: list[str]
    files_skipped: list[str]
    rows_read: int
    removed: dict[str, int]
    """Rows per rule of `RULES`."""
    equal_times: int
    """Neighbouring rows of one user with the same time, after the feedback rules (0 for files without times)."""
    exact_duplicates: int
    """Rows that repeat user, item and time of an earlier row, after the feedback rules; removed only with dedup."""
    users_below_minimum: int
    """Users with fewer than three rows after feedback and dedup: they can never be in the store."""
    users_read: int
    """Users after the feedback rules."""
    items_read: int
    """Items after the feedback rules."""
    core_rounds: int
    num_users: int
    num_items: int
    num_interactions: int
    notes: list[str]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for the manifest."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for people, one line each."""
        skipped = f" (left out: {', '.join(self.files_skipped)})" if self.files_skipped else ""
        duplicates = (
            ""
            if not self.exact_duplicates
            else " (removed)"
            if self.removed["duplicate"]
            else " (kept; --dedup true removes them)"
        )
        return [
            f"read {self.rows_read:,} rows from {len(self.files)} file{'s' if len(self.files) != 1 else ''}{skipped}",
            *(f"removed {self.removed[rule]:,} rows: {why}" for rule, why in RULES.items() if self.removed[rule]),
            f"{self.equal_times:,} neighbouring rows of a user have equal times (kept in file order)",
            f"{self.exact_duplicates:,} exact duplicate rows{duplicates}",
            f"{self.users_below_minimum:,} of {self.users_read:,} users had fewer than {MIN_INTERACTIONS} rows",
            *self.notes,
            f"kept {self.num_interactions:,} interactions of {self.num_users:,} users with {self.num_items:,} items, "
            f"in {self.seconds:.1f} s",
        ]


def prepare(
    config: PrepareConfig, output: str | Path, *, progress: Callable[[str], None] | None = None
) -> PrepareReport:
    """Read, filter and sort the inputs of `config` and write the store `output`.

    An existing store at `output` is replaced only when the new one is complete.

    Args:
        config: inputs and rules.
        output: folder to make.
        progress: called with one line at the start of every stage.

    Raises:
        InputError: bad inputs, a full disk, too little memory, nothing left after the rules, or `output` is something
            else than a store. What was at `output` is untouched then.
    """
    started = time.perf_counter()
    say = progress or (lambda line: None)
    source = open_source(config)
    with _engine_errors(config, Path(output)), replace_on_success(Path(output)) as work:
        scratch = work / "scratch"
        scratch.mkdir()
        say(f"reading {len(source.files)} file{'s' if len(source.files) != 1 else ''}")
        with _engine(scratch, config) as engine:
            removed = _ingest(engine, source, config)
            say("sorting")
            rows = _sort(engine, scratch, source, config)
        removed["duplicate"] = rows.duplicates if config.dedup else 0
        say("k-core")
        core = k_core(
            rows.blocks,
            num_users=len(rows.raw_users),
            num_items=len(rows.raw_items),
            user_core=config.user_core,
            item_core=config.item_core,
        )
        removed["item_core"], removed["user_core"] = core.removed_by_item, core.removed_by_user
        say("writing the store")
        kept_users = core.user_counts >= MIN_INTERACTIONS
        removed["min_interactions"] = int(core.user_counts[~kept_users].sum())
        rows_read = removed.pop("read")
        left = rows_read - sum(removed.values())
        if not left:
            raise InputError(
                f"nothing is left of {rows_read} rows: "
                + "; ".join(f"{count} removed because {RULES[rule]}" for rule, count in removed.items() if count)
                + ". Loosen the rules (--user_core, --item_core, --feedback, --drop_hated)."
            )
        files, num_items = _write_arrays(work, rows, core, kept_users, left)
        report = PrepareReport(
            files=[str(path) for path in source.files],
            files_skipped=list(source.skipped),
            rows_read=rows_read,
            removed={rule: removed[rule] for rule in RULES},
            equal_times=rows.equal_times,
            exact_duplicates=rows.duplicates,
            users_below_minimum=int(np.count_nonzero(rows.counts < MIN_INTERACTIONS)),
            users_read=len(rows.raw_users),
            items_read=len(rows.raw_items),
            core_rounds=core.rounds,
            num_users=int(np.count_nonzero(kept_users)),
            num_items=num_items,
            num_interactions=left,
            notes=_notes(source),
            seconds=time.perf_counter() - started,
        )
        write_manifest(
            work,
            files=files,
            num_users=report.num_users,
            num_items=report.num_items,
            num_interactions=report.num_interactions,
            time_unit=source.time_unit,
            config=asdict(config),
            report=report.as_dict(),
        )
        shutil.rmtree(scratch)
    return report


@contextmanager
def _engine(scratch: Path, config: PrepareConfig) -> Iterator[duckdb.DuckDBPyConnection]:
    database = scratch / "rows.duckdb"
    engine = duckdb.connect(
        str(database),
        config={
            "memory_limit": f"{int(config.memory_gb * 1000)}MB",
            "threads": config.threads,
            "temp_directory": str(scratch / "spill"),
            "preserve_insertion_order": True,
            "autoinstall_known_extensions": False,
        },
    )
    try:
        engine.execute("SET enable_progress_bar = false")
        yield engine
    finally:
        engine.close()
        database.unlink(missing_ok=True)  # makes room for the store


def _ingest(engine: duckdb.DuckDBPyConnection, source: Source, config: PrepareConfig) -> dict[str, int]:
    """Read all files into the table `rows`; returns the rows read and those that the feedback rules remove."""
    query = scan_query(source, allow_negative_times=config.allow_negative_times)
    try:
        engine.execute(f"CREATE TABLE rows AS {query}")
    except (duckdb.InvalidInputException, duckdb.ConversionException) as error:
        problem = first_problem(source, allow_negative_times=config.allow_negative_times)
        if problem is None:  # a layout that only the engine objects to: lines of megabytes, mixed line ends
            names = ", ".join(str(path) for path in source.files)
            raise InputError(f"one of {names} cannot be read: {' '.join(str(error).split())[:500]}") from error
        raise InputError(problem) from None
    counts = dict(engine.execute("SELECT rule, count(*) FROM rows GROUP BY rule").fetchall())
    return {"read": sum(counts.values()), "hated": counts.get(HATED, 0), "no_feedback": counts.get(NO_FEEDBACK, 0)}


@dataclass(frozen=True, kw_only=True)
class _SortedRows:
    """Rows in the order of the store, in flat files, users and items numbered by ascending raw id."""

    items_path: Path
    times_path: Path
    raw_users: np.ndarray
    raw_items: np.ndarray
    counts: np.ndarray
    """int64 [U]: rows of each user."""
    equal_times: int
    duplicates: int

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Blocks of user and item indices, in order."""
        ends = np.cumsum(self.counts)
        first = 0
        with open(self.items_path, "rb") as file:
            while len(items := np.fromfile(file, dtype=np.int32, count=_BLOCK)):
                yield _users_between(ends, first, first + len(items)), items
                first += len(items)


def _users_between(ends: np.ndarray, first: int, last: int) -> np.ndarray:
    """User index of each of the rows first .. last - 1; `ends` [U] are the cumulative row counts."""
    begin, end = np.searchsorted(ends, [first, last - 1], side="right")
    lengths = np.diff(np.concatenate(([first], np.minimum(ends[begin : end + 1], last))))
    return np.repeat(np.arange(begin, end + 1, dtype=np.int32), lengths)


def _batches(engine: duckdb.DuckDBPyConnection, query: str) -> Iterator[list[np.ndarray]]:
    """Rows of `query` as lists of columns, at most a block at a time."""
    for batch in engine.sql(query).to_arrow_reader(_BLOCK):
        yield [column.to_numpy(zero_copy_only=False) for column in batch.columns]


def _sort(engine: duckdb.DuckDBPyConnection, scratch: Path, source: Source, config: PrepareConfig) -> _SortedRows:
    kept = f"FROM rows WHERE rule = {KEPT}"
    empty = np.empty(0, dtype=np.int64)
    raw_items = np.concatenate([empty, *(b[0] for b in _batches(engine, f"SELECT DISTINCT item {kept} ORDER BY item"))])
    assert len(raw_items) < 2**31, "item indices are kept as int32 between the stages"
    raw_users: list[np.ndarray] = [empty]
    counts: list[np.ndarray] = [empty]
    equal_times = duplicates = 0
    items_path, times_path = scratch / "items.int32", scratch / "times.int64"
    with open(items_path, "wb") as items_file, open(times_path, "wb") as times_file:
        sorted_rows = _batches(engine, f"SELECT user, item, time {kept} ORDER BY user, time, rowid")
        for user, item, when in tie_runs(sorted_rows):
            ties, repeats = count_ties(user, item, when)
            equal_times += ties
            duplicates += len(repeats)
            if config.dedup and len(repeats):
                user, item, when = (np.delete(column, repeats) for column in (user, item, when))
            starts = np.flatnonzero(np.concatenate(([True], user[1:] != user[:-1])))
            raw_users.append(user[starts])
            counts.append(np.diff(np.append(starts, len(user))))
            items_file.write(_places(raw_items, item).astype(np.int32).data)
            times_file.write(np.ascontiguousarray(when).data)
    users, lengths = _merge_neighbours(np.concatenate(raw_users), np.concatenate(counts))
    return _SortedRows(
        items_path=items_path,
        times_path=times_path,
        raw_users=users,
        raw_items=raw_items,
        counts=lengths,
        equal_times=equal_times if source.time is not None else 0,
        duplicates=duplicates,
    )


def _places(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Place of each value in `ascending`. Sorted first, searches walk through memory: 150 ns each, not 900."""
    order = np.argsort(values)
    places = np.empty(len(values), dtype=np.int64)
    places[order] = np.searchsorted(ascending, values[order])
    return places


def _merge_neighbours(users: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up the counts of neighbouring equal users: a user may lie on both sides of a block's border."""
    if not len(users):
        return users, counts
    starts = np.flatnonzero(np.concatenate(([True], users[1:] != users[:-1])))
    return users[starts], np.add.reduceat(counts, starts)


def _write_arrays(
    work: Path, rows: _SortedRows, core: KCore, kept_users: np.ndarray, left: int
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write the five arrays; returns their manifest entries and the number of items."""
    kept_items = core.item_counts > 0
    user_counts, item_counts = core.user_counts[kept_users], core.item_counts
    if not kept_users.all():  # items that only users below the minimum had are gone as well
        item_counts = np.zeros_like(core.item_counts)
        for users, items in rows.blocks():
            np.add.at(item_counts, items[(core.user_counts[users] > 0) & kept_users[users] & kept_items[items]], 1)
        kept_items = item_counts > 0
    new_index = np.cumsum(kept_items) - 1
    with (
        NpyWriter(work / "item_ids.npy", length=left) as item_ids,
        NpyWriter(work / "times.npy", length=left) as times,
        open(rows.times_path, "rb") as times_file,
    ):
        for users, items in rows.blocks():
            when = np.fromfile(times_file, dtype=np.int64, count=len(items))
            kept = np.flatnonzero(kept_users[users] & kept_items[items])
            item_ids.append(new_index[items[kept]])
            times.append(when[kept])
        files = {"item_ids.npy": item_ids.close(), "times.npy": times.close()}
    files["offsets.npy"] = write_array(work / "offsets.npy", np.concatenate(([0], np.cumsum(user_counts))))
    files["users.npy"] = write_array(work / "users.npy", rows.raw_users[kept_users])
    files["items.npy"] = write_array(work / "items.npy", rows.raw_items[kept_items])
    return files, int(np.count_nonzero(kept_items))


def _notes(source: Source) -> list[str]:
    """What is legal and worth a look: a guess of the reader; a last line without its end, perhaps cut."""
    notes = list(source.notes)
    for path in source.files if source.kind == "delimited" else ():
        with open(path, "rb") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                notes.append(
                    f"note: the last line of {path} has no line end; if the file was cut off, so may be its last number"
                )
    return notes


@contextmanager
def _engine_errors(config: PrepareConfig, output: Path) -> Iterator[None]:
    """Turn a full disk and exhausted memory, ours or the engine's, into an InputError; the output is as it was."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    try:
        yield
    except OSError as error:
        if error.errno not in full:
            raise
        raise _disk_full(output, str(error)) from error
    except duckdb.Error as error:
        # The engine gives the system's words in an error of any class (an IOException, or of the commit it broke).
        detail = str(error).splitlines()[0]
        if any(os.strerror(code) in detail for code in full) or "max_temp_directory_size" in str(error):
            raise _disk_full(output, detail) from error
        if isinstance(error, duckdb.OutOfMemoryException):
            raise InputError(
                f"--memory_gb {config.memory_gb} is too little for this input ({detail}). Raise it, or lower "
                f"--threads (now {config.threads}). What was at {output} is as it was."
            ) from error
        raise


def _disk_full(output: Path, detail: str) -> InputError:
    return InputError(
        f"the disk of {output} is full ({detail}). Beside the output up to about 80 bytes per row are "
        f"needed while it is made. Free some space or name another output. What was at the output is as it was."
    )
