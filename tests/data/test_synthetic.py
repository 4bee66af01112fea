from __future__ import annotations

import csv
import errno
import fcntl
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turbogr_plugin.data import synthetic
from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.prepare import prepare
from turbogr_plugin.data.readers import KUAIRAND_LOGS
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.data.synthetic import generate
from turbogr_plugin.errors import InputError

SHARED = Path(__file__).parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder shared/data beside the checkout is missing")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def store_of(tmp_path: Path, *, logs: dict[str, Any], **rules: Any) -> InteractionStore:
    written = generate(tmp_path / "logs", **logs)
    return prepared(tmp_path / "logs", written.rows, tmp_path, **rules)


def prepared(logs: Path, rows: int, tmp_path: Path, **rules: Any) -> InteractionStore:
    report = prepare(PrepareConfig(format="kuairand", inputs=[str(logs)], **rules), tmp_path / "out")
    assert report.rows_read == rows
    return InteractionStore.open(tmp_path / "out")


EVERYTHING: dict[str, Any] = {"feedback": [], "drop_hated": False, "user_core": 1, "item_core": 1}


def test_logs_have_the_published_files_columns_and_rates(tmp_path: Path) -> None:
    written = generate(tmp_path, rows=60_000, users=100, seed=1)

    assert [path.name for path in written.files] == list(KUAIRAND_LOGS["27k"])
    rows: list[dict[str, int]] = []
    for number, path in enumerate(written.files):
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            assert tuple(reader.fieldnames or ()) == synthetic.COLUMNS
            new = [{name: int(cell) for name, cell in row.items()} for row in reader]
        assert new and all((row["date"] < 20220422) == (number < 2) for row in new)
        rows += new
    assert len(rows) == written.rows
    assert len({row["user_id"] for row in rows}) == written.users == 100
    assert all(20220408 <= row["date"] <= 20220508 and 0 <= row["tab"] <= 14 for row in rows)
    assert all(not row["long_view"] or row["is_click"] for row in rows)
    # published: click 37.87 %, long_view 26.05 %, like 1.67 %
    for name, rate in (("is_click", 0.3787), ("long_view", 0.2605), ("is_like", 0.0167)):
        assert abs(np.mean([row[name] for row in rows]) - rate) < 0.15 * rate, name


@pytest.mark.parametrize("variant", ["1k", "pure"])
def test_other_variants_have_their_names_and_small_sizes_work(tmp_path: Path, variant: Any) -> None:
    store = store_of(tmp_path, logs={"rows": 500, "users": 20, "items": 40, "variant": variant}, **EVERYTHING)

    assert (store.num_users, store.num_interactions) == (20, 500) and store.num_items <= 40


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        generate(tmp_path / name, rows=3_000, users=7, seed=seed)

    logs = [[(tmp_path / n / log).read_bytes() for log in KUAIRAND_LOGS["27k"]] for n in "abc"]
    assert logs[0] == logs[1] and all(x != y for x, y in zip(logs[0], logs[2], strict=True))


@pytest.mark.parametrize(
    "bad", [{"rows": 0}, {"rows": 5, "users": 6}, {"rows": 5, "users": 0}, {"rows": 5, "items": 0}]
)
def test_impossible_sizes_are_refused(tmp_path: Path, bad: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be positive"):
        generate(tmp_path / "logs", **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(InputError, match=rf"seed must be in \[0, 2\^64\), got {seed}"):
        generate(tmp_path / "logs", rows=10, seed=seed)
    assert not (tmp_path / "logs").exists()


def test_the_largest_seed_is_one(tmp_path: Path) -> None:
    generate(tmp_path, rows=10, seed=2**64 - 1)

    assert sum(len(text.splitlines()) for text in contents(tmp_path).values()) == 10 + 4


def test_a_refused_write_names_the_file_and_leaves_the_former_logs(tmp_path: Path) -> None:
    """The operating system refuses writes beyond a file size, as a full disk does: midway or in the last flush."""
    script = (
        "import resource, sys\nfrom turbogr_plugin.data.synthetic import generate\n"
        "for limit, rows, users in ((20_000, 5_000, 10), (50, 1, 1)):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, 20_000))\n"
        "    try:\n        generate(sys.argv[1], rows=rows, users=users, seed=2, variant='pure')\n"
        "    except OSError as error:\n        print(error.errno, error.filename, error.strerror)\n"
    )
    first, _ = generate(tmp_path, rows=100, users=10, seed=1, variant="pure").files
    before = contents(tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{errno.EFBIG} {first} {os.strerror(errno.EFBIG)}\n" * 2
    assert contents(tmp_path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=repr)
def test_an_interrupted_run_leaves_the_former_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    generate(tmp_path, rows=100, users=10, seed=1)
    before = contents(tmp_path)

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)) as raised:
        generate(tmp_path, rows=100, users=10, seed=2)

    assert contents(tmp_path) == before
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(tmp_path / KUAIRAND_LOGS["27k"][0])


def test_logs_are_replaced_and_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    generate(tmp_path, rows=100, users=10, seed=1)
    before = contents(tmp_path)
    dead, alive = (tmp_path / f"tmp-{n}.{KUAIRAND_LOGS['27k'][2]}" for n in (1, 2))
    dead.write_bytes(b"half")

    with open(alive, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        generate(tmp_path, rows=100, users=10, seed=2)

    assert contents(tmp_path).keys() == before.keys() | {alive.name}
    assert all(contents(tmp_path)[name] != text for name, text in before.items())


def test_a_folder_that_cannot_be_made_or_blocks_a_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    for output in (tmp_path / "file", tmp_path / "file" / "logs"):
        with pytest.raises(InputError, match=f"{output} cannot be made: {tmp_path}/file is not a folder"):
            generate(output, rows=10)
    blocked = tmp_path / "logs" / KUAIRAND_LOGS["27k"][3]
    blocked.mkdir(parents=True)
    with pytest.raises(InputError, match=f"{blocked} is a folder"):
        generate(tmp_path / "logs", rows=10)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [blocked.name]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000, 4096, 4097])
def test_the_keyed_bijection_is_one(size: int) -> None:
    keys = np.random.default_rng(size).integers(0, 2**63, 4, dtype=np.uint64)

    image = synthetic.permuted(np.arange(size, dtype=np.uint64), size, keys)

    assert sorted(image.tolist()) == list(range(size))
    assert size < 1000 or abs(np.corrcoef(np.arange(size), image.astype(float))[0, 1]) < 0.1


def test_written_rows_have_the_lengths_and_popularity_of_the_tables(tmp_path: Path) -> None:
    store = store_of(tmp_path, logs={"rows": 300_000, "seed": 3}, **EVERYTHING)

    lengths = np.sort(np.diff(store.offsets))
    expected = synthetic.user_lengths(len(lengths))
    np.testing.assert_allclose(lengths, expected * (300_000 / expected.sum()), rtol=1e-3, atol=1.5)
    counts = np.sort(np.bincount(store.item_ids))[::-1]
    table = synthetic.item_counts(len(counts))
    assert abs(len(counts) / 300_000 - 1 / table.mean()) < 0.1 / table.mean()
    for quantile in (0.5, 0.9, 0.95, 0.99):
        assert abs(np.quantile(counts, quantile) - np.quantile(table, quantile)) <= 0.05 * np.quantile(table, quantile)


@needs_shared
def test_the_quantiles_are_those_of_the_real_lists() -> None:
    with open(SHARED / "kuairand27k_user_lengths.csv", newline="") as file:
        real = np.array([(int(row["exposures"]), float(row["clicks"])) for row in csv.DictReader(file)])
    with open(SHARED / "kuairand27k_item_popularity.csv", newline="") as file:
        popularity = np.array([(int(r["exposure_per_video"]), int(r["video_count"])) for r in csv.DictReader(file)])

    lengths = synthetic.user_lengths(len(real))
    assert abs(lengths.mean() / real[:, 0].mean() - 1) < 0.03
    at = [0.02, 0.05, 0.15, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85, 0.95, 0.98, 0.995]
    np.testing.assert_allclose(np.quantile(lengths, at), np.quantile(real[:, 0], at), rtol=0.06)
    clicks = synthetic.quantile(synthetic.CLICKS, np.array(at))
    np.testing.assert_allclose(clicks, np.quantile(real[:, 1], at), rtol=0.06)

    total = int(popularity[:, 1].sum())
    counts = synthetic.item_counts(total // 10)
    assert abs(counts.mean() / ((popularity[:, 0] * popularity[:, 1]).sum() / total) - 1) < 0.06
    for least in (2, 3, 5, 8, 15, 30, 50, 100, 200, 500, 1000):
        share = popularity[popularity[:, 0] >= least, 1].sum() / total
        assert abs((counts >= least).mean() / share - 1) < 0.1, least


@pytest.fixture(scope="module")
def learnable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnable")
    generate(folder, rows=200_000, users=400, items=8_000, seed=2)
    return folder


@pytest.mark.parametrize("rules", [EVERYTHING, {}], ids=["all rows", "after the feedback rules and 5-core"])
def test_the_next_item_can_be_learnt_from_the_one_before(
    tmp_path: Path, learnable: Path, rules: dict[str, Any]
) -> None:
    store = prepared(learnable, 200_000, tmp_path, **rules)
    follower: dict[int, Counter[int]] = {}
    popular: Counter[int] = Counter()
    for user in range(store.num_users):
        items = store.sequence(user)[0][:-1].tolist()
        popular.update(items)
        for item, following in pairwise(items):
            follower.setdefault(item, Counter())[following] += 1
    top = {item for item, _ in popular.most_common(10)}

    by_bigram = by_popularity = 0
    for user in range(store.num_users):
        before, target = store.sequence(user)[0][-2:].tolist()
        by_bigram += target in {item for item, _ in follower.get(before, Counter()).most_common(10)}
        by_popularity += target in top

    print(f"HR@10 of the bigram {by_bigram / store.num_users:.3f}, of popularity {by_popularity / store.num_users:.3f}")
    assert by_bigram / store.num_users > 0.5
    assert by_bigram > 4 * by_popularity
