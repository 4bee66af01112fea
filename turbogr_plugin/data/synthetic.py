"""Writes logs in the format of KuaiRand, of any size, with its published quantiles and something to learn.

- User lengths follow the published quantiles of exposures of KuaiRand-27K (100 to 228,000, median 8,594) and each
  user's click rate follows from the quantiles of clicks; item popularity follows the published counts of items with at
  least k exposures (54 % of the items are seen once). With other numbers of users or items the shapes are scaled.
- Items come in playlists of eight items of equal popularity. A user's history is a sequence of visits to playlists,
  each picked in proportion to its popularity; three visits in four run through the playlist in its order, the fourth in
  random order. So an item has one likely successor (about 2 in 3 of all rows) among seven possible ones, and popularity
  alone predicts almost nothing. A user engages with whole visits: nine in ten rows of an engaged visit are clicked,
  none of the others, so the structure survives the feedback filter. Rows of a visit are close in time.
- Every playlist gets exactly its number of visits: visits are numbered, and a keyed bijection (a Feistel network) of
  their numbers takes the place of drawing. The popularity is therefore exact and nothing has to be remembered.

The bytes depend on the arguments and the seed alone. Rows are written user after user, shuffled within chunks of a
million, to the published standard files; times decide between the two periods. Memory: one chunk, and 8 bytes per
playlist and user. Left out: the random-exposure log, feature files, and the meaning of columns that no rule reads.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import pyarrow
import pyarrow.csv

from turbogr_plugin.data.readers import KUAIRAND_LOGS
from turbogr_plugin.data.store import refused_folder
from turbogr_plugin.errors import InputError

COLUMNS = (
    "user_id",
    "video_id",
    "date",
    "hourmin",
    "time_ms",
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "play_time_ms",
    "duration_ms",
    "profile_stay_time",
    "comment_stay_time",
    "is_profile_enter",
    "is_rand",
    "tab",
)

QUANTILES = (0.5 / 27_285, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1 - 0.5 / 27_285)
EXPOSURES = (100, 573, 1393, 2188, 4476, 8594, 15227, 24587, 32591, 56230, 114979, 228000)
CLICKS = (10, 274, 706, 1102, 2133, 3806, 6036, 8641, 10511, 15195, 22014, 83260)
"""Quantiles of exposures and clicks per user of KuaiRand-27K, the first and last its extremes."""

POPULARITY = (1, 2, 5, 10, 20, 50, 100, 350, 791, 1000, 15380)
ITEMS_AT_LEAST = (1.0, 0.4598, 0.2141, 0.1224, 0.0702, 0.03246, 0.0171, 0.00409, 0.001, 0.000646, 3.1e-8)
"""Share of the items of KuaiRand-27K with at least so many exposures."""

PLAYLIST = 8
IN_ORDER = 0.75
CLICKED_WHEN_ENGAGED = 0.9

_CHUNK = 1 << 20  # a multiple of PLAYLIST
_DAY_MS = 86_400_000
_DAYS = np.arange(np.datetime64("2022-04-08"), np.datetime64("2022-05-09"))
_DATES = np.array([int(str(day).replace("-", "")) for day in _DAYS], dtype=np.int32)
_BEGIN_MS = 1_649_347_200_000  # 2022-04-08 00:00 in Beijing
_SECOND_PERIOD_MS = _BEGIN_MS + 14 * _DAY_MS
_END_MS = _BEGIN_MS + len(_DAYS) * _DAY_MS


@dataclass(frozen=True, kw_only=True)
class SyntheticLogs:
    """What was written."""

    files: tuple[Path, ...]
    rows: int
    users: int
    items: int
    """Items that exist; with a scaled popularity some may have no row."""


def generate(
    output: str | Path,
    *,
    rows: int,
    users: int | None = None,
    items: int | None = None,
    seed: int = 0,
    variant: Literal["27k", "1k", "pure"] = "27k",
    progress: Callable[[str], None] | None = None,
) -> SyntheticLogs:
    """Write `rows` rows as the standard logs of KuaiRand-`variant` into the folder `output`.

    Args:
        output: folder for the logs; made when missing. Files of these names in it are replaced when all are complete.
        rows: rows in all files together, exactly.
        users: number of users; by default as many as give the published mean length (one per 11,900 rows).
        items: number of items, rounded to playlists of eight; by default one per 10 rows, as published.
        seed: another seed gives other logs with the same quantiles; in [0, 2^64).
        variant: whose file names to use.
        progress: called with one line every few million rows.

    Raises:
        InputError: a number is not positive, there are fewer rows than users, the seed is out of range, or the folder
            cannot be made.
        OSError: a file cannot be written, named in `filename`. The folder is as it was.
    """
    users = max(1, round(rows / _mean_length())) if users is None else users
    playlists = max(1, round((rows / _mean_popularity() if items is None else items) / PLAYLIST))
    if rows < 1 or users < 1 or (items is not None and items < 1) or rows < users:
        raise InputError(f"rows, users and items must be positive and rows >= users, got {rows}, {users}, {items}.")
    if not 0 <= seed < 2**64:
        raise InputError(f"seed must be in [0, 2^64), got {seed}.")
    folder = Path(output)
    with refused_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name for name in KUAIRAND_LOGS[variant])
    plan = _Plan(rows=rows, users=users, playlists=playlists, seed=seed)
    with _replace_on_success(paths) as files:
        for path, file in zip(paths, files, strict=True):
            with _naming(path):
                file.write((",".join(COLUMNS) + "\n").encode())
        for number, first in enumerate(range(0, rows, _CHUNK)):
            columns, second_half = plan.chunk(number, first, min(first + _CHUNK, rows))
            later = columns[COLUMNS.index("time_ms")] >= _SECOND_PERIOD_MS
            part = later * 2 + second_half if len(files) == 4 else later.astype(np.int64)
            for which, (path, file) in enumerate(zip(paths, files, strict=True)):
                chosen = np.flatnonzero(part == which)
                if len(chosen):
                    with _naming(path):
                        _write_rows(file, [column[chosen] for column in columns])
            if progress and number % 8 == 7:
                progress(f"{first + _CHUNK:,} of {rows:,} rows")
    return SyntheticLogs(files=paths, rows=rows, users=users, items=playlists * PLAYLIST)


def user_lengths(users: int) -> np.ndarray:
    """Exposures per user (float64 [users], ascending) at evenly spaced quantiles of the published distribution."""
    return quantile(EXPOSURES, (np.arange(users) + 0.5) / users)


def item_counts(items: int) -> np.ndarray:
    """Exposures per item (int64 [items], descending) at evenly spaced quantiles of the published distribution."""
    share = (np.arange(items) + 0.5) / items
    log_share, log_count = np.log(ITEMS_AT_LEAST)[::-1], np.log(POPULARITY)[::-1]
    # floor: an item has at least k exposures exactly when its share is below ITEMS_AT_LEAST of k
    return np.floor(np.exp(np.interp(np.log(share), log_share, log_count)) + 1e-9).astype(np.int64)


def quantile(values: tuple[int, ...], at: np.ndarray) -> np.ndarray:
    """The distribution with these values at `QUANTILES`, at other quantiles ([n], within 0 .. 1).

    Logarithms of lengths are nearly straight over the logit of the quantile, and are interpolated there.
    """
    at = np.clip(at, QUANTILES[0], QUANTILES[-1])
    return np.exp(np.interp(np.log(at / (1 - at)), [math.log(q / (1 - q)) for q in QUANTILES], np.log(values)))


def _mean_length() -> float:
    return float(user_lengths(27_285).mean())


def _mean_popularity() -> float:
    return float(item_counts(1_000_000).mean())


class _Plan:
    """Everything that chunks share: who has which rows, and which visit goes to which playlist."""

    def __init__(self, *, rows: int, users: int, playlists: int, seed: int) -> None:
        self._seed = seed
        self._users, self._items = users, playlists * PLAYLIST
        keys = np.random.default_rng((seed, 0)).integers(0, 2**63, size=(4, 4), dtype=np.uint64)
        self._rank_key, self._visit_key, self._user_key, self._item_key = keys
        rank = permuted(np.arange(users, dtype=np.uint64), users, self._rank_key).astype(np.float64)
        at = (rank + 0.5) / users
        lengths = quantile(EXPOSURES, at)
        self._click_rate = quantile(CLICKS, at) / lengths
        self._offsets = np.arange(users + 1) + _scaled(lengths, rows - users)  # at least one row each
        self._visits = -(-rows // PLAYLIST)
        self._playlist_ends = _scaled(item_counts(playlists).astype(np.float64), self._visits)[1:]

    def chunk(self, number: int, first: int, last: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Columns of the rows first .. last - 1, shuffled, and whether each belongs to the second half of the users."""
        rng = np.random.Generator(np.random.Philox(key=np.array([self._seed, number + 1], dtype=np.uint64)))
        row = np.arange(first, last)
        count = len(row)
        user = np.searchsorted(self._offsets, row, side="right") - 1
        visit = np.arange(first // PLAYLIST, -(-last // PLAYLIST), dtype=np.uint64)
        playlist = np.searchsorted(self._playlist_ends, permuted(visit, self._visits, self._visit_key), side="right")
        place = np.tile(np.arange(PLAYLIST), (len(visit), 1))
        shuffled = np.flatnonzero(rng.random(len(visit)) >= IN_ORDER)
        place[shuffled] = np.argsort(rng.random((len(shuffled), PLAYLIST)), axis=1)
        item = (playlist[:, None] * PLAYLIST + place).reshape(-1)[:count].astype(np.uint64)
        # A visit may continue with the next user (then both have a part of it); who engages is drawn per visit.
        step = row % PLAYLIST
        engaged = rng.random(len(visit), dtype=np.float32).repeat(PLAYLIST)[:count] * CLICKED_WHEN_ENGAGED
        click = (engaged < self._click_rate[user]) & (rng.random(count, dtype=np.float32) < CLICKED_WHEN_ENGAGED)
        time = self._times(row - self._offsets[user], np.diff(self._offsets)[user], step, rng)
        chance = rng.random((6, count), dtype=np.float32)
        duration = 5_000 + (chance[5] * 120_000).astype(np.int32)
        zero = np.zeros(count, dtype=np.int8)
        day, hour = np.divmod(time - _BEGIN_MS, _DAY_MS)
        columns = [
            permuted(user.astype(np.uint64), self._users, self._user_key).astype(np.int64),
            permuted(item, self._items, self._item_key).astype(np.int64),
            _DATES[day],
            (hour // 3_600_000 * 100).astype(np.int32),
            time,
            click.astype(np.int8),
            (click & (chance[0] < 0.0441)).astype(np.int8),
            (click & (chance[1] < 0.003)).astype(np.int8),
            (click & (chance[2] < 0.006)).astype(np.int8),
            (click & (chance[3] < 0.003)).astype(np.int8),
            (chance[4] < 0.00048).astype(np.int8),
            (click & (chance[5] < 0.6879)).astype(np.int8),
            (duration * np.where(click, chance[0], chance[0] * 0.1)).astype(np.int32),
            duration,
            zero,
            (click * (chance[1] * 9_000)).astype(np.int32) * (chance[2] < 0.1),
            zero,
            zero,
            (chance[3] * 15).astype(np.int8),
        ]
        order = rng.permutation(count)
        return [column[order] for column in columns], (user >= self._users // 2)[order].astype(np.int64)

    @staticmethod
    def _times(nth: np.ndarray, length: np.ndarray, step: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Ascending times: rows of a visit half a unit apart, visits of eight rows eight units apart."""
        units = (nth - step) + 0.5 * step + 0.4 * rng.random(len(nth)) + PLAYLIST
        return _BEGIN_MS + ((_END_MS - _BEGIN_MS) * (units / (length + 2 * PLAYLIST))).astype(np.int64)


def _scaled(weights: np.ndarray, total: int) -> np.ndarray:
    """Offsets (int64 [n + 1], from 0 to `total`) of shares of `total` in proportion to `weights` [n]."""
    ends = np.cumsum(weights)
    return np.concatenate(([0], np.rint(ends * (total / ends[-1])).astype(np.int64)))


def permuted(values: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of 0 .. size - 1 that looks random: a Feistel network, walked until the result is in range.

    Args:
        values: uint64 [n], below `size`.
        size: number of values, up to 2^62.
        keys: uint64 [rounds].
    """
    half = np.uint64((max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    result = values.copy()
    todo = np.arange(len(values))
    while len(todo):
        left, right = result[todo] >> half, result[todo] & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        result[todo] = (left << half) | right
        todo = todo[result[todo] >= size]
    return result


@contextmanager
def _replace_on_success(paths: tuple[Path, ...]) -> Iterator[list[BinaryIO]]:
    """Open new files in the folder of `paths` that take their places when the block ends, and are removed if it raises.

    They are called `tmp-<pid>.<name>`, which no reader takes for a log. What a killed run left is removed first; a run
    that is still alive holds a lock on its own.
    """
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path} is a folder where a log must go. Name another output, or remove it.")
        _remove_leftovers(path)
    asides = [path.with_name(f"tmp-{os.getpid()}.{path.name}") for path in paths]
    try:
        with ExitStack() as stack:
            files: list[BinaryIO] = []
            for path, aside in zip(paths, asides, strict=True):
                stack.enter_context(_naming(path))  # closing writes what is left in the buffer
                files.append(stack.enter_context(open(aside, "wb")))
                fcntl.flock(files[-1], fcntl.LOCK_EX)
            yield files
            for path, file in zip(paths, files, strict=True):
                with _naming(path):
                    file.flush()
                    os.fsync(file.fileno())
            for path, aside in zip(paths, asides, strict=True):
                os.replace(aside, path)
    except BaseException:
        for aside in asides:
            aside.unlink(missing_ok=True)
        raise


def _remove_leftovers(path: Path) -> None:
    for left in path.parent.glob(f"tmp-*.{path.name}"):
        try:
            with open(left, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        except OSError:  # locked by a run that is alive, or not ours to remove
            continue


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give errors of the block the name `path`: those of an open file carry none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _write_rows(file: BinaryIO, columns: list[np.ndarray]) -> None:
    table = pyarrow.table([pyarrow.array(column) for column in columns], names=list(COLUMNS))
    pyarrow.csv.write_csv(table, file, pyarrow.csv.WriteOptions(include_header=False, batch_size=1 << 16))
