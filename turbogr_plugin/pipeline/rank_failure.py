"""Which rank failed first, and why, told to all ranks through the process group's store.

A rank that raises in a step leaves the others in a collective that never completes. They get an exception of their own
(a timeout; "connection closed by peer" once the failed process has ended) which names no cause. So the failing rank
writes its message to the store that the process group was started with, and whoever then fails in a collective raises
that message in place of its own.

Rank 0 usually hosts that store, so the message must be out before its process ends. Hence the other ranks look for it
not only when they fail, but also, from a thread, once a step takes longer than a second; and the failing rank goes on
only when all have heard, or after a few seconds.

Left out: ending the step of a rank that waits in a collective. No collective can be taken back on all backends; the
group's timeout or the end of the failed process does it. A process that is killed leaves no message.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # as dist has them, for type checkers

from turbogr_plugin.errors import InputError

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between two looks of the thread; a step that it finds twice is looked up in the store
_FIRST = "first"  # key of the first failure


class RankFailure(RuntimeError):
    """A rank failed, maybe this one; the message names it and repeats what it raised.

    Attributes:
        rank: of the whole world.
        reason: the type of its exception and the message.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[RankFailure], tuple[int, str]]:
        return type(self), (self.rank, self.reason)


class RankInputError(RankFailure, InputError):
    """The input of a rank is bad, which all ranks raise as bad input; the message names the rank and says what is."""


def reason_of(exception: BaseException) -> str:
    """What another rank is told of an exception."""
    return f"{type(exception).__name__}: {exception}"


class Failures:
    """The first failure of a rank, as all ranks of the world learn of it.

    One object serves one pipeline, and all ranks make theirs in the same order: the n-th of a rank talks to the n-th of
    the others, so that a failure of an earlier pipeline is not taken for one of this.
    """

    def __init__(self, store: Store | None, *, patience: float = 5.0) -> None:
        """Args:
        store: of the default process group; None where there is none, and a failure is nobody else's business.
        patience: seconds that a failing rank waits to be heard.
        """
        self._patience = patience
        self._rank = 0
        self._others: list[int] = []
        self._told: RankFailure | None = None
        self._step: int | None = None
        self._steps = 0
        self._lock = threading.Lock()  # between the thread that looks and the thread that steps
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Store | None = None
        if store is not None:
            self._rank = dist.get_rank()
            self._others = [rank for rank in range(dist.get_world_size()) if rank != self._rank]
        if store is not None and self._others:
            number = store.add(f"turbogr/failures/of_rank/{self._rank}", 1)
            self._store = PrefixStore(f"turbogr/failures/{number}", store)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block (a step) in which this rank may have to wait for others: it hears of their failures meanwhile."""
        if self._store is None:
            yield
            return
        if self._thread is None:
            weakref.finalize(self, self._ended.set)
            arguments = (weakref.ref(self), self._ended)
            self._thread = threading.Thread(target=_look_out, args=arguments, name="turbogr-failures", daemon=True)
            self._thread.start()
        with self._lock:
            self._steps += 1
            self._step = self._steps
        try:
            yield
        finally:
            with self._lock:  # not while the thread is in the store: this process may end next
                self._step = None

    def report(self, rank: int, exception: BaseException) -> None:
        """Tells the others that `rank` (this one) has raised; returns when they know, or after a few seconds.

        Only the first failure of the world counts. A RankFailure is known to the others already.
        """
        if self._store is None or isinstance(exception, RankFailure):
            return
        message = json.dumps({"rank": rank, "reason": reason_of(exception)})
        try:
            self._store.compare_set(_FIRST, "", message)
            with self._lock:
                self._look()
            deadline = time.monotonic() + self._patience
            deaf = self._others
            while deaf and time.monotonic() < deadline:
                time.sleep(0.02)
                deaf = [other for other in deaf if not self._store.check([_heard(other)])]
        except RuntimeError as error:  # the store's host is gone
            _logger.warning("rank %d cannot tell the others of its failure: %s", rank, reason_of(error))
            return
        if deaf:
            _logger.warning("no answer from ranks %s to the failure of rank %d", deaf, rank)

    def explain(self, exception: BaseException) -> BaseException:
        """What to raise in place of `exception`.

        Returns:
            A RankFailure with the message of another rank that failed before, caused by `exception`; `exception` itself
            where there is none, or where it is a RankFailure already.
        """
        if self._store is None or isinstance(exception, RankFailure):
            return exception
        with self._lock:
            self._look()
            told = self._told
        if told is None or told.rank == self._rank:
            return exception
        failure = RankFailure(told.rank, told.reason)
        failure.__cause__ = exception
        return failure

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look_if_stuck(self, step: int | None) -> int | None:
        """Looks into the store if the step is still the one of the last call; returns the step of now."""
        with self._lock:
            if self._step is not None and self._step == step:
                self._look()
            return self._step

    def _look(self) -> None:
        """Asks the store, unless this rank knows already; the lock is held."""
        if self._told is not None or self._store is None:
            return
        try:
            if self._store.check([_FIRST]):
                first = json.loads(self._store.get(_FIRST))
                self._told = RankFailure(first["rank"], first["reason"])
                self._store.set(_heard(self._rank), "")
        except RuntimeError as error:  # the store's host is gone; what this rank raises itself is all there is to say
            _logger.debug("the store does not answer: %s", reason_of(error))


def _heard(rank: int) -> str:
    return f"heard/{rank}"


def _look_out(failures: weakref.ref[Failures], ended: threading.Event) -> None:
    """The thread of `watched`: it reads no store as long as steps follow each other, and holds no Failures alive."""
    step: int | None = None
    while not ended.wait(_LOOK_SECONDS):
        own = failures()
        if own is None:
            return
        step = own._look_if_stuck(step)
        del own
