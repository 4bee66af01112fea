"""Lanes: where the stages of a pipeline run, one after the other within a lane, side by side with the other lanes.

A lane is a thread and a stream. What is handed to it runs in that order; before a stage starts, the lane's thread waits
until the stages that it needs have been issued, and its stream waits for their events, so that the host never waits
for the device. On CPU, where there are no streams, the threads do all of it.

A stage sees the world of whoever handed it out: grad mode, inference mode, autocast; and the device of the pipeline.
A stage that fails fails all later ones of its lane, since their collectives would no longer meet those of other ranks.

Left out: priorities, and ending a stage that hangs in a collective (the process group's timeout does that).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from turbogr_plugin.backend.streams import Event, Stream, current_stream, device_module, new_event, on_stream


def indexed(device: torch.device) -> torch.device:
    """The device with its index: that of the current one where it has none."""
    if device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index() if device.index is None else device.index)


class StageRun:
    """A stage of a batch that has been handed to a lane."""

    def __init__(self, device: torch.device) -> None:
        self._issued: Future[None] = Future()
        self._event: Event = new_event(device)

    def run(self, work: Callable[[], None], needs: Sequence[StageRun], stream: Stream) -> None:
        """Runs it in this thread, on `stream`, and raises what it raises."""
        for other in needs:
            other.wait(stream)
        work()
        self._event.record(stream)  # type: ignore[arg-type]
        self._issued.set_result(None)

    def run_for_others(self, work: Callable[[], None], needs: Sequence[StageRun], stream: Stream) -> None:
        """Runs it in this thread, on `stream`; what it raises is kept for those who wait."""
        try:
            self.run(work, needs, stream)
        except BaseException as error:
            self._issued.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """In place of running it."""
        self._issued.set_exception(error)

    def done(self) -> bool:
        """Whether the host has issued it (its work on the device may go on)."""
        return self._issued.done()

    def error(self) -> BaseException | None:
        """What it raised; waits for the host."""
        return self._issued.exception()

    def wait(self, stream: Stream | None = None) -> None:
        """Waits until the host has issued it; later work of `stream` then waits for its work on the device.

        Raises:
            BaseException: what the stage raised.
        """
        self._issued.result()
        if stream is not None:
            stream.wait_event(self._event)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ThreadState:
    """What torch keeps per thread and the work of a stage depends on."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def here(cls, device: torch.device) -> ThreadState:
        """That of this thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in dict.fromkeys(("cpu", device.type))
            ),
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The block runs in this state."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.autocast_cache))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


class Lane(Protocol):
    """Where stages run."""

    def submit(self, work: Callable[[], None], needs: Sequence[StageRun]) -> StageRun:
        """Hands out work that starts when `needs` have been issued."""

    def close(self) -> None:
        """Ends the lane once it has worked off what it has."""


class CallersLane:
    """The thread of the caller: what is submitted runs at once.

    Args:
        device: of the work.
        stream: None takes the current one at each stage.
    """

    def __init__(self, device: torch.device, stream: Stream | None = None) -> None:
        self._device, self._stream = device, stream

    def submit(self, work: Callable[[], None], needs: Sequence[StageRun]) -> StageRun:
        """See Lane."""
        # What it raises is raised here: later stages of this thread may use the process group in which other ranks
        # wait for this one, and would meet its collectives with others.
        run = StageRun(self._device)
        with on_stream(self._stream):
            run.run(work, needs, current_stream(self._device) if self._stream is None else self._stream)
        return run

    def close(self) -> None:
        """See Lane."""


@dataclass
class _Job:
    work: Callable[[], None]
    needs: Sequence[StageRun]
    run: StageRun
    state: ThreadState


class ThreadLane:
    """A thread of its own; it ends with `close`.

    Args:
        name: of the thread.
        device: of the work, with an index where its type has several.
        stream: of the lane.
    """

    def __init__(self, name: str, device: torch.device, stream: Stream) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: the interpreter must be able to end while a lane hangs in a collective that nobody joins.
        self._thread = threading.Thread(
            target=_work_off, args=(self._jobs, device, stream), name=f"turbogr-{name}", daemon=True
        )
        self._thread.start()

    def submit(self, work: Callable[[], None], needs: Sequence[StageRun]) -> StageRun:
        """See Lane."""
        run = StageRun(self._device)
        self._jobs.put(_Job(work, needs, run, ThreadState.here(self._device)))
        return run

    def close(self, timeout: float | None = 5.0) -> None:
        """See Lane.

        Args:
            timeout: seconds to wait for the thread; it may hang in a collective.
        """
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)


def _work_off(jobs: queue.SimpleQueue[_Job | None], device: torch.device, stream: Stream) -> None:
    """The thread; it knows the queue and not the lane, so that the lane and the pipeline can be freed."""
    if device.type != "cpu":
        device_module(device).set_device(device)
    # Weakly: an exception holds its frames, and with them the pipeline.
    failed: weakref.ref[StageRun] | None = None
    with on_stream(stream):
        while (job := jobs.get()) is not None:
            if failed is not None:
                run = failed()
                error = None if run is None else run.error()
                job.run.fail(error or RuntimeError("an earlier stage of this lane has failed"))
                del run, error
            else:
                with job.state.entered():
                    job.run.run_for_others(job.work, job.needs, stream)
                if job.run.error() is not None:
                    failed = weakref.ref(job.run)
            del job  # it holds a batch, and the pipeline
