from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from turbogr_plugin.data.tie_runs import count_ties, tie_runs


@pytest.mark.parametrize("seed", range(20))
def test_ties_and_repeats_in_any_batches_are_those_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 80))
    user, time = np.sort(rng.integers(0, 4, count)), rng.integers(0, 5, count)
    order = np.lexsort((time, user))
    user, time = user[order], time[order]
    item = rng.integers(0, 4, count)
    borders = [0, *np.sort(rng.integers(0, count + 1, int(rng.integers(0, 9)))).tolist(), count]
    batches = [[user[a:b], item[a:b], time[a:b]] for a, b in pairwise(borders)]

    ties, repeats, rows = 0, [], 0
    for u, i, t in tie_runs(batches):
        some_ties, some_repeats = count_ties(u, i, t)
        assert rows == 0 or (user[rows - 1], time[rows - 1]) != (u[0], t[0]), "a run was cut"
        assert u.tolist() == user[rows : rows + len(u)].tolist() and i.tolist() == item[rows : rows + len(u)].tolist()
        ties += some_ties
        repeats += (some_repeats + rows).tolist()
        rows += len(u)

    pairs = list(zip(user.tolist(), time.tolist(), strict=True))
    triples = list(zip(user.tolist(), time.tolist(), item.tolist(), strict=True))
    assert rows == count
    assert ties == sum(a == b for a, b in pairwise(pairs))
    assert repeats == [n for n, triple in enumerate(triples) if triple in triples[:n]]
