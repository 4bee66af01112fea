from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.data.oracles import Row, oracle_sequences, store_sequences
from turbogr_plugin.data import prepare as prepare_module
from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.prepare import prepare
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError


def write_log(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(f"{row.user} {row.item} {row.time}\n" for row in rows))
    return str(path)


def random_rows(seed: int, count: int = 300) -> list[Row]:
    """Rows with many ties and duplicates; ids far apart, in no order, skewed."""
    rng = np.random.default_rng(seed)
    users = rng.integers(-(2**62), 2**62, 30)
    items = rng.integers(0, 2**62, 40)
    return [
        Row(int(users[int(30 * u**2)]), int(items[int(40 * i**2)]), int(t))
        for u, i, t in zip(rng.random(count), rng.random(count), rng.integers(0, 12, count), strict=True)
    ]


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_random_log_gives_the_sequences_of_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, dedup: bool
) -> None:
    rows = random_rows(seed)
    cores = np.random.default_rng(seed).integers(1, 6, 2).tolist()
    monkeypatch.setattr(prepare_module, "_BLOCK", 2 + 5 * seed)  # blocks that end anywhere, within users and ties
    config = PrepareConfig(
        format="text",
        inputs=[write_log(tmp_path / "log.txt", rows)],
        user_core=cores[0],
        item_core=cores[1],
        dedup=dedup,
        threads=2,
    )

    report = prepare(config, tmp_path / "out")

    expected = oracle_sequences(rows, user_core=cores[0], item_core=cores[1], dedup=dedup)
    store = InteractionStore.open(tmp_path / "out")
    assert store_sequences(store) == expected
    items = sorted({item for sequence in expected.values() for item, _ in sequence})
    assert store.raw_item_ids.tolist() == items and store.raw_user_ids.tolist() == sorted(expected)
    assert (report.num_users, report.num_items) == (len(expected), len(items))
    in_order = sorted(rows, key=lambda row: (row.user, row.time))
    assert report.equal_times == sum(a.user == b.user and a.time == b.time for a, b in pairwise(in_order))
    assert report.exact_duplicates == len(rows) - len(set(rows))
    assert report.removed["duplicate"] == (report.exact_duplicates if dedup else 0)
    assert report.rows_read == len(rows) == report.num_interactions + sum(report.removed.values())
    counts = Counter(row.user for row in (dict.fromkeys(rows) if dedup else rows))
    assert report.users_below_minimum == sum(count < 3 for count in counts.values())


def test_the_report_and_the_config_are_in_the_manifest(tmp_path: Path) -> None:
    config = PrepareConfig(format="text", inputs=[write_log(tmp_path / "log.txt", random_rows(0))], user_core=2)
    said: list[str] = []

    report = prepare(config, tmp_path / "out", progress=said.append)

    manifest = InteractionStore.open(tmp_path / "out").manifest
    assert manifest["report"] == json.loads(json.dumps(report.as_dict()))
    assert manifest["config"]["user_core"] == 2 and manifest["config"]["inputs"] == config.inputs
    assert said == ["reading 1 file", "sorting", "k-core", "writing the store"]
    assert report.lines()[0] == "read 300 rows from 1 file"
    assert report.lines()[-1].startswith(f"kept {report.num_interactions} interactions")


def test_users_with_fewer_than_three_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [Row(1, 5, 1), Row(1, 6, 2), Row(2, 5, 1), Row(2, 7, 1), Row(2, 5, 3), Row(3, 8, 0)]
    log = write_log(tmp_path / "log.txt", rows)

    report = prepare(PrepareConfig(format="text", inputs=[log], user_core=1, item_core=1), tmp_path / "out")

    assert store_sequences(InteractionStore.open(tmp_path / "out")) == {2: [(5, 1), (7, 1), (5, 3)]}
    assert report.removed["min_interactions"] == 3 and report.users_below_minimum == 2
    assert InteractionStore.open(tmp_path / "out").raw_item_ids.tolist() == [5, 7]
    assert any("2 of 3 users had fewer than 3 rows" in line for line in report.lines())


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.txt", random_rows(0, count=20))

    with pytest.raises(InputError, match=r"nothing is left of 20 rows: .*too few rows.*Loosen"):
        prepare(PrepareConfig(format="text", inputs=[log], user_core=50), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_input_gives_the_same_bytes_with_any_number_of_threads(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.txt", random_rows(3, count=3000))

    hashes = []
    for threads in (1, 3):
        prepare(PrepareConfig(format="text", inputs=[log], threads=threads), tmp_path / "out")
        hashes.append(InteractionStore.open(tmp_path / "out").manifest["files"])

    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"user_core": 0}, "user_core and item_core must be at least 1"),
        ({"memory_gb": 0.01}, "memory_gb must be at least"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrepareConfig(format="text", inputs=["x"], **settings)  # type: ignore[arg-type]


def test_preparing_needs_no_torch() -> None:
    script = "import sys, turbogr_plugin.data.prepare, turbogr_plugin.data.synthetic; print('torch' in sys.modules)"

    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout

    assert said.strip() == "False"
