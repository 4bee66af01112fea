"""TrainPipelineFineGrained in the place of TorchRec's pipelines: arguments, model, failures and ends; one rank."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from tests.pipeline import small_model
from tests.pipeline.fine_grained_models import CPU, build, dense_optimizer
from tests.pipeline.one_rank import STEPS, Run, same, source_of
from turbogr_plugin.pipeline import Schedule, Stage, TrainPipelineFineGrained
from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext
from turbogr_plugin.sharding.jagged_lookup import table_modules

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("world_of_one")]


# Arguments.


def test_all_arguments_of_torchrecs_pipeline_are_there_in_its_order() -> None:
    theirs = list(inspect.signature(TrainPipelineSparseDist.__init__).parameters.values())
    mine = list(inspect.signature(TrainPipelineFineGrained.__init__).parameters.values())
    assert [each.name for each in mine[: len(theirs)]] == [each.name for each in theirs]
    for own, other in zip(mine, theirs, strict=False):
        assert own.default == other.default or own.name == "context_type"
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in mine[len(theirs) :])


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_postproc": True},
        {"enqueue_batch_after_forward": True},
        {"free_features_storage_early": True},
        {"clear_data_dist_inputs": True},
        {"dmp_collection_sync_interval_batches": None},
        {"staleness": 3, "start_batch": 100},
        {"when_exhausted": "fill", "empty_batch": lambda batch: batch},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_change_when_things_run_change_no_result(
    options: dict[str, Any], plain: tuple[list[float], dict[str, Tensor]]
) -> None:
    run = Run(**options)
    assert run.losses(iter(source_of())) == plain[0]
    assert same(run.values(), plain[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"enable_inplace_copy_batch": True}, ValueError, "enable_inplace_copy_batch must be False"),
        ({"context_type": TrainPipelineContext}, ValueError, "context_type must be FineGrainedContext"),
        ({"staleness": -1}, ValueError, "staleness must be a whole number >= 0, got -1"),
        ({"staleness": True}, ValueError, "staleness must be"),
        ({"staleness": 1.0}, ValueError, "staleness must be"),
        ({"start_batch": -3}, ValueError, "start_batch must be"),
        ({"when_exhausted": "wait"}, ValueError, "when_exhausted must be 'stop' or 'fill', got 'wait'"),
        ({"when_exhausted": "fill"}, ValueError, "empty_batch goes with"),
        ({"empty_batch": lambda batch: batch}, ValueError, "empty_batch goes with"),
        ({"schedule": "as usual"}, TypeError, "schedule must be a Schedule"),
    ],
)
def test_arguments_that_are_not_allowed_are_named(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        TrainPipelineFineGrained(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]), CPU, **options)


def test_without_execute_all_batches_training_ends_where_torchrecs_does() -> None:
    options = {"execute_all_batches": False}
    expected, found = Run(TrainPipelineSparseDist, **options), Run(**options)
    losses = expected.losses(iter(source_of()))
    assert 0 < len(losses) < STEPS
    assert found.losses(iter(source_of())) == losses


def test_a_forward_of_ones_own_is_called_with_the_batch(plain: tuple[list[float], dict[str, Tensor]]) -> None:
    model, seen = build("small", own_group=False), []

    def forward(batch: Any) -> Any:
        seen.append(batch)
        return model(batch)

    assert Run(model=model, custom_model_fwd=forward).losses(iter(source_of())) == plain[0]
    assert len(seen) == STEPS and all(isinstance(batch, small_model.Batch) for batch in seen)


def test_modules_can_be_scripted() -> None:
    found = [
        Run(kind, apply_jit=True).losses(iter(source_of()))
        for kind in (TrainPipelineSparseDist, TrainPipelineFineGrained)
    ]
    assert found[0] == found[1]


# The model and its optimizer.


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_weights_that_are_loaded_between_two_steps_are_those_of_the_next(staleness: int) -> None:
    run, source = Run(staleness=staleness), source_of(12)
    first = {name: value.clone() for name, value in run.model.state_dict().items()}
    batches_of_run = iter(source)
    run.losses(batches_of_run, 3)
    run.model.load_state_dict(first)
    found = run.losses(batches_of_run, 1)[0]
    fresh = Run().model.eval()
    with torch.no_grad():
        assert found == pytest.approx(float(fresh(source[3])[1]), abs=1e-6)
    assert len(run.losses(batches_of_run)) == 8


def test_what_a_subclass_does_in_backward_and_optimizer_is_done() -> None:
    seen: list[str] = []

    class Own(TrainPipelineFineGrained):  # type: ignore[type-arg]
        def _backward(self, losses: Tensor) -> None:
            seen.append("backward")
            super()._backward(losses)

        def _optimizer_step(self) -> None:
            seen.append("optimizer")
            super()._optimizer_step()

    run = Run(Own)
    assert len(run.losses(iter(source_of()), 2)) == 2
    assert seen == ["backward", "optimizer"] * 2


def test_an_evaluation_needs_no_optimizer() -> None:
    model = build("small", own_group=False).eval()
    pipeline: Any = TrainPipelineFineGrained(model, None, CPU)  # type: ignore[arg-type]
    source = source_of(3)
    with torch.no_grad():
        batches_of_evaluation = iter(source)
        found = [float(pipeline.progress(batches_of_evaluation)) for _ in source]
        pipeline.detach()
        assert found == [float(model(batch)[1]) for batch in source]


def test_a_pipeline_that_was_freed_leaves_the_tables_their_learning_rates() -> None:
    run = Run(staleness=1)
    run.losses(iter(source_of()), 2)
    tables = [each for module in run.pipeline._pipelined_modules for each in table_modules(module)]
    gone = weakref.ref(run.pipeline)
    run.pipeline.close()
    del run.pipeline
    gc.collect()
    assert gone() is None
    for each in tables:
        each.set_learning_rate(0.0625)
        assert float(each.learning_rate_tensor) == 0.0625


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_detached_model_works_alone_and_training_goes_on_after_it(staleness: int) -> None:
    undisturbed, run = Run(staleness=staleness), Run(staleness=staleness)
    expected, source = undisturbed.losses(iter(source_of())), iter(source_of())
    losses = run.losses(source, 2)
    forwards = [type(module.forward).__name__ for module in (run.model.module.bags, run.model.module.sequences)]
    assert forwards == ["ReadyForward"] * 2
    model = run.pipeline.detach()
    with torch.no_grad():
        alone = float(model(source_of()[0])[1])
        assert alone == float(model(source_of()[0])[1])
    losses += run.losses(source, 1)  # attaches by itself
    run.pipeline.detach()
    run.pipeline.attach()
    losses += run.losses(source)
    assert losses == expected
    assert same(run.values(), undisturbed.values())


def test_another_model_can_be_attached() -> None:
    run, other = Run(), build("small", own_group=False)
    run.losses(iter(source_of()))
    run.pipeline.detach()
    run.pipeline.attach(other)
    run.pipeline._optimizer = dense_optimizer(other)
    assert run.losses(iter(source_of())) == Run(TrainPipelineBase).losses(iter(source_of()))


def test_reset_forgets_batches_in_flight() -> None:
    run = Run(staleness=1)
    run.losses(iter(source_of(50)), 2)
    run.pipeline.reset()
    assert len(run.losses(iter(source_of(3)))) == 3


# Failures and ends.


def _failing(after: int) -> Iterator[Any]:
    yield from source_of(after)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_an_iterator_raises_comes_when_its_batch_would(staleness: int) -> None:
    run, source = Run(staleness=staleness), _failing(3)
    with pytest.raises(OSError, match="the disk is gone"):
        run.losses(source)
    with pytest.raises(RuntimeError, match="has failed before; reset"):
        run.losses(source)
    run.pipeline.reset()
    assert len(run.losses(iter(source_of(3)))) == 3


def test_what_a_stage_raises_reaches_the_caller() -> None:
    def fail(context: FineGrainedContext) -> None:
        if context.index == 2:
            raise ArithmeticError("no luck")

    stage = Stage(name="fail", lane="sparse", waits_for=("lookup",), work=fail)
    run = Run(schedule=Schedule().with_stage(stage, before="dense_forward").with_wait("dense_forward", "fail"))
    source = iter(source_of())
    assert len(run.losses(source, 2)) == 2
    with pytest.raises(ArithmeticError, match="no luck"):
        run.losses(source, 1)


def test_calling_a_module_outside_of_progress_says_what_to_do() -> None:
    run = Run()
    run.losses(iter(source_of()), 1)
    with pytest.raises(RuntimeError, match=r"module 'bags' has no embeddings.*detach"):
        run.model(source_of()[0])


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("turbogr-"))


@pytest.mark.parametrize("end", ["close", "free", "free in flight"])
def test_threads_end_with_the_pipeline(end: str) -> None:
    gc.collect()
    before = _threads()
    run: Any = Run(staleness=1)
    losses: Callable[..., list[float]] = run.losses
    losses(iter(source_of()), 3 if end == "free in flight" else 100)
    assert len(_threads()) > len(before)
    if end == "close":
        run.pipeline.close()
        with pytest.raises(RuntimeError, match="is closed"):
            run.losses(iter(source_of()), 1)
    else:
        del run, losses
        gc.collect()
    deadline = time.monotonic() + 10
    while _threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads() == before
