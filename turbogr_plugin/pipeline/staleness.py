"""How stale the lookup of a batch may be: how many updates of batches before it are still to come when it reads.

    staleness 0   the lookup of batch j sees the update of batch j - 1: what training without a pipeline computes
    staleness s   it sees that of batch j - s - 1, and of none later

Staleness is of the tables alone: the dense part is always updated by batch j - 1 when batch j comes. Lookups keep the
order of the batches, so that from one batch to the next staleness grows by one at most.

Source: TurboGR paper, section 4.2.2 (semi-asynchronous training, s = 1) and appendix C (its bound).
"""

from __future__ import annotations


class Staleness:
    """The staleness of each batch.

    Args:
        staleness: of all batches from `start_batch` on.
        start_batch: before it 0.

    Raises:
        ValueError: numbers that are not whole or negative.
    """

    def __init__(self, staleness: int, start_batch: int = 0) -> None:
        self._start = _whole("start_batch", start_batch)
        self.set(staleness)

    def set(self, staleness: int) -> None:
        """From now on, for batches that have not been looked up."""
        self._staleness = _whole("staleness", staleness)

    @property
    def largest(self) -> int:
        """Of any batch to come."""
        return self._staleness

    def of(self, index: int) -> int:
        """That of batch `index`."""
        return self._staleness if index >= self._start else 0


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0, got {value!r}")
    return value
