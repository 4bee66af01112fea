"""Readers: which files a data set consists of, which of their columns count, and how they are delimited.

A reader opens only the first lines. It returns a `Source`, which `scan` turns into a query; the rows themselves are
never touched here. Every file must have the columns that the preparation needs, the same in all files.

| format   | files                                                    | user, item, time                       |
|----------|----------------------------------------------------------|----------------------------------------|
| kuairand | folder with the published names, or files                | user_id, video_id, time_ms             |
| recbole  | .inter files, header `name:type`, tab-separated          | user_id, item_id, timestamp (or named) |
| text     | `user item [time]`: tab, comma or blank; header optional | by position (or named, with a header)  |
| parquet  | .parquet files                                           | user_id, item_id, timestamp (or named) |
| ml-100k  | the .inter file inside the installed recbole             | as recbole                             |

Left out: item and user features, ids that are not integers, compressed files.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet
from pyarrow import ArrowException

from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.errors import InputError

KUAIRAND_LOGS = {
    "27k": (
        "log_standard_4_08_to_4_21_27k_part1.csv",
        "log_standard_4_08_to_4_21_27k_part2.csv",
        "log_standard_4_22_to_5_08_27k_part1.csv",
        "log_standard_4_22_to_5_08_27k_part2.csv",
    ),
    "1k": ("log_standard_4_08_to_4_21_1k.csv", "log_standard_4_22_to_5_08_1k.csv"),
    "pure": ("log_standard_4_08_to_4_21_pure.csv", "log_standard_4_22_to_5_08_pure.csv"),
}
"""Published file names of the standard logs in chronological order."""

KUAIRAND_RANDOM_LOG = "log_random_4_22_to_5_08_{variant}.csv"
ML100K_FILE = "recbole/dataset_example/ml-100k/ml-100k.inter"
ML100K_INSTALL = "pip install --no-deps recbole==1.2.1"

INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is read: files of one layout, and the columns that count."""

    files: tuple[Path, ...]
    """In chronological order: rows of equal time keep the order of the files."""
    kind: Literal["delimited", "parquet"]
    columns: tuple[str, ...]
    """All columns in the order of the file (made-up names where a text has no header)."""
    user: str
    item: str
    time: str | None
    time_unit: Literal["s", "ms", "none"]
    delimiter: str = ","
    has_header: bool = True
    float_time: bool = False
    """Times may be written as floating-point numbers, as long as they are whole."""
    feedback: tuple[str, ...] = ()
    hated: str | None = None
    skipped: tuple[str, ...] = ()
    """Files of the folder that belong to the data set and are left out by an option."""
    notes: tuple[str, ...] = ()
    """What was guessed about the files, for the report."""


def open_source(config: PrepareConfig) -> Source:
    """Find the files and columns that `config` names.

    Raises:
        InputError: a file or column is missing, a file is empty, not of the format, or not of the data set.
    """
    if config.format == "kuairand":
        return _kuairand(config)
    if config.format == "text":
        return _text(config)
    if config.format == "parquet":
        return _parquet(config)
    files = (ml100k_path(),) if config.format == "ml-100k" else _files(config.inputs, "*.inter")
    return _recbole(config, files)


def ml100k_path() -> Path:
    """The MovieLens-100K interactions inside the installed recbole distribution, which is not imported."""
    try:
        listed = importlib.metadata.distribution("recbole").files or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    for entry in listed:
        if entry.as_posix() == ML100K_FILE:
            path = Path(str(entry.locate()))
            if path.is_file():
                return path
    raise InputError(
        f"MovieLens-100K was not found: it is {ML100K_FILE} in the package recbole, which is not installed in this "
        f"environment. Install it without its dependencies: `{ML100K_INSTALL}`"
    )


def _files(inputs: list[str], pattern: str) -> tuple[Path, ...]:
    """The input files; of a folder those that match `pattern`, by name."""
    paths = [Path(text) for text in inputs]
    if len(paths) == 1 and paths[0].is_dir():
        found = tuple(sorted(paths[0].glob(pattern)))
        if not found:
            raise InputError(f"{paths[0]} has no {pattern} file. Name the files, or another folder.")
        return found
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path} is a folder: name one folder, or a list of files.")
        if not path.is_file():
            raise InputError(f"{path} does not exist.")
    repeated = sorted({str(path) for path in paths if paths.count(path) > 1})
    if repeated:
        raise InputError(f"inputs name {', '.join(repeated)} more than once.")
    return tuple(paths)


def _first_lines(path: Path) -> tuple[str, str]:
    """First and second line of a text file; refuses an empty, compressed or binary one."""
    try:
        with open(path, "rb") as file:
            lines = [file.readline(1 << 20), file.readline(1 << 20)]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    if not lines[0].strip():
        raise InputError(f"{path} is empty.")
    if lines[0].startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
        raise InputError(f"{path} is compressed: unpack it first.")
    try:
        first, second = (line.decode("utf-8-sig").rstrip("\r\n") for line in lines)
    except UnicodeDecodeError:
        raise InputError(f"{path}, line 1, is not UTF-8 text.") from None
    if "\r" in first:
        raise InputError(f"{path} ends its lines with a carriage return alone: convert it to line feeds.")
    return first, second


def _delimiter(header: str) -> str:
    return "\t" if "\t" in header else "," if "," in header else " "


def _read_header(path: Path) -> tuple[str, tuple[str, ...]]:
    """Delimiter and column names of a file with a header and at least one row."""
    header, row = _first_lines(path)
    delimiter = _delimiter(header)
    names = tuple(header.split(delimiter))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or "" in names:
        raise InputError(f"{path}, line 1: the header {header!r} has an empty or repeated column name.")
    if not row.strip():
        raise InputError(f"{path} has a header and no rows.")
    return delimiter, names


def _read_headers(files: tuple[Path, ...]) -> tuple[str, tuple[str, ...]]:
    """The header that all files share."""
    first = _read_header(files[0])
    for path in files[1:]:
        if _read_header(path) != first:
            raise InputError(
                f"{path}, line 1: its header differs from that of {files[0]}: {_read_header(path)[1]} instead of "
                f"{first[1]}. All files must have the same columns in the same order."
            )
    return first


def _require(path: Path, present: tuple[str, ...], needed: dict[str, str]) -> None:
    """Every column of `needed` (column -> who needs it and how to name another one) must be present."""
    missing: dict[str, list[str]] = {}
    for column, why in needed.items():
        if column not in present:
            missing.setdefault(why, []).append(column)
    if missing:
        raise InputError(
            f"{path} has "
            + "; ".join(
                f"no column{'s' if len(columns) > 1 else ''} {', '.join(columns)} ({why})"
                for why, columns in missing.items()
            )
            + f". It has: {', '.join(present)}."
        )


def _kuairand(config: PrepareConfig) -> Source:
    paths = [Path(text) for text in config.inputs]
    skipped: tuple[str, ...] = ()
    if len(paths) == 1 and paths[0].is_dir():
        files, skipped = _kuairand_folder(paths[0], config.include_random)
    else:
        files = _files(config.inputs, "*.csv")
    delimiter, columns = _read_headers(files)
    needed = {
        "user_id": "the user",
        "video_id": "the item",
        "time_ms": "the time",
        **dict.fromkeys(config.feedback, "feedback: name the columns to use with --feedback"),
    }
    if config.drop_hated:
        needed["is_hate"] = "needed to drop hated rows: turn that off with --drop_hated false"
    _require(files[0], columns, needed)
    return Source(
        files=files,
        kind="delimited",
        columns=columns,
        user="user_id",
        item="video_id",
        time="time_ms",
        time_unit="ms" if config.time_unit == "auto" else config.time_unit,
        delimiter=delimiter,
        feedback=tuple(config.feedback),
        hated="is_hate" if config.drop_hated else None,
        skipped=skipped,
    )


def _kuairand_folder(folder: Path, include_random: bool) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Log files of a published folder (or of its `data` folder), and the names of those left out."""
    if not any(folder.glob("log_*")) and (folder / "data").is_dir():
        folder = folder / "data"
    present = {path.name for path in folder.glob("log_*")}
    variants = [v for v in KUAIRAND_LOGS if present & {*KUAIRAND_LOGS[v], KUAIRAND_RANDOM_LOG.format(variant=v)}]
    if len(variants) != 1:
        what = f"logs of more than one variant ({', '.join(variants)})" if variants else "no log of a published name"
        raise InputError(
            f"{folder} has {what}. A KuaiRand folder holds the standard logs of one of "
            + "; ".join(f"{v}: {', '.join(names)}" for v, names in KUAIRAND_LOGS.items())
            + ". For other names give the files themselves, in chronological order."
        )
    standard, random_log = KUAIRAND_LOGS[variants[0]], KUAIRAND_RANDOM_LOG.format(variant=variants[0])
    wanted = (*standard, random_log) if include_random else standard
    missing = [name for name in wanted if name not in present]
    unknown = sorted(present - {*standard, random_log})
    if missing or unknown:
        raise InputError(
            f"{folder}: "
            + "; ".join(
                f"{len(names)} log file{'s' if len(names) > 1 else ''} {what}: {', '.join(names)}"
                for what, names in (("missing", missing), ("not known", unknown))
                if names
            )
            + f". KuaiRand-{variants[0]} consists of {', '.join((*standard, random_log))}. To read something else, "
            f"give the files themselves, in chronological order."
        )
    return tuple(folder / name for name in wanted), tuple(sorted(present - set(wanted)))


def _recbole(config: PrepareConfig, files: tuple[Path, ...]) -> Source:
    delimiter, header = _read_headers(files)
    types = dict(field.partition(":")[::2] for field in header)
    columns = tuple(types)
    user, item = config.user_column or "user_id", config.item_column or "item_id"
    time = config.time_column or ("timestamp" if "timestamp" in columns else None)
    needed = {user: "the user: name another with --user_column", item: "the item: name another with --item_column"}
    if time:
        needed[time] = "the time: name another with --time_column"
    _require(files[0], columns, needed)
    return Source(
        files=files,
        kind="delimited",
        columns=columns,
        user=user,
        item=item,
        time=time,
        time_unit=_unit(config, time),
        delimiter=delimiter,
        float_time=time is not None and types[time] == "float",
    )


def _text(config: PrepareConfig) -> Source:
    files = _files(config.inputs, "*.txt")
    layouts = [_text_layout(path) for path in files]
    for path, layout in zip(files, layouts, strict=True):
        if layout != layouts[0]:
            raise InputError(f"{path}, line 1: {layout[1]} columns differ from those of {files[0]}: {layouts[0][1]}.")
    delimiter, columns, has_header = layouts[0]
    named = [config.user_column, config.item_column, config.time_column]
    if any(named) and not has_header:
        raise InputError(f"{files[0]} has no header: --user_column, --item_column and --time_column cannot be used.")
    if not any(named) and len(columns) not in (2, 3):
        raise InputError(
            f"{files[0]}, line 1: {len(columns)} columns, expected `user item` or `user item time` separated by one "
            f"tab, comma or blank. With a header, name them with --user_column, --item_column and --time_column."
        )
    if any(named):
        user, item, time = config.user_column or columns[0], config.item_column or columns[1], config.time_column
    else:
        user, item, time = columns[0], columns[1], columns[2] if len(columns) == 3 else None
    named_by = "named by --user_column, --item_column or --time_column"
    _require(files[0], columns, dict.fromkeys([column for column in (user, item, time) if column], named_by))
    return Source(
        files=files,
        kind="delimited",
        columns=columns,
        user=user,
        item=item,
        time=time,
        time_unit=_unit(config, time),
        delimiter=delimiter,
        has_header=has_header,
        notes=tuple(_header_note(path, delimiter.join(columns)) for path in files if has_header),
    )


def _text_layout(path: Path) -> tuple[str, tuple[str, ...], bool]:
    """Delimiter, columns and whether there is a header: a first line in which nothing is an integer."""
    first, _ = _first_lines(path)
    delimiter = _delimiter(first)
    fields = first.split(delimiter)
    if not any(INTEGER.fullmatch(field) for field in fields):
        return (*_read_header(path), True)
    return (
        delimiter,
        ("user", "item", "time", *(f"column_{n}" for n in range(4, len(fields) + 1)))[: len(fields)],
        False,
    )


def _header_note(path: Path, header: str) -> str:
    shown = header[:200] + ("..." if len(header) > 200 else "")
    return f"note: {path}: line 1 taken as the header: {shown!r}; it has no integer"


def _parquet(config: PrepareConfig) -> Source:
    files = _files(config.inputs, "*.parquet")
    user, item = config.user_column or "user_id", config.item_column or "item_id"
    time: str | None = None
    columns: tuple[str, ...] = ()
    for number, path in enumerate(files):
        try:
            metadata = pyarrow.parquet.read_metadata(path)
        except (ArrowException, OSError) as error:
            raise InputError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
        if not metadata.num_rows:
            raise InputError(f"{path} has no rows.")
        schema = metadata.schema.to_arrow_schema()
        if number == 0:
            columns = tuple(schema.names)
            time = config.time_column or ("timestamp" if "timestamp" in columns else None)
        needed = {user: "the user: name another with --user_column", item: "the item: name another with --item_column"}
        if time:
            needed[time] = "the time: name another with --time_column"
        _require(path, tuple(schema.names), needed)
        for column in needed:
            if not pyarrow.types.is_integer(schema.field(column).type):
                raise InputError(
                    f"{path}: column {column} is {schema.field(column).type}, it must be an integer type (ids and "
                    f"times are int64)."
                )
    return Source(
        files=files, kind="parquet", columns=columns, user=user, item=item, time=time, time_unit=_unit(config, time)
    )


def _unit(config: PrepareConfig, time: str | None) -> Literal["s", "ms", "none"]:
    if time is None:
        return "none"
    return "s" if config.time_unit == "auto" else config.time_unit
