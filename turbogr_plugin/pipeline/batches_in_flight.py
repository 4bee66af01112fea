"""Batches in flight, by the iterators that they come from.

A batch belongs to its iterator: when progress is called with another one, those of the first wait until it comes back,
so that batches of an evaluation never get into training, nor those of training into an evaluation. An iterator that
has ended may begin again as the same object (a loader with persistent workers): nothing of it is remembered.

Batches are numbered, those of training and those of evaluation apart: the number is what schedules and profiles go by.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext


class BatchSource:
    """An iterator and its batches in flight, of which the first is the next for the dense part."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator: Iterator[Any] | None = iterator
        self.contexts: deque[FineGrainedContext] = deque()
        self.empty = False
        """Whether the iterator has ended on this rank."""
        self.ended = False
        """Whether the ranks have agreed that there is nothing more."""
        try:
            self._reference: weakref.ref[Any] | None = weakref.ref(iterator)
        except TypeError:  # iterators of lists, islice and others
            self._reference = None

    def park(self) -> None:
        """Keeps the iterator no longer than its user does, where its type allows that."""
        if self._reference is not None:
            self.iterator = None

    def forget(self) -> None:
        """Lets go of the iterator; contexts that are through still hold this object."""
        self.iterator = self._reference = None

    def take_up(self, iterator: Iterator[Any]) -> bool:
        """Whether it is that iterator's; then it is used again."""
        if self.of() is not iterator:
            return False
        self.iterator = iterator
        return True

    def of(self) -> Iterator[Any] | None:
        """The iterator, if it is still there."""
        return self._reference() if self.iterator is None and self._reference is not None else self.iterator

    def is_over(self) -> bool:
        """Whether nothing can come of it any more; to be asked while the lanes rest."""
        return self.of() is None or (self.ended and (not self.contexts or self.contexts[0].exhausted))

    def is_unreachable(self) -> bool:
        """Whether nobody else holds an iterator of a type that allows no weak reference: it cannot come back."""
        return self._reference is None and sys.getrefcount(self.iterator) == 2


class BatchesInFlight:
    """Those of one pipeline.

    Args:
        make: the context of a batch, by its number.
    """

    def __init__(self, make: Callable[[int], FineGrainedContext]) -> None:
        self._make = make
        self._numbers = {True: 0, False: 0}
        self._current: BatchSource | None = None
        self._parked: list[BatchSource] = []

    def take(self, iterator: Iterator[Any], rest: Callable[[], None]) -> BatchSource:
        """The source of an iterator, which becomes the current one.

        Args:
            iterator: of batches.
            rest: waits until nobody works on batches; called before another source is put aside.
        """
        current = self._current
        if current is not None and current.iterator is iterator:
            return current
        if current is not None:
            rest()
            if current.is_over():
                self.drop(current)
            else:
                if current.ended:
                    # How many were made after the end depends on when a rank learned of it; numbers must not.
                    there = [context.agreed and not context.exhausted for context in current.contexts]
                    self._take_back(current, there.count(True))
                current.park()
                self._parked.append(current)
        self._parked = [source for source in self._parked if not (source.is_over() or source.is_unreachable())]
        self._current = next((source for source in self._parked if source.take_up(iterator)), None)
        if self._current is None:
            self._current = BatchSource(iterator)
        else:
            self._parked.remove(self._current)
        return self._current

    def at(self, source: BatchSource, at: int, *, training: bool) -> FineGrainedContext | None:
        """The batch `at` places behind the next one for the dense part; None: the ranks know that there is none."""
        if at < len(source.contexts):
            return source.contexts[at]
        if source.ended and at > 0:
            return None
        context = self._make(self._numbers[training])
        self._numbers[training] += 1
        context.source, context.training = source, training
        source.contexts.append(context)
        return context

    def number_at(self, source: BatchSource, at: int, *, training: bool) -> int:
        """The number of that batch, which need not be there yet."""
        if at < len(source.contexts):
            return source.contexts[at].number
        return self._numbers[training] + at - len(source.contexts)

    def drop(self, source: BatchSource) -> None:
        """Forgets a source; the batches that follow get the numbers of those that it has in flight."""
        self._take_back(source, 0)
        source.forget()
        if self._current is source:
            self._current = None

    def _take_back(self, source: BatchSource, kept: int) -> None:
        """Forgets all but the first batches of a source; their numbers come again, unless there are later ones."""
        while len(source.contexts) > kept:
            context = source.contexts.pop()
            if self._numbers[context.training] == context.number + 1:
                self._numbers[context.training] = context.number

    def clear(self) -> None:
        """Forgets all."""
        self._numbers = {True: 0, False: 0}
        self._current, self._parked = None, []

    def contexts(self) -> list[FineGrainedContext]:
        """All batches in flight."""
        sources = [*([] if self._current is None else [self._current]), *self._parked]
        return [context for source in sources for context in source.contexts]
