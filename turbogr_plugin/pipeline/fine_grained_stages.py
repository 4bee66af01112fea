"""What the stages of TrainPipelineFineGrained do; when and where they do it is told by the schedule.

A method `_<stage>` gets the context of its batch and runs in the stage's lane, on the lane's stream, after the stages
that it waits for. Memory that another lane's stream has allocated is recorded for the stream that uses it.

Left out: TorchRec's contexts of version 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import (
    _clear_input_dist_tensors,
    _override_input_dist_forwards,
    _rewrite_model,
    _start_data_dist,
    _to_device,
)
from torchrec.streamable import Pipelineable

from turbogr_plugin.backend.streams import HostStream, Stream, current_stream, record_stream
from turbogr_plugin.pipeline.batches_in_flight import BatchSource
from turbogr_plugin.pipeline.fine_grained_context import ContextOfThread, FineGrainedContext, KeptGradient
from turbogr_plugin.pipeline.rank_failure import RankFailure
from turbogr_plugin.pipeline.ready_forward import ReadyForward, differentiable, record_output, wait_for_output
from turbogr_plugin.pipeline.schedule import LOOKUP, LOOKUP_EXACT
from turbogr_plugin.pipeline.step_agreement import BatchStatus, StepAgreement, failed_with
from turbogr_plugin.pipeline.table_rates import TableRates
from turbogr_plugin.pipeline.table_staleness import StalenessByTable
from turbogr_plugin.sharding.hierarchical_model_parallel import HierarchicalModelParallel

In = TypeVar("In")
Out = TypeVar("Out")


class FineGrainedStages(TrainPipelineSparseDist[In, Out]):
    """TorchRec's pipeline with the stages of ours, but without their schedule: the base of TrainPipelineFineGrained."""

    # TorchRec's annotation is that of the forward of this one class.
    _pipelined_forward_type = cast(type[PipelinedForward], ReadyForward)

    _model: nn.Module
    _original_kjt_dist_forwards: list[Any]
    #: Set by the subclasses.
    _when_exhausted: str
    _empty_batch: Callable[[Any], Any] | None
    _agreement: StepAgreement | None = None
    _by_table: StalenessByTable | None = None

    def _prepare_stages(self) -> None:
        """What the stages keep besides contexts."""
        self._context_of_thread = ContextOfThread()
        self._not_pipelined: list[str] = []
        self._input_dists_pending = False
        self._rates: TableRates | None = None
        self._forget_last_batches()

    def _forget_last_batches(self) -> None:
        """On all ranks or on none: each knows of the others which of them have one."""
        self._last_batch: Any = None
        self._with_last_batch: set[int] = set()  # ranks, by their place in the agreement

    def _load(self, context: FineGrainedContext) -> None:
        source: BatchSource = context.source
        if source.empty:
            return
        # What the iterator raises is told to all ranks before any of them waits for this batch.
        try:
            assert source.iterator is not None
            batch = next(source.iterator, None)
            source.empty = batch is None
            if batch is not None:
                context.batch = self._on_device(batch)
        except Exception as error:
            source.empty, context.failure = True, error

    def _on_device(self, batch: Any) -> Any:
        if self._device.type != "cpu" and isinstance(batch, (Tensor, Pipelineable)):
            # Not all batches can: the interface does not ask for it. Copies then wait, in this lane's thread.
            pin_memory = getattr(batch, "pin_memory", None)
            batch = batch if pin_memory is None else pin_memory()
        return _to_device(batch, self._device, non_blocking=True)

    def _agree(self, context: FineGrainedContext) -> None:
        """Agrees with the other ranks whether there is such a batch."""
        if context.agreed:
            return
        context.agreed = True
        source: BatchSource = context.source
        if source.ended:
            context.exhausted = True
            return
        empty = self._empty_batch_of(context)
        status = BatchStatus.EXHAUSTED if context.batch is None else BatchStatus.HAS_BATCH
        statuses = [status]
        if self._agreement is not None:
            reason = ""
            if context.failure is not None:
                status, reason = failed_with(context.failure)
            try:
                statuses = self._agreement.exchange(status, reason)
            except RankFailure as failure:
                raise failure from context.failure
        elif context.failure is not None:
            raise context.failure
        exhausted = [each == BatchStatus.EXHAUSTED for each in statuses]
        self._with_last_batch |= {rank for rank, ended in enumerate(exhausted) if not ended}
        if all(exhausted) or (self._when_exhausted == "stop" and any(exhausted)):
            source.ended = context.exhausted = True
            context.batch = None
        elif self._empty_batch is not None:
            if len(self._with_last_batch) < len(statuses):
                first = next(rank for rank in range(len(statuses)) if rank not in self._with_last_batch)
                raise RankFailure(
                    first,
                    "its iterator has given no batch, of which when_exhausted='fill' could make empty ones",
                )
            if context.batch is None:
                context.batch = empty
            self._last_batch = context.batch

    def _empty_batch_of(self, context: FineGrainedContext) -> Any:
        """What this rank would fill up with; made before the ranks agree, so that they learn of it if that fails."""
        if self._empty_batch is None or self._last_batch is None or context.batch is not None or context.failure:
            return None
        try:
            return _to_device(self._empty_batch(self._last_batch), self._device, non_blocking=True)
        except Exception as error:
            context.failure = error
            return None

    def _feature_dist(self, context: FineGrainedContext) -> None:
        self._agree(context)
        if context.exhausted:
            return
        record_stream(context.batch, self._current_stream())
        if context.counted:
            assert self._by_table is not None
            add = None if self._agreement is None else self._agreement.sum_
            self._by_table.observe(self._module_of, context.batch, add)
        _start_data_dist(self._pipelined_modules, context.batch, context)
        self._override_input_dists()

    def _wait_features(self, context: FineGrainedContext) -> None:
        requests = context.input_dist_tensors_requests
        for names, awaitable in context.fused_splits_awaitables:
            requests.update(zip(names, awaitable.wait(), strict=True))
        context.input_dist_splits_requests.clear()
        context.fused_splits_awaitables.clear()
        if self._clear_data_dist_inputs:
            _clear_input_dist_tensors(context)
        context.dist_inputs = {name: request.wait() for name, request in requests.items()}
        requests.clear()

    def _lookup(self, context: FineGrainedContext) -> None:
        self._look_up(context, LOOKUP, [name for name in context.dist_inputs if name not in context.exact])

    def _lookup_exact(self, context: FineGrainedContext) -> None:
        self._look_up(context, LOOKUP_EXACT, [name for name in context.dist_inputs if name in context.exact])

    def _look_up(self, context: FineGrainedContext, stage: str, names: Iterable[str]) -> None:
        assert self._rates is not None
        self._rates.write(context.rates[stage])
        found = {}
        for name in names:
            module, features = self._module_of[name], context.dist_inputs[name]
            found[name] = module.compute_and_output_dist(context.module_contexts[name], features)
        for output in found.values():
            wait_for_output(output)
        context.outputs.update(found)

    def _dense_forward(self, context: FineGrainedContext) -> None:
        stream = self._current_stream()
        for held in (context.batch, *context.outputs.values(), *context.postproc_fwd_results.values()):
            record_output(held, stream)
        self._set_module_context(context)
        context.losses, context.output = self._model_fwd(context.batch)

    def _dense_backward(self, context: FineGrainedContext) -> None:
        losses, context.losses = context.losses, None
        assert losses is not None
        self._backward(losses)

    def _embedding_backward(self, context: FineGrainedContext) -> None:
        if isinstance(self._model, HierarchicalModelParallel):
            self._model.finish()  # it keeps the order of updates within a step only; mostly the lookup has called it
        # The backward pass is collective: a tensor that has got no gradient on this rank may have got one elsewhere.
        stream = self._current_stream()
        for output in context.outputs.values():  # of modules that the forward pass has not called
            context.gradients += map(KeptGradient, differentiable(output))
        edges, gradients = [], []
        for kept in context.gradients:
            if kept.gradient is None:
                kept.gradient = kept.zeros()
            record_stream(kept.gradient, stream)
            edges.append(kept.edge)
            gradients.append(kept.gradient)
        # In this thread also on a device: autograd's one thread per device works for the dense part, which must not
        # queue behind a collective here while another rank has them the other way round.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(edges, gradients)
        context.gradients.clear()
        context.outputs.clear()
        context.dist_inputs.clear()
        context.module_contexts.clear()

    def _sync_embeddings(self, context: FineGrainedContext) -> None:
        self.sync_embeddings(self._model, self._dmp_collection_sync_interval_batches, context)

    def _dense_optimizer(self, context: FineGrainedContext) -> None:
        self._optimizer_step()

    # TorchRec's, which subclasses override

    def _backward(self, losses: Tensor) -> None:
        torch.sum(losses, dim=0).backward()

    def _optimizer_step(self) -> None:
        self._optimizer.step()

    # how the model is made ready for them

    def _pipeline_model(self, batch: Any, context: TrainPipelineContext, pipelined_forward: Any = None) -> None:
        """As TorchRec's, but that it starts no input distribution."""
        (
            self._pipelined_modules,
            self._model,
            self._original_forwards,
            self._pipelined_postprocs,
            self._not_pipelined,
        ) = _rewrite_model(
            model=self._model,
            context=context,
            dist_stream=self._data_dist_stream,
            default_stream=or_none(self._current_stream()),
            batch=batch,
            apply_jit=self._apply_jit,
            pipelined_forward=pipelined_forward or self._pipelined_forward_type,
            pipeline_postproc=self._pipeline_postproc,
        )
        self._module_of: dict[str, Any] = {_forward(module).name: module for module in self._pipelined_modules}
        for postproc in self._pipelined_postprocs:
            postproc.set_context(cast(Any, self._context_of_thread))
            # With it the dense stream would wait for all of the sparse lane; the stage lookup's event does.
            postproc._default_stream = None
        for module in self._pipelined_modules:
            if self._free_features_storage_early and hasattr(module, "_free_features_storage_early"):
                module._free_features_storage_early = True
        self._original_kjt_dist_forwards = []
        self._input_dists_pending = True

    def _override_input_dists(self) -> None:
        """Fuses the exchanges of sizes of all modules, as TorchRec does, once their input distributions are there."""
        if not self._input_dists_pending:
            return
        children = [child for module in self._pipelined_modules for child in module.modules()]
        if not any(getattr(child, "_has_uninitialized_input_dist", False) for child in children):
            self._original_kjt_dist_forwards = _override_input_dist_forwards(self._pipelined_modules)
            self._input_dists_pending = False

    def _set_module_context(self, context: TrainPipelineContext) -> None:
        # Post-processing finds its context by thread.
        for module in self._pipelined_modules:
            _forward(module).set_context(context)

    def _current_stream(self) -> Stream:
        return current_stream(self._device)


def _forward(module: Any) -> ReadyForward:
    forward = module.forward
    assert isinstance(forward, ReadyForward)
    return forward


def or_none(stream: Stream) -> torch.Stream | None:
    """As TorchRec's functions want it: None where there are no streams."""
    return None if isinstance(stream, HostStream) else stream
