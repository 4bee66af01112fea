from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.oracles import store_sequences
from turbogr_plugin.data import readers
from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.prepare import PrepareReport, prepare
from turbogr_plugin.data.readers import KUAIRAND_LOGS
from turbogr_plugin.data.scan import first_problem, scan_query
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError

SHARED = Path(__file__).parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder shared/data beside the checkout is missing")

KUAIRAND_HEADER = "user_id,video_id,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,tab"


def read(tmp_path: Path, **config: Any) -> tuple[PrepareReport, dict[int, list[tuple[int, int]]]]:
    """Prepare without a core and read the store back."""
    settings = PrepareConfig(**{"user_core": 1, "item_core": 1, "threads": 2, **config})
    report = prepare(settings, tmp_path / "out")
    assert report.rows_read == report.num_interactions + sum(report.removed.values())
    return report, store_sequences(InteractionStore.open(tmp_path / "out"))


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refuse(tmp_path: Path, message: str, **config: Any) -> str:
    """The inputs are refused with a message that matches, and nothing is left."""
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, **config)
    assert not list(tmp_path.glob("out*"))
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- texts of users and items


@pytest.mark.parametrize("delimiter", [" ", "\t", ","])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_text_is_read_with_any_delimiter_header_and_line_end(
    tmp_path: Path, delimiter: str, header: bool, line_end: str
) -> None:
    lines = [("user", "item", "time")] * header + [("5", "7", "30"), ("5", "9", "10"), ("5", "8", "20")]
    path = write(tmp_path / "log.txt", line_end.join(delimiter.join(line) for line in lines) + line_end)

    report, sequences = read(tmp_path, format="text", inputs=[path])

    assert sequences == {5: [(9, 10), (8, 20), (7, 30)]}
    shown = repr(delimiter.join(lines[0]))
    assert report.notes == [f"note: {path}: line 1 taken as the header: {shown}; it has no integer"] * header
    assert not header or report.notes[0] in report.lines()


def test_text_without_times_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "5 9\n5 7\n3 1\n5 8\n3 1\n3 2")

    report, sequences = read(tmp_path, format="text", inputs=[path])

    assert sequences == {3: [(1, 0), (1, 0), (2, 0)], 5: [(9, 0), (7, 0), (8, 0)]}
    assert InteractionStore.open(tmp_path / "out").time_unit == "none"
    assert (report.equal_times, report.exact_duplicates) == (0, 1)
    assert "no line end" in report.notes[0]


def test_columns_of_a_text_are_named_when_there_are_more(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "rating,when,who,what\nx,3,1,10\nx,2,1,11\nx,1,1,12\n")

    _, sequences = read(
        tmp_path, format="text", inputs=[path], user_column="who", item_column="what", time_column="when"
    )

    assert sequences == {1: [(12, 1), (11, 2), (10, 3)]}


@pytest.mark.parametrize("name", ["a[1].txt", "b*.txt", "c?.txt", "d'e.txt", "f g.txt"])
def test_a_file_name_is_not_a_pattern(tmp_path: Path, name: str) -> None:
    write(tmp_path / "b1.txt", "2 2\n2 2\n2 2\n")

    _, sequences = read(tmp_path, format="text", inputs=[write(tmp_path / name, "1 1\n1 1\n1 1\n")])

    assert list(sequences) == [1]


def test_ids_of_all_of_int64_survive(tmp_path: Path) -> None:
    big = [2**63 - 1, 2**53 + 1, 2**53, -(2**63), -1, 0, 2**31, 2**32 + 1]
    path = write(tmp_path / "log.txt", "".join(f"{user} {item} {item % 7}\n" for user in big for item in big))

    _, sequences = read(tmp_path, format="text", inputs=[path])

    assert sorted(sequences) == sorted(big)
    assert all(sorted(item for item, _ in sequence) == sorted(big) for sequence in sequences.values())
    assert InteractionStore.open(tmp_path / "out").user_indices([2**63 - 1, 2**53 + 1]).tolist() == [7, 6]


def test_an_integer_may_be_written_with_a_sign_or_zeros(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "007 +1 1\n7 01 2\n+7 -0 3\n")

    assert read(tmp_path, format="text", inputs=[path])[1] == {7: [(1, 1), (1, 2), (0, 3)]}


BAD_CELLS = ["x", "1.5", "1.0", "1e3", "0x10", "1_000", "", " 1", '"1"', "9223372036854775808", "nan", "1 ", "\x001"]


def with_bad_cell(path: Path, cell: str, column: int) -> str:
    """A log with `cell` in a column of its third line."""
    line = ["1", "2", "3"]
    line[column] = cell
    return write(path, "1,2,3\n1,3,4\n" + ",".join(line) + "\n1,2,3\n")


@pytest.fixture(scope="module")
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        yield connection


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("cell", BAD_CELLS, ids=[repr(cell) for cell in BAD_CELLS])
def test_a_cell_that_is_no_integer_stops_the_scan_and_is_named_with_file_and_line(
    tmp_path: Path, engine: duckdb.DuckDBPyConnection, cell: str, column: int
) -> None:
    path = with_bad_cell(tmp_path / "log.txt", cell, column)
    source = readers.open_source(PrepareConfig(format="text", inputs=[path]))

    with pytest.raises((duckdb.InvalidInputException, duckdb.ConversionException)):
        engine.execute(f"CREATE OR REPLACE TABLE rows AS {scan_query(source, allow_negative_times=False)}")
    problem = first_problem(source, allow_negative_times=False)
    assert problem is not None and "\n" not in problem
    assert problem.startswith(f"{path}, line 3: column {('user', 'item', 'time')[column]} is ")


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_cell_that_is_no_integer_is_refused(tmp_path: Path, column: int) -> None:
    path = with_bad_cell(tmp_path / "log.txt", "1.5", column)

    refuse(tmp_path, rf"log\.txt, line 3: column {('user', 'item', 'time')[column]} is ", format="text", inputs=[path])


def test_a_first_line_with_one_bad_id_is_not_taken_for_a_header(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "u1 2\n1 2\n")

    refuse(tmp_path, "line 1: column user is 'u1', expected an integer", format="text", inputs=[path])


@pytest.mark.parametrize("text", ["1 2 3\n1 2\n", "1 2 3\n1 2", "1 2 3\n4 5 6\n1 2 3 4\n1 2 3\n", "1 2 3\n1  2 3\n"])
def test_a_line_with_other_than_the_usual_fields_is_named(tmp_path: Path, text: str) -> None:
    message = refuse(
        tmp_path, r"line \d.*: [24] fields, expected 3", format="text", inputs=[write(tmp_path / "l.txt", text)]
    )
    assert ("cut off" in message) == (text[-1] != "\n")


def test_a_missing_field_far_inside_a_large_file_is_found_at_its_line(tmp_path: Path) -> None:
    lines = [f"{n % 1000}\t{n}\t{n}\tfiller{n}" for n in range(150_000)]
    lines[133_332] = "1\t2\t3"
    path = write(tmp_path / "log.txt", "u\ti\tt\tx\n" + "\n".join(lines) + "\n")

    refuse(
        tmp_path, "line 133334: 3 fields, expected 4", format="text", inputs=[path], user_column="u", item_column="i"
    )


NO_TEXTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "is empty"),
    "only a header": ("user item\n", "has a header and no rows"),
    "compressed": (b"\x1f\x8b\x08\x00abc\n", "is compressed"),
    "not utf-8": (b"\xff\xfe1 2\n", "is not UTF-8"),
    "old line ends": ("1 2\r1 3\r1 4\r", "convert it to line feeds"),
    "mixed line ends": ("1 2\r\n1 3\n1 4\r\n", "log.txt cannot be read"),
    "one column": ("1\n2\n", "1 columns, expected"),
    "a repeated name": ("user,user\n1,2\n", "empty or repeated column name"),
    "negative times": ("1 2 3\n1 2 -3\n", "line 2: column time is -3, a time .*--allow_negative_times true"),
}


@pytest.mark.parametrize("case", NO_TEXTS)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, case: str) -> None:
    content, message = NO_TEXTS[case]

    refuse(tmp_path, message, format="text", inputs=[write(tmp_path / "log.txt", content)])


def test_negative_times_are_read_when_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "1 2 3\n1 5 -3\n1 4 0\n")

    _, sequences = read(tmp_path, format="text", inputs=[path], allow_negative_times=True)

    assert sequences == {1: [(5, -3), (4, 0), (2, 3)]}


def test_missing_files_and_confused_inputs_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "1 2\n")
    refuse(tmp_path, "nowhere.txt does not exist", format="text", inputs=[path, str(tmp_path / "nowhere.txt")])
    refuse(tmp_path, "is a folder: name one folder", format="text", inputs=[path, str(tmp_path)])
    refuse(tmp_path, "more than once", format="text", inputs=[path, path])
    refuse(tmp_path, r"has no \*\.inter file", format="recbole", inputs=[str(tmp_path)])
    refuse(tmp_path, "needs inputs", format="text", inputs=[])
    refuse(tmp_path, "takes no inputs", format="ml-100k", inputs=[path])
    refuse(tmp_path, "belong to format kuairand", format="text", inputs=[path], feedback=["is_click"])
    refuse(tmp_path, "has no header", format="text", inputs=[path], user_column="user")


@needs_shared
@pytest.mark.parametrize(
    ("name", "rows", "users", "unit"),
    [("amazon_beauty.txt", 353_962, 40_226, "none"), ("grocery_train.tsv", 121_892, 14_681, "s")],
)
def test_real_texts_are_read(tmp_path: Path, name: str, rows: int, users: int, unit: str) -> None:
    report, _ = read(tmp_path, format="text", inputs=[str(SHARED / name)])

    assert (report.rows_read, report.users_read) == (rows, users)
    assert InteractionStore.open(tmp_path / "out").time_unit == unit


def test_missing_columns_of_a_text_are_named_together_and_once(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", "who,what\n1,2\n")

    message = refuse(tmp_path, "has no columns a, b, c ", format="text", inputs=[path],
                     user_column="a", item_column="b", time_column="c")  # fmt: skip

    assert message.count("--user_column") == 1 and message.endswith("It has: who, what.")


# ---- KuaiRand


def kuairand_folder(folder: Path, variant: str) -> Path:
    """Standard logs of `variant`; file n has the rows (1, n), (2, n), all at time 5, and one at time 4."""
    folder.mkdir()
    for n, name in enumerate(KUAIRAND_LOGS[variant]):
        rows = "".join(f"{user},{n},{time},1,0,0,0,0,0,0,3\n" for user, time in ((1, 5), (2, 5), (1, 4), (2, 5)))
        write(folder / name, f"{KUAIRAND_HEADER}\n{rows}")
    return folder


@pytest.mark.parametrize("variant", KUAIRAND_LOGS)
@pytest.mark.parametrize("inside", ["", "data"])
def test_all_published_logs_of_a_folder_are_read_in_their_order(tmp_path: Path, variant: str, inside: str) -> None:
    if inside:
        (tmp_path / "KuaiRand").mkdir()
    kuairand_folder(tmp_path / "KuaiRand" / inside, variant)
    write(
        tmp_path / "KuaiRand" / inside / f"log_random_4_22_to_5_08_{variant}.csv",
        f"{KUAIRAND_HEADER}\n3,3,3,1,0,0,0,0,0,0,3\n",
    )
    write(tmp_path / "KuaiRand" / inside / f"user_features_{variant}.csv", "anything")

    report, sequences = read(tmp_path, format="kuairand", inputs=[str(tmp_path / "KuaiRand")])

    files = range(len(KUAIRAND_LOGS[variant]))
    assert sequences[2] == [(n, 5) for n in files for _ in range(2)]
    assert sequences[1] == [(n, 4) for n in files] + [(n, 5) for n in files]
    assert report.files_skipped == [f"log_random_4_22_to_5_08_{variant}.csv"]
    assert [Path(file).name for file in report.files] == list(KUAIRAND_LOGS[variant])
    assert InteractionStore.open(tmp_path / "out").time_unit == "ms"


def test_the_random_log_is_read_on_demand(tmp_path: Path) -> None:
    folder = kuairand_folder(tmp_path / "logs", "1k")
    refuse(tmp_path, "1 log file missing: log_random_", format="kuairand", inputs=[str(folder)], include_random=True)
    write(folder / "log_random_4_22_to_5_08_1k.csv", f"{KUAIRAND_HEADER}\n" + "9,3,3,1,0,0,0,0,0,0,3\n" * 3)

    report, sequences = read(tmp_path, format="kuairand", inputs=[str(folder)], include_random=True)

    assert sequences[9] == [(3, 3)] * 3 and report.files_skipped == []


def test_missing_and_unknown_parts_of_a_folder_are_named(tmp_path: Path) -> None:
    folder = kuairand_folder(tmp_path / "logs", "27k")
    last = folder / KUAIRAND_LOGS["27k"][3]
    text = last.read_bytes()
    last.rename(folder / "log_standard_4_22_to_5_08_27k_part3.csv")
    message = refuse(tmp_path, "1 log file missing", format="kuairand", inputs=[str(folder)])
    assert f"missing: {last.name}; 1 log file not known: log_standard_4_22_to_5_08_27k_part3.csv" in message

    (folder / "log_standard_4_22_to_5_08_27k_part3.csv").unlink()
    last.write_bytes(text)
    write(folder / KUAIRAND_LOGS["1k"][0], text)
    refuse(tmp_path, r"more than one variant \(27k, 1k\)", format="kuairand", inputs=[str(folder)])
    (tmp_path / "empty").mkdir()
    refuse(tmp_path, "no log of a published name", format="kuairand", inputs=[str(tmp_path / "empty")])


def test_feedback_rules_count_what_they_remove(tmp_path: Path) -> None:
    flags = {
        "1,0,0,0,0,0,0": "kept",
        "0,0,0,0,0,0,1": "kept",
        "0,0,0,0,0,0,0": "no_feedback",
        "1,1,1,1,1,1,1": "hated",
        "0,0,0,0,0,1,0": "hated",
        "0,2,0,0,0,0,0": "kept",
        "-1,0,0,0,0,0,0": "no_feedback",
    }
    rows = "".join(f"1,{n},{n},{flag},0\n" for n, flag in enumerate(flags))
    path = write(tmp_path / "log.csv", f"{KUAIRAND_HEADER}\n{rows}")

    report, sequences = read(tmp_path, format="kuairand", inputs=[path])

    kept = [n for n, why in enumerate(flags.values()) if why == "kept"]
    assert sequences == {1: [(n, n) for n in kept]}
    assert (report.rows_read, report.removed["hated"], report.removed["no_feedback"]) == (7, 2, 2)

    report, sequences = read(tmp_path, format="kuairand", inputs=[path], feedback=[], drop_hated=False)
    assert report.num_interactions == 7
    with pytest.raises(InputError, match="nothing is left of 7 rows: 2 removed because is_hate is positive; 4 removed"):
        read(tmp_path, format="kuairand", inputs=[path], feedback=["is_click"])


def test_a_missing_column_is_named_with_those_present(tmp_path: Path) -> None:
    path = write(tmp_path / "log.tsv", "user_id\tvideo_id\ttime_ms\tis_click\n1\t2\t3\t1\n")

    message = refuse(tmp_path, "has no columns is_like, is_follow, ", format="kuairand", inputs=[path])

    assert "is_comment, is_forward, long_view (feedback: " in message and message.count("--feedback") == 1
    assert "; no column is_hate (" in message and "It has: user_id, video_id, time_ms, is_click." in message
    refuse(
        tmp_path, "has no column video_id", format="kuairand", drop_hated=False, feedback=["is_click"],
        inputs=[write(tmp_path / "log2.csv", "user_id,item,time_ms,is_click\n1,2,3,1\n")],
    )  # fmt: skip


@pytest.mark.parametrize("cell", ["", "x", "0.5"])
def test_a_feedback_cell_that_is_no_integer_is_named(tmp_path: Path, cell: str) -> None:
    path = write(tmp_path / "log.csv", f"{KUAIRAND_HEADER}\n1,2,3,1,0,0,0,0,0,0,3\n1,2,3,1,{cell},0,0,0,0,0,3\n")

    refuse(tmp_path, "line 3: column is_like is", format="kuairand", inputs=[path])


def test_a_bad_id_in_a_row_that_a_rule_would_drop_is_still_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", f"{KUAIRAND_HEADER}\n1,2,3,1,0,0,0,0,0,0,3\n1,x,3,0,0,0,0,0,0,0,3\n")

    refuse(tmp_path, "line 3: column video_id is 'x'", format="kuairand", inputs=[path])


def test_files_with_different_headers_are_refused(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.csv", f"{KUAIRAND_HEADER}\n1,2,3,1,0,0,0,0,0,0,3\n"),
        write(tmp_path / "b.csv", "video_id,user_id" + KUAIRAND_HEADER[16:] + "\n1,2,3,1,0,0,0,0,0,0,3\n"),
    ]

    refuse(tmp_path, "b.csv, line 1: its header differs", format="kuairand", inputs=paths)


@needs_shared
def test_real_kuairand_rows_are_read(tmp_path: Path) -> None:
    path = SHARED / "kuairand27k_feedback_core15.tsv"
    config: dict[str, Any] = {"format": "kuairand", "inputs": [str(path)]}
    refuse(tmp_path, "no column is_hate .*--drop_hated false", **config)
    names = path.read_text().splitlines()[0].split("\t")
    table = [dict(zip(names, line.split("\t"), strict=True)) for line in path.read_text().splitlines()[1:]]

    feedback = ["is_click", "is_follow", "is_comment", "is_forward", "long_view"]
    report, sequences = read(tmp_path, **config, drop_hated=False, feedback=feedback)

    expected: dict[int, list[tuple[int, int]]] = {}
    for row in table:
        if any(int(row[name]) for name in feedback):
            expected.setdefault(int(row["user_id"]), []).append((int(row["video_id"]), int(row["time_ms"])))
    expected = {user: sorted(rows, key=lambda pair: pair[1]) for user, rows in expected.items() if len(rows) >= 3}
    assert report.rows_read == 41_828
    assert sequences == expected


# ---- RecBole and MovieLens-100K


def test_recbole_files_are_read_by_column_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.inter",
        "item_id:token\tuser_id:token\trating:float\ttimestamp:float\n"
        "10\t1\t3.5\t881250949\n11\t1\t4\t881250948.0\n12\t1\t4\t8.81250947e8\n",
    )

    _, sequences = read(tmp_path, format="recbole", inputs=[path])

    assert sequences == {1: [(12, 881250947), (11, 881250948), (10, 881250949)]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\t881250949.5", "column timestamp is '881250949.5', expected a whole number"),
        ("1\t2\t1e17", "expected a whole number"),
        ("1\t2\tnan", "expected a whole number"),
        ("1\t2\t-1.0", "a time before the epoch"),
        ("1\t2\tx", "column timestamp is 'x'"),
        ("1.0\t2\t3", "column user_id is '1.0', expected an integer"),
        ("1\tb\t3", "column item_id is 'b', expected an integer"),
    ],
)
def test_a_bad_recbole_cell_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "x.inter", f"user_id:token\titem_id:token\ttimestamp:float\n1\t2\t3\n{line}\n")

    refuse(tmp_path, f"x.inter, line 3: .*{message}", format="recbole", inputs=[path])


def test_recbole_files_without_times_keep_their_order_and_named_columns_are_required(tmp_path: Path) -> None:
    path = write(tmp_path / "x.inter", "user_id:token\titem_id:token\n1\t9\n1\t7\n1\t8\n")

    assert read(tmp_path, format="recbole", inputs=[path])[1] == {1: [(9, 0), (7, 0), (8, 0)]}
    with pytest.raises(InputError, match=r"no column ts .*It has: user_id, item_id"):
        read(tmp_path, format="recbole", inputs=[path], time_column="ts")


def test_movielens_comes_from_the_installed_recbole(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("recbole")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("recbole is not installed")

    report, sequences = read(tmp_path, format="ml-100k")

    lines = readers.ml100k_path().read_text().splitlines()[1:]
    rows = [tuple(int(float(cell)) for cell in line.split("\t")) for line in lines]
    assert report.num_interactions == len(rows) == 100_000
    assert sequences[196] == [
        (item, time) for user, item, _, time in sorted(rows, key=lambda row: row[3]) if user == 196
    ]


def test_without_recbole_the_message_gives_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    refuse(tmp_path, r"`pip install --no-deps recbole==1\.2\.1`", format="ml-100k")


# ---- Parquet


def parquet(path: Path, **columns: Any) -> str:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return str(path)


def test_parquet_files_are_read_in_the_order_given(tmp_path: Path) -> None:
    paths = [
        parquet(
            tmp_path / "b.parquet",
            user_id=[1, 1],
            item_id=pyarrow.array([5, 2**63 - 1], pyarrow.uint64()),
            timestamp=[3, 3],
        ),
        parquet(
            tmp_path / "a.parquet", user_id=[1, 1], item_id=pyarrow.array([6, 7], pyarrow.uint64()), timestamp=[3, 2]
        ),
    ]

    assert read(tmp_path, format="parquet", inputs=paths)[1] == {1: [(7, 2), (5, 3), (2**63 - 1, 3), (6, 3)]}


BAD_PARQUET: dict[str, tuple[Callable[[Path], str], str]] = {
    "text ids": (lambda p: parquet(p, user_id=["a"], item_id=[1]), "column user_id is string, it must be an integer"),
    "float times": (lambda p: parquet(p, user_id=[1], item_id=[1], timestamp=[1.5]), "column timestamp is double"),
    "a null": (lambda p: parquet(p, user_id=[1, 1, None], item_id=[1, 1, 1]), "row 3: column user_id is null"),
    "too large": (
        lambda p: parquet(p, user_id=[1], item_id=pyarrow.array([2**63], pyarrow.uint64())),
        "row 1: column item_id is 9223372036854775808",
    ),
    "negative": (
        lambda p: parquet(p, user_id=[1], item_id=[1], timestamp=[-4]),
        "row 1: column timestamp is -4, a time .*--allow_negative_times true",
    ),
    "no rows": (lambda p: parquet(p, user_id=np.zeros(0, int), item_id=np.zeros(0, int)), "has no rows"),
    "no user": (lambda p: parquet(p, who=[1], item_id=[1]), "no column user_id .*--user_column.* It has: who, item_id"),
    "no parquet": (lambda p: write(p, "PAR1 and more words"), "is not a readable Parquet file"),
}


@pytest.mark.parametrize("case", BAD_PARQUET)
def test_bad_parquet_is_refused(tmp_path: Path, case: str) -> None:
    make, message = BAD_PARQUET[case]

    refuse(tmp_path, message, format="parquet", inputs=[make(tmp_path / "x.parquet")])


# ---- all together


def test_rows_of_one_time_keep_their_file_order_under_many_threads(tmp_path: Path) -> None:
    """Six files that many threads read at once; every user's items must come out as they went in."""
    count = 50_000
    users = np.random.default_rng(0).integers(0, 50, 6 * count).tolist()
    paths = []
    for part in range(6):
        rows = range(part * count, (part + 1) * count)
        paths.append(write(tmp_path / f"z{6 - part}.txt", "".join(f"{users[n]}\t{n}\t7\n" for n in rows)))

    prepare(PrepareConfig(format="text", inputs=paths, user_core=1, item_core=1, threads=4), tmp_path / "out")

    store = InteractionStore.open(tmp_path / "out")
    within = np.diff(store.item_ids) > 0
    within[store.offsets[1:-1] - 1] = True
    assert store.num_interactions == 6 * count and within.all()
