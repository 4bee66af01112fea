"""A thread that works in order."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from turbogr_plugin.backend.worker import Worker

CPU = torch.device("cpu")


def test_work_is_done_in_order_on_one_thread_beside_the_caller() -> None:
    worker, seen, gate = Worker(CPU, "test"), list[tuple[int, int]](), threading.Event()
    worker.submit(lambda: gate.wait(10))

    def note(number: int) -> int:
        seen.append((number, threading.get_ident()))
        return 2 * number

    futures = [worker.submit(lambda number=number: note(number)) for number in range(5)]  # type: ignore[misc]
    assert not seen, "the caller went on"
    gate.set()
    assert [future.result(10) for future in futures] == [0, 2, 4, 6, 8]
    assert [number for number, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_an_exception_belongs_to_its_work_and_ends_nothing() -> None:
    worker = Worker(CPU, "test")

    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        worker.submit(fail).result(10)
    assert worker.submit(lambda: 1).result(10) == 1


def _ends(thread: threading.Thread) -> bool:
    end = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    return not thread.is_alive()


def test_closing_ends_the_thread_after_what_it_was_given_and_so_does_being_collected() -> None:
    worker = Worker(CPU, "closed")
    last = worker.submit(lambda: 3)
    worker.close()
    assert last.result(10) == 3
    assert _ends(worker._thread)
    with pytest.raises(RuntimeError, match="closed is closed"):
        worker.submit(lambda: 3)
    thread = (worker := Worker(CPU, "collected"))._thread
    del worker
    gc.collect()
    assert _ends(thread)


def test_a_done_piece_of_work_is_not_held() -> None:
    worker = Worker(CPU, "test")

    class Held:
        pass

    held = Held()
    gone = threading.Event()

    weakref.finalize(held, gone.set)
    worker.submit(lambda held=held: None).result(10)  # type: ignore[misc]
    del held
    gc.collect()
    assert gone.wait(10)
