"""A thread that carries out work in the order in which it is given, on the device of its maker.

Collectives of one process group must start in one order on every rank. Work of one thread does; and the host can wait
for sizes there while the caller's thread goes on.

The thread is a daemon: a peer that never answers keeps it waiting in a collective, and must not keep the process from
ending. It ends when the worker is closed or collected. Left out: priorities, and taking work back.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from turbogr_plugin.backend.streams import device_module

T = TypeVar("T")

_Work = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """One thread and what waits for it.

    Args:
        device: made the current one of the thread.
        name: of the thread, as debuggers and profilers show it.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        index = None if device.type == "cpu" else torch.accelerator.current_device_index()
        if device.index is not None:
            index = device.index
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_carry_out, args=(self._work, device.type, index), name=name, daemon=True)
        thread.start()
        self._thread = thread
        self.close = weakref.finalize(self, self._work.put, None)
        """Ends the thread after what it has been given."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Gives work to the thread; the future has its result or its exception."""
        if not self.close.alive:
            raise RuntimeError(f"worker {self._thread.name} is closed")
        future: Future[T] = Future()
        self._work.put((future, work))
        return future


def _carry_out(work: queue.SimpleQueue[_Work | None], device_type: str, index: int | None) -> None:
    if index is not None:
        device_module(torch.device(device_type)).set_device(index)
    while (given := work.get()) is not None:
        future, action = given
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)
        # Else the last work's tensors live until the next.
        del given, future, action
