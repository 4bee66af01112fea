"""The host as it comes: twin tests compare it with itself under an adaptation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from turbogr_plugin.backend.adaptation import Adaptation, apply, undo


@contextmanager
def without(adaptations: Sequence[Adaptation]) -> Iterator[None]:
    """The block sees the host's own code; behind it the adaptations hold, whoever had applied them before."""
    for adaptation in adaptations:
        undo(adaptation)
    try:
        yield
    finally:
        ours(adaptations)


def ours(adaptations: Sequence[Adaptation]) -> None:
    """Applies adaptations, all of which have to fit the installed host."""
    for adaptation in adaptations:
        outcome = apply(adaptation)
        assert outcome.status != "refused", outcome
