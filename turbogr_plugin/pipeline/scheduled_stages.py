"""How TrainPipelineFineGrained works its schedule off: a call of progress hands every stage that is due to its lane.

A step goes through the rows of the table in order. A row may be due for several batches (when the pipeline is filled,
when the staleness grows) or for none. Stages of the dense part run at once, in the thread of the caller, and wait for
those of the other lanes that they need; what the sparse lane raises is raised there.

Left out: what the stages do (`fine_grained_stages`) and what a user calls (`train_pipeline_fine_grained`).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.profiler import record_function
from torchrec.distributed.train_pipeline.types import PipelineState

from turbogr_plugin.backend.streams import Stream, new_stream
from turbogr_plugin.pipeline.batches_in_flight import BatchesInFlight, BatchSource
from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext, LookedUp
from turbogr_plugin.pipeline.fine_grained_stages import FineGrainedStages, or_none
from turbogr_plugin.pipeline.lanes import CallersLane, Lane, StageRun, ThreadLane
from turbogr_plugin.pipeline.schedule import (
    DENSE_FORWARD,
    DENSE_OPTIMIZER,
    EMBEDDING_BACKWARD,
    FEATURE_DIST,
    LOAD,
    LOOKUP,
    LOOKUP_EXACT,
    Schedule,
    Stage,
)
from turbogr_plugin.pipeline.sparse_side import (
    agreement_of,
    cannot_be_stale,
    rank,
    shares_parameters,
    warn_exact,
    warn_inline,
    why_inline,
)
from turbogr_plugin.pipeline.staleness import Staleness
from turbogr_plugin.pipeline.table_rates import TableRates
from turbogr_plugin.pipeline.table_staleness import StalenessByTable
from turbogr_plugin.sharding.hierarchical_model_parallel import HierarchicalModelParallel

logger = logging.getLogger(__name__)

In = TypeVar("In")
Out = TypeVar("Out")


class ScheduledStages(FineGrainedStages[In, Out]):
    """The stages with their schedule; the base of TrainPipelineFineGrained, which sets what is declared here."""

    _schedule: Schedule
    _staleness: Staleness
    _by_table: StalenessByTable | None

    def _prepare_lanes(self, make: Callable[[int], FineGrainedContext]) -> None:
        """What it takes to work a schedule off; `make` makes the context of a batch by its number."""
        self._in_flight = BatchesInFlight(make)
        self._previous: dict[str, StageRun] = {}
        self._unfinished: deque[FineGrainedContext] = deque()
        self._issued: dict[str, StageRun] = {}
        """Stages of the last batch that the host has issued; the device may still be at work."""
        self._before: StageRun | None = None
        """What the caller's stream had been given when this call of progress began."""
        self._state_dict_hooks: list[Any] = []
        self._load_hooks: list[Any] = []
        self._prepared = self._inline = False
        self._exact: frozenset[str] = frozenset()
        self._never_stale: frozenset[str] = frozenset()
        self._told_of_exact = False
        self._updates = self._loads = 0
        self._streams: dict[str, Stream] = {name: new_stream(self._device, priority=-1) for name in ("load", "sparse")}
        self._memcpy_stream = or_none(self._streams["load"])
        self._data_dist_stream = or_none(self._streams["sparse"])
        self._lanes: dict[str, Lane] = {}
        self._closer = weakref.finalize(self, close_lanes, self._lanes)

    def finish(self) -> None:
        """See TrainPipelineFineGrained."""
        raise NotImplementedError

    def set_staleness(self, staleness: int, *, exact: Iterable[str] = ()) -> None:
        """See TrainPipelineFineGrained."""
        raise NotImplementedError

    def _progress(self, iterator: Iterator[In]) -> Out:
        if not self._model_attached:
            self.attach(self._model)
        self._state = PipelineState.IDLE
        source = self._in_flight.take(iterator, self._rest)
        context = self._batch_at(source, 0)
        assert context is not None
        self._begin()
        if not self._prepared:
            self._prepare(context)
        if self._model.training:
            self._choose_tables(context.number)
            self._look_up_again(source)
            if self._is_there(context):
                self._optimizer.zero_grad()  # in front of the lookups: it tells the tables their learning rates
        else:
            self._finish()
            self._look_up_again(source)
        self._begin()
        try:
            if not self._execute_all_batches:
                self._stop_early(source)
            for stage in self._schedule.stages:
                self._hand_out(stage, source)
        except StopIteration:
            self._rest()
            self._finish()
            self._in_flight.drop(source)
            raise
        source.contexts.popleft()
        output, context.output = context.output, None
        if self._model.training:
            self._previous = context.runs
            self._unfinished.append(context)
            self._updates += 1
            if self._staleness.of(context.number + 1) == 0:
                self._finish()
        while self._unfinished and all(run.done() for run in self._unfinished[0].runs.values()):
            self._issued = self._unfinished.popleft().runs
            for run in self._issued.values():
                run.wait()
        return cast(Out, output)

    def _begin(self) -> None:
        """The other lanes will see what the caller has written until now, such as tables that were loaded."""
        self._before = self._lane("dense").submit(_nothing, [])

    def _is_there(self, context: FineGrainedContext) -> bool:
        """Whether the ranks have the batch; waits for less than the dense part of the batch is going to wait for.

        Without the answer zero_grad would sometimes wipe the last batch's gradients after the data has ended, depending
        on how fast the lane was.
        """
        if FEATURE_DIST not in context.runs:
            self._submit(self._schedule[FEATURE_DIST], context)
        context.runs[FEATURE_DIST].wait()
        return not context.exhausted

    def _hand_out(self, stage: Stage, source: BatchSource) -> None:
        """A row of the table, for all batches that are due."""
        if stage.training_only and not self._model.training:
            return
        at = 0
        while at <= stage.ahead + (self._staleness_at(source, at) if stage.stale else 0):
            context = self._batch_at(source, at)
            if context is None:
                break
            if stage.name not in context.runs:
                self._submit(stage, context)
            at += 1

    def _batch_at(self, source: BatchSource, at: int) -> FineGrainedContext | None:
        return self._in_flight.at(source, at, training=self._model.training)

    def _staleness_at(self, source: BatchSource, at: int) -> int:
        return self._staleness.of(self._in_flight.number_at(source, at, training=self._model.training))

    def _submit(self, stage: Stage, context: FineGrainedContext) -> None:
        """Hands a stage of a batch to its lane, behind those of the batch that it waits for."""
        if stage.name == LOOKUP_EXACT and not self._has_exact_lookup(context):
            # The schedule keeps the row for batches that have one; the dense part of others must not wait for it.
            if LOOKUP not in context.runs:
                self._submit(self._schedule[LOOKUP], context)
            context.runs[LOOKUP_EXACT] = context.runs[LOOKUP]
            return
        for name in stage.waits_for:
            if name not in context.runs:
                self._submit(self._schedule[name], context)
        needs = [context.runs[name] for name in stage.waits_for]
        needs += [self._previous[name] for name in stage.waits_for_previous if name in self._previous]
        if stage.lane != "dense":
            assert self._before is not None
            needs.append(self._before)
        if stage.name in (LOOKUP, LOOKUP_EXACT) and not {LOOKUP, LOOKUP_EXACT} & context.runs.keys():
            context.has_graph = self._model.training and torch.is_grad_enabled()
            context.exact = self._exact | self._never_stale
            ahead = next(at for at, each in enumerate(context.source.contexts) if each is context)
            context.looked_up = LookedUp(self._loads, self._updates, ahead)
        if stage.name == FEATURE_DIST:
            context.counted = self._by_table is not None and context.training and self._by_table.counts(context.number)
        if stage.name in (LOOKUP, LOOKUP_EXACT) and self._rates is not None:
            context.rates[stage.name] = self._rates.now()
        context.runs[stage.name] = self._lane(stage.lane).submit(partial(self._run, stage, context), needs)

    def _has_exact_lookup(self, context: FineGrainedContext) -> bool:
        """Whether some modules of the batch are looked up apart; decided with its first lookup."""
        return bool(context.exact if LOOKUP in context.runs else self._exact | self._never_stale)

    def _run(self, stage: Stage, context: FineGrainedContext) -> None:
        """A stage of a batch, in its lane."""
        if context.exhausted:
            if stage.name == DENSE_FORWARD:
                raise StopIteration
            return
        if stage.name == DENSE_FORWARD:
            self._state = PipelineState.CALL_FWD
        self._context_of_thread.context = context
        with record_function(f"## {stage.name} {context.index} ##"):
            try:
                if stage.work is None:
                    getattr(self, f"_{stage.name}")(context)
                else:
                    stage.work(context)
            except StopIteration as error:  # it would end the training of this rank alone, and quietly
                raise RuntimeError(f"stage {stage.name} of batch {context.index} raised StopIteration") from error
        self._context_of_thread.context = None

    def _lane(self, name: str) -> Lane:
        if name not in self._lanes:
            if name == "dense":
                lane: Lane = CallersLane(self._device)
            elif name == "sparse" and self._inline:
                lane = CallersLane(self._device, self._streams[name])
            else:
                lane = ThreadLane(name, self._device, self._streams[name])
            self._lanes[name] = lane
        return self._lanes[name]

    def _prepare(self, context: FineGrainedContext) -> None:
        """Makes the model ready; `context` is of its first batch, which TorchRec's tracing may want to see."""
        if LOAD not in context.runs:
            self._submit(self._schedule[LOAD], context)
        context.runs[LOAD].wait()
        self._pipeline_model(context.batch, context)
        self._prepared = True
        self._check_exact(self._exact)
        modules = self._pipelined_modules
        self._give_rates_back()
        self._rates = TableRates(modules)
        reason = why_inline(self._model, modules, self._not_pipelined)
        if reason is not None and not self._inline:
            self._inline = True
            warn_inline(reason)
        if self._agreement is None:
            self._agreement = agreement_of(self._model, modules, self._inline)
        if any(shares_parameters(self._optimizer, module) for module in modules):
            self._schedule = self._schedule.with_wait(DENSE_OPTIMIZER, EMBEDDING_BACKWARD)
        self._never_stale = self._modules_never_stale()
        if self._never_stale:
            self._schedule = self._schedule.with_exact_lookup()
        self._tell_of_exact_modules()
        own = weakref.ref(self)
        self._state_dict_hooks = [module.register_state_dict_pre_hook(lambda *_: _finish(own)) for module in modules]
        for hook in self._load_hooks:
            hook.remove()
        self._load_hooks = [
            module.register_load_state_dict_pre_hook(lambda *_: _finish(own, loads=True)) for module in modules
        ]

    def _modules_never_stale(self) -> frozenset[str]:
        """The same on all ranks, which hold different tables: the order of lookups follows from it."""
        names = sorted(self._module_of)
        found = [cannot_be_stale(self._optimizer, self._module_of[name]) for name in names]
        flags = torch.tensor(found, dtype=torch.int64)
        if self._agreement is not None:
            self._agreement.sum_(flags)
        return frozenset(name for name, flag in zip(names, flags.tolist(), strict=True) if flag)

    def _tell_of_exact_modules(self) -> None:
        if self._never_stale - self._exact and self._staleness.largest and not self._told_of_exact:
            self._told_of_exact = True
            warn_exact(self._never_stale - self._exact)

    def _choose_tables(self, number: int) -> None:
        """Once, when the warm-up is over."""
        by_table = self._by_table
        if by_table is None or by_table.choice is not None or number < by_table.start_batch:
            return
        choice = by_table.choose()
        stale = {name for name, staleness in choice.modules.items() if staleness}
        self.set_staleness(choice.wanted if stale else 0, exact=self._module_of.keys() - stale if stale else ())
        if rank() == 0:
            logger.info("%s", "\n".join(choice.lines()))

    def _give_rates_back(self) -> None:
        if self._rates is not None:
            self._rates.give_back()
            self._rates = None

    def _look_up_again(self, source: BatchSource) -> None:
        """Batches whose lookup has no graph, or misses too much: training by another iterator, or loaded weights."""
        training = self._model.training
        for at, context in enumerate(source.contexts):
            before = context.looked_up
            if LOOKUP not in context.runs or before is None:
                continue
            late = self._updates + at > before.updates + before.ahead if training else self._updates > before.updates
            needs_graph = training and not context.has_graph and torch.is_grad_enabled()
            if late or needs_graph or before.loads != self._loads:
                context.runs.pop(LOOKUP).wait()
                context.runs.pop(LOOKUP_EXACT, None)
                context.outputs.clear()

    def _stop_early(self, source: BatchSource) -> None:
        """Without execute_all_batches: raises StopIteration if the last batch that is loaded now is none."""
        load = self._schedule[LOAD]
        self._hand_out(load, source)
        for context in list(source.contexts):
            if not context.agreed:
                self._lane("sparse").submit(partial(self._agree, context), [context.runs[LOAD]]).wait()
            if context.exhausted:
                raise StopIteration

    def _finish(self) -> None:
        stream = self._current_stream()
        for run in self._issued.values():
            run.wait(stream)
        while self._unfinished:
            for run in self._unfinished[0].runs.values():
                run.wait(stream)
            self._unfinished.popleft()
        if isinstance(self._model, HierarchicalModelParallel):
            self._model.finish()

    def _give_up(self) -> None:
        """Waits until the lanes have nothing left to do, also where they have failed, and forgets all batches."""
        for context in [*self._unfinished, *self._in_flight.contexts()]:
            for run in context.runs.values():
                run.error()
        self._in_flight.clear()
        self._unfinished.clear()
        self._forget_last_batches()
        self._previous, self._issued = {}, {}

    def _rest(self) -> None:
        """Waits until the lanes have nothing left to do."""
        stream = self._current_stream()
        for context in [*self._unfinished, *self._in_flight.contexts()]:
            for run in context.runs.values():
                run.wait(stream)


def _finish(pipeline: weakref.ref[ScheduledStages[Any, Any]], *, loads: bool = False) -> None:
    own = pipeline()
    if own is not None:
        own._loads += loads
        own.finish()


def _nothing() -> None:
    pass


def close_lanes(lanes: dict[str, Lane]) -> None:
    """Ends them, and forgets them."""
    for lane in lanes.values():
        lane.close()
    lanes.clear()
