"""Equal times: runs of rows of one user at one time, and the exact duplicates among them.

Rows come sorted by user, time and place in the file. Two rows that agree in user, item and time need not be
neighbours (a, b, a at one time), but they are in one run, so runs are never cut and each is looked at on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def tie_runs(batches: Iterable[list[np.ndarray]]) -> Iterator[list[np.ndarray]]:
    """Re-cut sorted batches of [user, item, time] columns so that none ends inside a run of equal user and time."""
    rest: list[np.ndarray] = []
    for batch in batches:
        columns = [np.concatenate(pair) for pair in zip(rest, batch, strict=True)] if rest else batch
        user, _, when = columns
        differs = np.flatnonzero((user[1:] != user[:-1]) | (when[1:] != when[:-1]))
        cut = int(differs[-1]) + 1 if len(differs) else 0
        if cut:
            yield [column[:cut] for column in columns]
        rest = [column[cut:] for column in columns]
    if rest and len(rest[0]):
        yield rest


def count_ties(user: np.ndarray, item: np.ndarray, when: np.ndarray) -> tuple[int, np.ndarray]:
    """Ties and repeats among whole runs.

    Args:
        user: int64 [n], sorted.
        item: int64 [n].
        when: int64 [n], sorted within a user.

    Returns:
        The number of neighbouring rows with equal user and time, and the places (int64 [r], ascending) of the rows
        that repeat an earlier row's user, item and time.
    """
    tied = (user[1:] == user[:-1]) & (when[1:] == when[:-1])
    in_run = np.flatnonzero(np.concatenate(([False], tied)) | np.concatenate((tied, [False])))
    if not len(in_run):
        return 0, np.empty(0, dtype=np.int64)
    order = in_run[np.lexsort((item[in_run], when[in_run], user[in_run]))]  # stable: the first of equals stays first
    same = (np.diff(user[order]) == 0) & (np.diff(when[order]) == 0) & (np.diff(item[order]) == 0)
    return int(np.count_nonzero(tied)), np.sort(order[1:][same])
