"""What test_fine_grained_pipeline.py runs on the ranks of a pool: TrainPipelineFineGrained under simnpu's checker.

Two things make a missing wait visible in every run, whichever thread happens to be quicker. The checker goes by thread:
what a lane's thread has waited for orders nothing that another thread launches. And `Settled` lets the host finish all
that it has been given and then writes to freed memory of every size, on each stream: a tensor that has been freed while
another stream reads is in use again at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.pipeline import fine_grained_models, fine_grained_runs, small_model
from turbogr_plugin import simnpu
from turbogr_plugin.backend.streams import Stream, on_stream
from turbogr_plugin.pipeline import TrainPipelineFineGrained, fine_grained_stages
from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext
from turbogr_plugin.pipeline.lanes import StageRun
from turbogr_plugin.pipeline.schedule import Stage
from turbogr_plugin.sharding import exchange_hooks

_WARM = 4  # steps after which only what every step does is left
#: Threads that may wait for the device: sizes of the all-to-all, batches that are not pinned, sizes of the exchange.
LANES = ("turbogr-load", "turbogr-sparse", "gradient exchange")


@contextlib.contextmanager
def watched(races: list[str]) -> Iterator[None]:
    """Adds what the checker reports while the block runs."""
    simnpu.check_streams(True, by_thread=True)
    simnpu.reset()
    try:
        yield
        races += _races()
    finally:
        simnpu.check_streams(True)
        simnpu.reset()


def _races() -> list[str]:
    return [f"{race.detail} ({race.count})" for race in simnpu.races()]


def compared(*, case: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """As in fine_grained_runs, on npu, with the races."""
    races: list[str] = []
    with watched(races):
        found = fine_grained_runs.compared(case={"device_type": "npu", **case}, **arguments)
    return {**found, "races": races}


def against_the_simulation(*, case: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """As in fine_grained_runs, on npu, with the races."""
    races: list[str] = []
    with watched(races):
        found = fine_grained_runs.against_the_simulation(case={"device_type": "npu", **case}, **arguments)
    return {**found, "races": races}


def dyadic(**arguments: Any) -> dict[str, Any]:
    """As in fine_grained_runs, on npu, with the races."""
    races: list[str] = []
    with watched(races):
        found = fine_grained_runs.dyadic(device_type="npu", **arguments)
    return {**found, "races": races}


class _OnHostOnly(StageRun):
    """A stage that others wait for on the host alone: the event is left out."""

    def __init__(self, of: StageRun) -> None:
        self._of = of

    def wait(self, stream: Stream | None = None) -> None:
        self._of.wait()

    def done(self) -> bool:
        return self._of.done()

    def error(self) -> BaseException | None:
        return self._of.error()


class Settled(TrainPipelineFineGrained[Any, Any]):
    """See the module. `without` names a wait that is left out: "STAGE after STAGE", or "lanes after the caller"."""

    def __init__(self, *args: Any, without: str = "", **kwargs: Any) -> None:
        self._stage, _, self._other = without.partition(" after ")
        super().__init__(*args, **kwargs)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        output = super().progress(dataloader_iter)
        self.settle()
        return output

    def settle(self) -> None:
        """The host catches up; then everybody allocates."""
        for context in [*self._unfinished, *self._in_flight.contexts()]:
            for run in context.runs.values():
                run.error()
        streams = [*self._streams.values(), self._current_stream()]
        if getattr(self._model, "_exchange", None) is not None:
            streams.append(self._model._exchange._stream)
        for stream in streams:
            with on_stream(stream), torch.no_grad():
                claimed = [torch.zeros(128 * (1 + size // 3), device=self._device) for size in range(60)]
                claimed.clear()

    def _run(self, stage: Stage, context: FineGrainedContext) -> None:
        super()._run(stage, context)
        if stage.lane == "dense":
            self.settle()

    def _begin(self) -> None:
        super()._begin()
        if self._stage == "lanes" and self._before is not None:
            self._before = _OnHostOnly(self._before)

    def _submit(self, stage: Stage, context: FineGrainedContext) -> None:
        if stage.name != self._stage:
            super()._submit(stage, context)
            return
        for name in stage.waits_for:
            if name not in context.runs:
                super()._submit(self._schedule[name], context)
        whole = context.runs[self._other]
        context.runs[self._other] = _OnHostOnly(whole)
        super()._submit(stage, context)
        context.runs[self._other] = whole


@contextlib.contextmanager
def _left_out(without: str) -> Iterator[None]:
    """The other waits: what is recorded for streams, the events of `finish` and of the exchange between groups."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    wait, exchange = exchange_hooks.wait, exchange_hooks.GradientExchange
    places: dict[str, list[Any]] = {
        "record of the embeddings": [(fine_grained_stages, "record_output", nothing)],
        "record of the gradients": [(fine_grained_stages, "record_stream", nothing)],
        "event of finish": [(TrainPipelineFineGrained, "_finish", _finish_on_host)],
        "records of the exchange": [(exchange_hooks, "record_stream", nothing)],
        "exchange after the lookup": [(exchange_hooks, "wait", _only_towards_the_caller(wait))],
        "update after the exchange": [(exchange, "finish", _with_no_wait(exchange.finish, wait))],
    }
    with contextlib.ExitStack() as stack:
        for place in places.get(without, []):
            stack.enter_context(patch.object(*place))
        yield


def _finish_on_host(pipeline: Any) -> None:
    for context in pipeline._unfinished:
        for run in context.runs.values():
            run.wait()
    pipeline._unfinished.clear()


def _only_towards_the_caller(wait: Any) -> Any:
    def only(stream: Stream, producer: Stream) -> None:
        if producer in _EXCHANGE_STREAMS:
            wait(stream, producer)

    return only


def _with_no_wait(finish: Any, wait: Any) -> Any:
    def only(stream: Stream, producer: Stream) -> None:
        if producer not in _EXCHANGE_STREAMS:
            wait(stream, producer)

    def without(exchange: Any, *args: Any) -> None:
        with patch.object(exchange_hooks, "wait", only):
            finish(exchange, *args)

    return without


_EXCHANGE_STREAMS: list[Stream] = []


def _copy(batch: small_model.Batch) -> small_model.Batch:
    return small_model.Batch(batch.floats.clone(), batch.ids, batch.label.clone())


def stepped(
    *,
    case: dict[str, Any],
    steps: int,
    options: dict[str, Any] | None = None,
    without: str = "",
    evaluate_at: tuple[int, ...] = (),
    read_at: tuple[int, ...] = (),
    pin: bool = False,
    fill: bool = False,
) -> dict[str, Any]:
    """Trains in settled steps; what the checker saw, and who waited for the device.

    Args:
        case: of fine_grained_models.
        steps: how many.
        options: of the pipeline.
        without: the wait that is left out.
        evaluate_at: steps before which two batches of another iterator are evaluated.
        read_at: steps before which the tables are read, as a user would for a checkpoint.
        pin: whether the batches are pinned already.
        fill: whether only rank 0 has all batches, and the others go on with copies of their last one.
    """
    races: list[str] = []
    syncs: dict[str, int] = {}
    model = fine_grained_models.build(**{"device_type": "npu", **case})
    exchange = getattr(model, "_exchange", None)
    _EXCHANGE_STREAMS[:] = [] if exchange is None else [exchange._stream]
    made = fine_grained_models.batches(case["name"], steps)
    if pin:
        made = [batch.pin_memory() for batch in made]
    filled: dict[str, Any] = {}
    if fill:
        made = made if dist.get_rank() == 0 else made[:3]
        filled = {"when_exhausted": "fill", "empty_batch": _copy}
    source, other = iter(made), iter(fine_grained_models.batches(case["name"], 100, 77))
    waits = without if " after " in without else ""
    # In the caller's thread the backward pass is his: else it would know what every thread has waited for.
    with watched(races), _left_out(without), torch.autograd.set_multithreading_enabled(False):
        pipeline: Any = Settled(
            *(model, fine_grained_models.dense_optimizer(model), model.device),
            **{**(options or {}), **filled, "without": waits},
        )
        losses = []
        for step in range(steps):
            if step in evaluate_at:
                model.eval()
                with torch.no_grad():
                    for _ in range(2):
                        pipeline.progress(other)
                model.train()
            if step in read_at:
                fine_grained_models.local_values(model)
            if step == _WARM:
                races += _races()
                simnpu.reset()
            losses.append(pipeline.progress(source))
            for sync in simnpu.host_syncs() if step >= _WARM else []:
                syncs[f"{sync.thread}: {sync.operator} at {' < '.join(sync.where[:8])}"] = sync.count
        pipeline.detach()
        values = fine_grained_models.local_values(model)
        shown = torch.stack(losses).tolist()
        pipeline.close()
    return {
        "losses": shown,
        "races": races,
        "syncs": {place: count for place, count in syncs.items() if place.partition(":")[0] in LANES},
        "callers_syncs": {place: count for place, count in syncs.items() if place.partition(":")[0] not in LANES},
        "inline": pipeline._inline,
        "values": sum(float(value.double().abs().sum()) for value in values.values()),
    }
