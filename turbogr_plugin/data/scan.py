"""Reading a `Source` with DuckDB, strictly: every cell that is used is a whole number, every line has all its fields.

DuckDB's own integer columns are too kind for ids: they read 1.5 as 2, 1e3, 0x10 and 1_000. So the cells are read as
text, and count when the integer they are cast to is written just so, or (+7, 007) when they consist of digits; this
check is about a fifth of the reading time. The reader's strict mode
refuses a line with fewer or more fields even when the missing ones are not asked for; quoting is off, since no format
here quotes and a stray quote would swallow lines. Blank lines are skipped.

DuckDB stops at the first bad row, but in words that change between its versions. `first_problem` therefore walks the
files in plain Python once something is known to be wrong, and names file, line and what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet

from turbogr_plugin.data.readers import Source

KEPT, HATED, NO_FEEDBACK = 0, 1, 2
"""Values of the column `rule`: why a row is dropped at once, or KEPT."""

_INTEGER_PATTERN = "[+-]?[0-9]{1,30}"
_INTEGER = re.compile(_INTEGER_PATTERN)
_INT64_MAX = 2**63 - 1
_WHOLE_DOUBLES = 2**53
"""Every whole number up to here is a double of its own."""


def scan_query(source: Source, *, allow_negative_times: bool) -> str:
    """SQL that reads all rows in file order: user, item, time (BIGINT, never NULL) and rule (TINYINT).

    It fails on the first row with a cell that is not a whole number in range; see `first_problem`.
    """
    if source.kind == "parquet":
        table = f"read_parquet([{_paths(source.files)}])"
    else:
        columns = ", ".join(f"{_literal(name)}: 'VARCHAR'" for name in source.columns)
        table = (
            f"read_csv([{_paths(source.files)}], columns = {{{columns}}}, header = {source.has_header}, "
            f"delim = {_literal(source.delimiter)}, quote = '', escape = '', auto_detect = false, strict_mode = true, "
            f"null_padding = false, ignore_errors = false, compression = 'none')"
        )
    time = "0::BIGINT" if source.time is None else _integer(source, source.time)
    flags = [*source.feedback, *([source.hated] if source.hated else [])]
    valid = ["user IS NOT NULL", "item IS NOT NULL", "time IS NOT NULL", "rule IS NOT NULL"]
    if not allow_negative_times:
        valid.append("time >= 0")
    cells = ", ".join(f"{_flag(source, name)} AS flag{n}" for n, name in enumerate(flags))
    return (
        f"SELECT CASE WHEN {' AND '.join(valid)} THEN user ELSE error(concat('bad cell in row of user ', user)) END "
        f"AS user, item, time, rule FROM (SELECT user, item, time, {_rule(source)} AS rule FROM ("
        f"SELECT {_integer(source, source.user)} AS user, {_integer(source, source.item)} AS item, {time} AS time"
        f"{', ' + cells if cells else ''} FROM {table}))"
    )


def _rule(source: Source) -> str:
    """HATED, NO_FEEDBACK or KEPT; NULL when one of the flags is."""
    flags = [f"flag{n}" for n in range(len(source.feedback) + (source.hated is not None))]
    cases = "".join(f" WHEN {flag} IS NULL THEN NULL" for flag in flags)
    if source.hated:
        cases += f" WHEN {flags[-1]} > 0 THEN {HATED}"
    if source.feedback:
        cases += (
            f" WHEN NOT ({' OR '.join(f'{flag} > 0' for flag in flags[: len(source.feedback)])}) THEN {NO_FEEDBACK}"
        )
    return f"(CASE{cases} ELSE {KEPT} END)::TINYINT" if cases else f"{KEPT}::TINYINT"


def _integer(source: Source, column: str) -> str:
    """The cell as BIGINT, or NULL when it is not a whole number of that range."""
    name = _identifier(column)
    value = f"TRY_CAST({name} AS BIGINT)"
    if source.kind == "parquet":
        return value
    exact = (
        f"CASE WHEN {value}::VARCHAR = {name} THEN {value} "
        f"WHEN regexp_full_match({name}, '{_INTEGER_PATTERN}') THEN {value}"
    )
    if not (source.float_time and column == source.time):
        return f"{exact} END"
    double = f"TRY_CAST({name} AS DOUBLE)"
    return f"{exact} WHEN {double} = trunc({double}) AND abs({double}) <= {_WHOLE_DOUBLES} THEN {double}::BIGINT END"


def _flag(source: Source, column: str) -> str:
    """As `_integer`, quick for the usual 0 and 1."""
    name = _identifier(column)
    return f"CASE {name} WHEN '0' THEN 0 WHEN '1' THEN 1 ELSE {_integer(source, column)} END"


def _identifier(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _paths(files: tuple[Path, ...]) -> str:
    # DuckDB takes a path for a glob pattern: a special character stands for itself inside brackets.
    return ", ".join(_literal(re.sub(r"([*?\[])", r"[\1]", str(path.absolute()))) for path in files)


def first_problem(source: Source, *, allow_negative_times: bool) -> str | None:
    """The first row that `scan_query` refuses, as a sentence that names file, line and what is allowed; None if none.

    Reads in plain Python, about a million lines in two seconds: only for a source that is known to be bad.
    """
    problems = _parquet_problems if source.kind == "parquet" else _line_problems
    for path in source.files:
        for problem in problems(source, path, allow_negative_times):
            return f"{path}, {problem}"
    return None


def _line_problems(source: Source, path: Path, allow_negative_times: bool) -> Iterator[str]:
    used = [name for name in (source.user, source.item, source.time, *source.feedback, source.hated) if name]
    places = [(name, source.columns.index(name)) for name in used]
    delimiter = source.delimiter.encode()
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.rstrip(b"\r\n")
            if (number == 1 and source.has_header) or not text:
                continue
            if number == 1:
                text = text.removeprefix(b"\xef\xbb\xbf")
            fields = text.split(delimiter)
            if len(fields) != len(source.columns):
                last = "" if line.endswith(b"\n") else " (the last line; the file looks cut off)"
                yield (
                    f"line {number}{last}: {len(fields)} fields, expected {len(source.columns)}: "
                    f"{_shown(text)}. Complete the file or remove the line."
                )
                continue
            for name, place in places:
                is_time = name == source.time
                problem = _cell_problem(fields[place], is_time, source.float_time and is_time, allow_negative_times)
                if problem:
                    yield f"line {number}: column {name} {problem}"


def _cell_problem(cell: bytes, is_time: bool, float_form: bool, allow_negative_times: bool) -> str | None:
    text = cell.decode("utf-8", errors="replace")
    if _INTEGER.fullmatch(text):
        value = int(text)
        if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
            return f"is {text}, which does not fit into int64 (-2^63 to 2^63 - 1)."
    elif float_form:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (number.is_integer() and abs(number) <= _WHOLE_DOUBLES):
            return f"is {_shown(cell)}, expected a whole number (a fraction would be lost)."
        value = int(number)
    else:
        return f"is {_shown(cell)}, expected an integer."
    if is_time and value < 0 and not allow_negative_times:
        return f"is {text}, a time before the epoch: allow it with --allow_negative_times true, or remove the line."
    return None


def _shown(cell: bytes) -> str:
    return repr(cell[:200].decode("utf-8", errors="replace")) + ("..." if len(cell) > 200 else "")


def _parquet_problems(source: Source, path: Path, allow_negative_times: bool) -> Iterator[str]:
    used = [name for name in (source.user, source.item, source.time) if name]
    first_row = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=used):
        for name in used:
            for row, value in enumerate(batch.column(name).to_pylist()):
                if value is None:
                    yield f"row {first_row + row + 1}: column {name} is null, expected an integer."
                elif value > _INT64_MAX:
                    yield f"row {first_row + row + 1}: column {name} is {value}, which does not fit into int64."
                elif name == source.time and value < 0 and not allow_negative_times:
                    yield (
                        f"row {first_row + row + 1}: column {name} is {value}, a time before the epoch: allow it with "
                        f"--allow_negative_times true, or remove the row."
                    )
        first_row += batch.num_rows
