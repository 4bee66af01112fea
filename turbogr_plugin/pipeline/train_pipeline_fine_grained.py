"""TrainPipelineFineGrained: stages of up to six batches side by side, with embeddings of bounded staleness.

    pipeline = TrainPipelineFineGrained(model, optimizer, device, staleness=1)
    while True:
        pipeline.progress(batches)          # StopIteration ends it, as in TorchRec

TorchRec's pipelines overlap the input of the next batch, SemiSync its lookup, too; the backward all-to-all of the
embeddings and their update stay exposed. Here all that concerns tables runs on a lane of its own beside the dense part.
This file holds what users call; `scheduled_stages` works the schedule off, `fine_grained_stages` is what stages do.

Sources: TurboGR paper, sections 4.2.2 and 4.2.3; TorchRec 1.8.0, TrainPipelineSparseDist and TrainPipelineSemiSync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline.backward_injection import BackwardHookWork, InjectionSite
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext

from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext
from turbogr_plugin.pipeline.lanes import indexed
from turbogr_plugin.pipeline.rank_failure import Failures
from turbogr_plugin.pipeline.schedule import (
    DENSE_FORWARD,
    DENSE_OPTIMIZER,
    EMBEDDING_BACKWARD,
    LOAD,
    Schedule,
)
from turbogr_plugin.pipeline.scheduled_stages import ScheduledStages, close_lanes
from turbogr_plugin.pipeline.sparse_side import (
    default_store,
    rank,
)
from turbogr_plugin.pipeline.staleness import Staleness
from turbogr_plugin.pipeline.table_staleness import StalenessByTable, StalenessChoice
from turbogr_plugin.pipeline.timeline_recording import TimelineRecording

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipelineFineGrained(ScheduledStages[In, Out]):
    """TorchRec's TrainPipelineSparseDist in finer stages; takes its place, with its results at staleness 0.

    With batch i in the dense part and staleness s, each call of progress hands out these stages:

        stage               batch      lane    waits for
        load                i + s + 2  load    -
        lookup              i + s      sparse  wait_features; embedding_backward, dense_optimizer of batch i - 1
        feature_dist        i + s + 1  sparse  load
        wait_features       i + s + 1  sparse  feature_dist
        dense_forward       i          dense   lookup
        dense_backward      i          dense   dense_forward
        embedding_backward  i          sparse  dense_backward
        sync_embeddings     i          sparse  embedding_backward
        dense_optimizer     i          dense   dense_backward

    Args:
        model: as in TrainPipelineSparseDist.
        optimizer: as there, of the dense part.
        device: as there.
        execute_all_batches: as there; False ends training as soon as an iterator has ended, and
            waits in every step for the answer of all ranks, behind the last update: little overlaps then.
        apply_jit: as there.
        context_type: FineGrainedContext or a subclass.
        pipeline_postproc: as there.
        custom_model_fwd: as there.
        dmp_collection_sync_interval_batches: as there.
        enqueue_batch_after_forward: as there: the stage load is handed out behind the forward pass.
        enable_inplace_copy_batch: only False: batches are copied on a stream of their own, into memory of that stream.
        free_features_storage_early: as there.
        clear_data_dist_inputs: as there.
        staleness: of the lookups, see the module `staleness`; 0 computes what training without a pipeline computes.
        start_batch: batches before it have staleness 0.
        staleness_limit: modules are stale only where alpha * staleness of all of their tables is below it (0.05 is
            usual), with alpha measured in the batches before start_batch, see the module `table_staleness`; they are
            chosen when batch start_batch is due, from whose successor on lookups may be stale. None: all are stale.
        when_exhausted: "stop": all ranks end with the first one whose iterator ends; "fill": those whose iterators have
            ended take part with empty batches until all have.
        empty_batch: for "fill": makes a batch without samples from this rank's last one, which is on the device.
        schedule: of stages; None is Schedule().

    Raises:
        ValueError: an argument that is not allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = FineGrainedContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In | None], tuple[Tensor, Out]] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        staleness: int = 0,
        start_batch: int = 0,
        staleness_limit: float | None = None,
        when_exhausted: Literal["stop", "fill"] = "stop",
        empty_batch: Callable[[In], In] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        if enable_inplace_copy_batch:
            raise ValueError("enable_inplace_copy_batch must be False: batches are copied on a stream of their own")
        if not (isinstance(context_type, type) and issubclass(context_type, FineGrainedContext)):
            raise ValueError(f"context_type must be FineGrainedContext or a subclass, got {context_type!r}")
        if when_exhausted not in ("stop", "fill"):
            raise ValueError(f"when_exhausted must be 'stop' or 'fill', got {when_exhausted!r}")
        if (when_exhausted == "fill") != (empty_batch is not None):
            raise ValueError(
                f"empty_batch goes with when_exhausted='fill' and only with it, got {empty_batch!r} and "
                f"when_exhausted={when_exhausted!r}"
            )
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, got {type(schedule).__name__}")
        self._staleness = Staleness(staleness, start_batch)
        by_table = None
        if staleness_limit is not None:
            by_table = StalenessByTable(staleness_limit, staleness, start_batch)
            self._staleness = Staleness(0)
        device = indexed(device)
        super().__init__(
            *(model, optimizer, device, execute_all_batches, apply_jit, context_type, pipeline_postproc),
            *(custom_model_fwd, dmp_collection_sync_interval_batches, enqueue_batch_after_forward, False),
            *(free_features_storage_early, clear_data_dist_inputs),
        )
        self._prepare_stages()
        self._by_table = by_table
        self._has_own_forward = custom_model_fwd is not None
        self._when_exhausted, self._empty_batch = when_exhausted, empty_batch
        self._schedule = Schedule() if schedule is None else schedule
        if enqueue_batch_after_forward:
            self._schedule = self._schedule.with_stage(self._schedule[LOAD], after=DENSE_FORWARD)
        self._failure: BaseException | None = None
        self._failures = Failures(default_store())
        self._recording: TimelineRecording | None = None
        self._prepare_lanes(lambda number: context_type(index=number, version=1))

    # What users call.

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """The next batch of an iterator: its forward and backward pass and the update of the dense part.

        The update of the tables is done when this returns if the next batch has staleness 0; else see `finish`. Batches
        in flight stay with the iterator that they come from. It is advanced from another thread, while this runs and
        afterwards. The gradients of the dense part are the caller's between two calls, and stay after the last batch.

        Returns:
            what the model gives besides the losses.

        Raises:
            StopIteration: there is no further batch.
            RankFailure: another rank has failed, or the iterator of any; where it has raised InputError, a
                RankInputError, which is an InputError, too.
            RuntimeError: the pipeline has failed before, or is closed.
        """
        if not self._closer.alive:
            raise RuntimeError("the pipeline is closed")
        if self._failure is not None:
            raise RuntimeError("the pipeline has failed before; reset() begins anew") from self._failure
        with self._told_of_failures(), nullcontext() if self._recording is None else self._recording.step():
            return self._progress(dataloader_iter)

    @contextmanager
    def _told_of_failures(self) -> Iterator[None]:
        """In the block other ranks are told what this one raises, and this one what they have raised."""
        try:
            with self._failures.watched():
                yield
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            failure = self._failures.explain(error)
            if failure is error:
                self._failures.report(rank(), error)
            raise failure  # noqa: B904  # its cause is the error, if it is another
        except BaseException as error:
            self._failure = error
            raise

    def finish(self) -> None:
        """Waits until the tables hold the updates of all batches whose dense part is done.

        `detach`, an evaluation step and `state_dict` of the sharded modules call it. Who reads tables in another way
        between two calls of progress, or gradients of tables that are not the optimizer's, calls it first, if the
        staleness is not 0.

        Raises:
            RankFailure: another rank has failed.
        """
        with self._told_of_failures():
            self._finish()

    def set_staleness(self, staleness: int, *, exact: Iterable[str] = ()) -> None:
        """Sets the staleness of the batches that have not been looked up yet; the same on all ranks.

        Args:
            staleness: see the module `staleness`.
            exact: sharded modules, by their path in the model, whose staleness is 0 all the same; the dense part then
                waits for their update and lookup.

        Raises:
            ValueError: a number that is not allowed, or a module that is not pipelined.
        """
        exact = frozenset(exact)
        self._check_exact(exact)
        self._staleness.set(staleness)
        self._exact = exact
        if exact:
            self._schedule = self._schedule.with_exact_lookup()
        self._tell_of_exact_modules()

    def _check_exact(self, names: frozenset[str]) -> None:
        if self._prepared and not names <= self._module_of.keys():
            raise ValueError(f"exact must name modules of {sorted(self._module_of)}, got {sorted(names)}")

    def timeline(self, steps: int) -> TimelineRecording:
        """Profiles the next calls of progress: one that is not counted, `steps` that are, and one more.

        Returns:
            the recording; once it is `done`, its `timeline()` has the numbers, the trace and the picture.

        Raises:
            ValueError: steps is less than 1.
            RuntimeError: an earlier recording is not over.
        """
        if self._recording is not None and not self._recording.done:
            raise RuntimeError(
                "the timeline that was asked for before is not over: call progress until its recording is done, or end "
                "the recording with stop()"
            )
        lanes = {stage.name: stage.lane for stage in self._schedule.stages}
        self._recording = TimelineRecording(steps, self._device, lane_of_stage=lanes, numbered_by=DENSE_FORWARD)
        return self._recording

    @property
    def staleness_choice(self) -> StalenessChoice | None:
        """alpha of each table and which are stale; None before it is known, and without `staleness_limit`."""
        return None if self._by_table is None else self._by_table.choice

    def register_backward_hook(self, site: InjectionSite, work: BackwardHookWork) -> None:
        """As TrainPipelineSparseDist's; hooks on tables run in the sparse lane, for which the dense optimizer waits."""
        self._schedule = self._schedule.with_wait(DENSE_OPTIMIZER, EMBEDDING_BACKWARD)
        super().register_backward_hook(site, work)

    @property
    def schedule(self) -> Schedule:
        """The table that the pipeline works off."""
        return self._schedule

    def detach(self) -> nn.Module:
        """As TrainPipelineSparseDist's; batches in flight are kept, the lanes rest, the tables hold all updates."""
        if self._failure is None:
            with self._told_of_failures():
                self._rest()
                self._finish()
        else:
            self._give_up()
        self._override_input_dists()
        for hook in self._state_dict_hooks:
            hook.remove()
        self._state_dict_hooks = []
        self._give_rates_back()
        model: nn.Module = super().detach()
        return model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """As TrainPipelineSparseDist's; the model is made ready by the next call of progress.

        Args:
            model: in place of the one that was detached.
            sparse_dist: without meaning here.
        """
        if model is not None:
            if model is not self._model:
                for context in self._in_flight.contexts():  # their ids and rows are of the other model's tables
                    context.runs = {name: run for name, run in context.runs.items() if name == LOAD}
                    for held in (context.dist_inputs, context.outputs, context.module_contexts):
                        held.clear()
            self._model = model
            if not self._has_own_forward:
                self._model_fwd = cast(Any, model)
        self._model_attached = True
        self._pipelined_modules, self._pipelined_postprocs = [], []
        self._prepared = False

    def reset(self) -> None:
        """Forgets all batches, and a failure; waits for the lanes to rest. All ranks call it, or none."""
        self._give_up()
        super().reset()
        self._failure = None
        self._failures.close()
        self._failures = Failures(default_store())  # what the ranks told each other of the former failure is over
        close_lanes(self._lanes)  # one that has failed does nothing more

    def close(self) -> None:
        """Ends the threads and a recording of the timeline; a pipeline that is freed ends its threads, too."""
        if self._recording is not None:
            self._recording.stop()
        self._failures.close()
        self._closer()
