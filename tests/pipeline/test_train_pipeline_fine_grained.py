"""TrainPipelineFineGrained takes the place of TorchRec's pipelines: arguments, iterators, modes, ends; one rank."""

from __future__ import annotations

import gc
import inspect
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.pipeline import small_model
from tests.pipeline.fine_grained_models import CPU, batches, build, dense_optimizer, local_values
from tests.stock import ours
from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.pipeline import Schedule, Stage, TrainPipelineFineGrained
from turbogr_plugin.pipeline.adaptations import ADAPTATIONS
from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext, KeptGradient
from turbogr_plugin.sharding.jagged_lookup import table_modules

pytestmark = pytest.mark.timeout(60)

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    ours(ADAPTATIONS)
    gc.freeze()  # what the libraries hold; else each collection below takes seconds
    with process_group(CPU, timeout=timedelta(seconds=20)):
        yield
    gc.unfreeze()


def _source(steps: int = STEPS, rank: int = 0) -> list[Any]:
    return batches("small", steps, rank)


class Run:
    """A model under a pipeline."""

    def __init__(self, kind: Any = TrainPipelineFineGrained, *, model: Any = None, **options: Any) -> None:
        self.model = build("small", own_group=False) if model is None else model
        self.pipeline = kind(self.model, dense_optimizer(self.model), CPU, **options)

    def losses(self, source: Any, steps: int = 1000) -> list[float]:
        """Of some calls of progress, or of all until the end."""
        found = []
        for _ in range(steps):
            try:
                found.append(float(self.pipeline.progress(source)))
            except StopIteration:
                break
        return found

    def values(self) -> dict[str, Tensor]:
        """Of tables and dense part."""
        if isinstance(self.pipeline, TrainPipelineFineGrained):
            self.pipeline.finish()
        return local_values(self.model)


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values without a pipeline."""
    run = Run(TrainPipelineBase)
    return run.losses(iter(_source())), run.values()


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
    assert run.losses(iter(_source())) == plain[0]
    assert _same(run.values(), plain[1])


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
    losses = expected.losses(iter(_source()))
    assert 0 < len(losses) < STEPS
    assert found.losses(iter(_source())) == losses


def test_a_forward_of_ones_own_is_called_with_the_batch(plain: tuple[list[float], dict[str, Tensor]]) -> None:
    model, seen = build("small", own_group=False), []

    def forward(batch: Any) -> Any:
        seen.append(batch)
        return model(batch)

    assert Run(model=model, custom_model_fwd=forward).losses(iter(_source())) == plain[0]
    assert len(seen) == STEPS and all(isinstance(batch, small_model.Batch) for batch in seen)


class _Preprocessing(nn.Module):
    """Shifts ids, as a module between the batch and the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        self.calls.append(threading.current_thread().name)
        return KeyedJaggedTensor(ids.keys(), values=ids.values() // 2 + 3, lengths=ids.lengths())


class _Preprocessed(small_model.Model):
    """The tables see what the module makes of the ids, and so does the dense part."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.preprocessing = _Preprocessing()

    def forward(self, batch: small_model.Batch) -> tuple[Tensor, Tensor]:
        ids = self.preprocessing(batch.ids)
        pooled, sequence = self.bags(ids).values(), self.sequences(ids)["sequence"]
        rows = small_model.sum_of_rows(sequence.values(), sequence.lengths())
        logits = self.logit(torch.cat([pooled, rows, batch.floats], dim=1)) * ids.values().float().mean()
        loss = nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.label)
        return loss, loss.detach()


@pytest.mark.parametrize("staleness", [0, 1])
def test_preprocessing_runs_in_the_sparse_lane_and_each_batch_sees_its_own(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "Model", _Preprocessed)
    others: dict[str, Any] = {"start_batch": 0} if staleness else {}
    plain = Run(TrainPipelineSemiSync if staleness else TrainPipelineBase, **others)
    run = Run(staleness=staleness, pipeline_postproc=True)
    calls = run.model.module.preprocessing.calls
    assert run.losses(iter(_source())) == plain.losses(iter(_source()))
    assert _same(run.values(), plain.values())
    assert calls == ["turbogr-sparse"] * STEPS


def test_modules_can_be_scripted() -> None:
    found = [
        Run(kind, apply_jit=True).losses(iter(_source()))
        for kind in (TrainPipelineSparseDist, TrainPipelineFineGrained)
    ]
    assert found[0] == found[1]


# Iterators and modes.


def test_a_loader_with_persistent_workers_works_for_a_second_epoch() -> None:
    data: Any = _source(4)
    loader: Any = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    run, expected = Run(staleness=1, start_batch=100), Run(TrainPipelineBase)
    first = run.losses(iter(loader))
    second = run.losses(iter(loader))
    assert first + second == expected.losses(iter(_source(4) + _source(4)))


@pytest.mark.parametrize("staleness", [0, 2])
def test_iterators_keep_their_batches_when_they_take_turns(staleness: int) -> None:
    run, seen = Run(staleness=staleness), []
    run.model.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].floats.sum())))
    sources = [_source(5, rank) for rank in (1, 2)]
    iterators = [iter(source) for source in sources]
    for turn in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1):
        run.losses(iterators[turn], 1)
    expected = [iter([float(batch.floats.sum()) for batch in source]) for source in sources]
    assert seen == [next(expected[turn]) for turn in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1)]
    assert run.losses(iterators[0]) == run.losses(iterators[1]) == []


def test_an_abandoned_iterator_is_freed_with_its_batches() -> None:
    run = Run()

    def some() -> Iterator[Any]:
        yield from _source(5)

    kept, abandoned = some(), some()
    run.losses(kept, 1)
    run.losses(abandoned, 1)
    gone = weakref.ref(abandoned)
    run.losses(kept, 1)
    del abandoned
    gc.collect()
    assert gone() is None
    assert len(run.losses(kept)) == 3


def test_batches_are_numbered_without_gaps_over_the_ends_of_iterators() -> None:
    numbers: list[int] = []
    stage = Stage(name="number", lane="dense", work=lambda context: numbers.append(context.index))
    run = Run(staleness=1, schedule=Schedule().with_stage(stage))
    for steps in (3, 1, 4):
        run.losses(iter(_source(steps)))
    assert numbers == list(range(8))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_numbers_do_not_depend_on_when_a_rank_learns_that_an_iterator_has_ended(staleness: int) -> None:
    numbers: list[int] = []
    stage = Stage(name="number", lane="dense", work=lambda context: numbers.append(context.index))
    run = Run(staleness=staleness, schedule=Schedule().with_stage(stage))
    aside, other = iter(_source(4)), iter(_source(3, 5))
    run.losses(aside, 3)
    run.losses(other, 2)
    run.losses(aside)
    following = 4 if staleness else 5  # without staleness batch 4 has been asked for, and no rank knows that it is none
    assert numbers == [0, 1, 2, following, following + 1, 3]


@pytest.mark.parametrize("staleness", [0, 2])
def test_epochs_that_are_counted_by_the_caller_leave_nothing_behind(staleness: int) -> None:
    numbers: list[int] = []
    stage = Stage(name="number", lane="dense", work=lambda context: numbers.append(context.index))
    run = Run(staleness=staleness, schedule=Schedule().with_stage(stage))
    batches_of_all = iter(_source(9))
    for _ in range(3):  # progress never says that an epoch has ended
        run.losses(itertools.islice(batches_of_all, 3), 3)
    assert numbers == list(range(9))
    assert not run.pipeline._in_flight._parked


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_evaluation_in_between_changes_nothing(staleness: int) -> None:
    undisturbed, run = Run(staleness=staleness), Run(staleness=staleness)
    expected = undisturbed.losses(iter(_source()))
    source, other = iter(_source()), iter(_source(20, 5))
    losses: list[float] = []
    for steps in (2, 3, 1):
        losses += run.losses(source, steps)
        run.model.eval()
        with torch.no_grad():
            values = run.values()
            evaluated = run.losses(other, 2)
            assert len(evaluated) == 2 and _same(values, run.values())
        run.model.train()
    assert losses == expected
    assert _same(run.values(), undisturbed.values())


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_batch_that_was_put_aside_misses_no_update_of_the_training_meanwhile(staleness: int, evaluates: bool) -> None:
    run, source, other = Run(staleness=staleness), _source(12), _source(20, 5)
    aside, meanwhile = iter(source), iter(other)
    run.model.train(not evaluates)
    with torch.set_grad_enabled(not evaluates):
        run.losses(aside, 2)
    run.model.train()
    run.losses(meanwhile, 10)
    run.model.train(not evaluates)
    with torch.set_grad_enabled(not evaluates):
        found = run.losses(aside, 1)[0]
    # The same training up to there, and the batch by hand.
    again, aside, meanwhile = Run(staleness=staleness), iter(source), iter(other)
    again.model.train(not evaluates)
    with torch.set_grad_enabled(not evaluates):
        again.losses(aside, 2)
    again.model.train()
    again.losses(meanwhile, 10)
    model = again.pipeline.detach().eval()
    with torch.no_grad():
        assert found == pytest.approx(float(model(source[2])[1]), abs=1e-6)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_weights_that_are_loaded_between_two_steps_are_those_of_the_next(staleness: int) -> None:
    run, source = Run(staleness=staleness), _source(12)
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
    assert len(run.losses(iter(_source()), 2)) == 2
    assert seen == ["backward", "optimizer"] * 2


def test_an_evaluation_needs_no_optimizer() -> None:
    model = build("small", own_group=False).eval()
    pipeline: Any = TrainPipelineFineGrained(model, None, CPU)  # type: ignore[arg-type]
    source = _source(3)
    with torch.no_grad():
        batches_of_evaluation = iter(source)
        found = [float(pipeline.progress(batches_of_evaluation)) for _ in source]
        pipeline.detach()
        assert found == [float(model(batch)[1]) for batch in source]


def test_a_pipeline_that_was_freed_leaves_the_tables_their_learning_rates() -> None:
    run = Run(staleness=1)
    run.losses(iter(_source()), 2)
    tables = [each for module in run.pipeline._pipelined_modules for each in table_modules(module)]
    gone = weakref.ref(run.pipeline)
    run.pipeline.close()
    del run.pipeline
    gc.collect()
    assert gone() is None
    for each in tables:
        each.set_learning_rate(0.0625)
        assert float(each.learning_rate_tensor) == 0.0625


def test_an_iterator_of_a_list_that_nobody_holds_is_forgotten() -> None:
    run = Run(staleness=1)
    for _ in range(4):
        run.losses(iter(_source(8)), 3)
    assert len(run.pipeline._in_flight._parked) <= 1


def test_one_iterator_can_serve_evaluation_and_then_training() -> None:
    run, expected = Run(staleness=2), Run(TrainPipelineBase)
    source = iter(_source())
    run.model.eval()
    with torch.no_grad():
        evaluated = run.losses(source, 2)
    run.model.train()
    expected.model.eval()
    with torch.no_grad():
        other = iter(_source())
        assert evaluated == expected.losses(other, 2)
    trained = run.losses(source)
    assert len(trained) == STEPS - 2
    again = Run(staleness=2)
    assert trained == again.losses(iter(_source()[2:]))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_detached_model_works_alone_and_training_goes_on_after_it(staleness: int) -> None:
    undisturbed, run = Run(staleness=staleness), Run(staleness=staleness)
    expected, source = undisturbed.losses(iter(_source())), iter(_source())
    losses = run.losses(source, 2)
    forwards = [type(module.forward).__name__ for module in (run.model.module.bags, run.model.module.sequences)]
    assert forwards == ["ReadyForward"] * 2
    model = run.pipeline.detach()
    with torch.no_grad():
        alone = float(model(_source()[0])[1])
        assert alone == float(model(_source()[0])[1])
    losses += run.losses(source, 1)  # attaches by itself
    run.pipeline.detach()
    run.pipeline.attach()
    losses += run.losses(source)
    assert losses == expected
    assert _same(run.values(), undisturbed.values())


def test_another_model_can_be_attached() -> None:
    run, other = Run(), build("small", own_group=False)
    run.losses(iter(_source()))
    run.pipeline.detach()
    run.pipeline.attach(other)
    run.pipeline._optimizer = dense_optimizer(other)
    assert run.losses(iter(_source())) == Run(TrainPipelineBase).losses(iter(_source()))


def test_reset_forgets_batches_in_flight() -> None:
    run = Run(staleness=1)
    run.losses(iter(_source(50)), 2)
    run.pipeline.reset()
    assert len(run.losses(iter(_source(3)))) == 3


# What stages do.


def test_learning_rates_set_between_two_steps_hold_for_the_next(plain: tuple[list[float], dict[str, Tensor]]) -> None:
    found = []
    for kind in (TrainPipelineBase, TrainPipelineFineGrained):
        run, source = Run(kind), iter(_source())
        losses = []
        for step in range(STEPS):
            for group in run.model.fused_optimizer.param_groups:
                group["lr"] = (0.1, 0.5, 0.01)[step % 3]
            run.model.fused_optimizer.step()
            losses += run.losses(source, 1)
        found.append((losses, run.values()))
    assert found[0][0] == found[1][0] != plain[0]
    assert _same(found[0][1], found[1][1])


def test_autocast_of_the_caller_holds_in_all_lanes(plain: tuple[list[float], dict[str, Tensor]]) -> None:
    found = []
    for kind in (TrainPipelineBase, TrainPipelineFineGrained):
        run, source, losses = Run(kind), iter(_source()), []
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):  # it keeps the cast weights until it ends
                losses += run.losses(source, 1)
        found.append((losses, run.values()))
    assert found[0][0] == found[1][0] != plain[0]
    assert _same(found[0][1], found[1][1])


class _InPlace(small_model.Model):
    """Writes to its embeddings, and uses some of them twice and others not at all."""

    def forward(self, batch: small_model.Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.ids).values()
        pooled *= 2
        unused = self.sequences(batch.ids)["sequence"].values().detach().sum() * 0
        parts = [pooled, pooled[:, : small_model.DIM] * pooled[:, small_model.DIM :], batch.floats]
        loss = self.logit(torch.cat(parts, dim=1)).square().mean() + unused
        return loss, loss.detach()


def test_a_model_may_write_to_its_embeddings_and_leave_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_model, "Model", _InPlace)
    plain, run = Run(TrainPipelineBase), Run()
    assert run.losses(iter(_source())) == plain.losses(iter(_source()))
    assert _same(run.values(), plain.values())


def test_a_tensor_of_one_element_without_a_gradient_gets_zero() -> None:
    run, weight = Run(), torch.ones(1, requires_grad=True)
    context = FineGrainedContext(index=0, version=1, gradients=[KeptGradient(weight * 3)])
    run.pipeline._embedding_backward(context)
    assert weight.grad is not None and weight.grad.item() == 0


def _slow(_context: Any) -> None:
    time.sleep(0.1)


def _with_slow_update() -> Schedule:
    schedule = Schedule().with_stage(
        Stage(name="slow", lane="sparse", waits_for=("dense_backward",), training_only=True, work=_slow),
        before="embedding_backward",
    )
    return schedule.with_wait("embedding_backward", "slow")


def test_a_state_dict_holds_the_updates_of_all_batches_that_are_through() -> None:
    run, source = Run(staleness=1, schedule=_with_slow_update()), iter(_source())
    for _ in range(3):
        run.losses(source, 1)
        before = {key: _local(value).clone() for key, value in run.model.state_dict().items()}
        run.pipeline.finish()
        assert _same(before, {key: _local(value).clone() for key, value in run.model.state_dict().items()})


def _local(value: Any) -> Tensor:
    return torch.cat([shard.tensor for shard in value.local_shards()]) if hasattr(value, "local_shards") else value


def test_with_staleness_a_step_does_not_wait_for_its_update() -> None:
    done: list[bool] = []
    for staleness in (0, 1):
        run = Run(staleness=staleness, schedule=_with_slow_update())
        run.losses(iter(_source()), 2)
        done.append(not run.pipeline._unfinished)
        run.pipeline.finish()
    assert done == [True, False]


@pytest.mark.parametrize("pause", [0.0, 0.3])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_gradients_of_the_last_batch_stay_however_late_a_lane_learns_of_the_end(staleness: int, pause: float) -> None:
    def source() -> Iterator[Any]:
        yield from _source(4)
        time.sleep(pause)

    run, exact = Run(staleness=staleness), Run(staleness=staleness)
    exact.losses(iter(_source(4)), 4)  # the end is not asked for
    run.losses(source())
    left = [value.grad for value in run.model.module.logit.parameters()]
    assert all(
        torch.equal(own, other.grad) for own, other in zip(left, exact.model.module.logit.parameters(), strict=True)
    )
    assert run.losses(iter([])) == []
    assert [value.grad is own for own, value in zip(left, run.model.module.logit.parameters(), strict=True)] == [
        True
    ] * 2


def test_the_caller_may_zero_gradients_while_the_tables_are_still_updated() -> None:
    undisturbed, run = (Run(staleness=1, schedule=_with_slow_update()) for _ in range(2))
    expected, source, losses = undisturbed.losses(iter(_source(3))), iter(_source(3)), []
    for _ in range(3):
        losses += run.losses(source, 1)
        run.pipeline._optimizer.zero_grad()
        assert run.pipeline._unfinished
    assert losses == expected
    assert _same(run.values(), undisturbed.values())


def test_every_stage_of_every_batch_is_a_range_in_a_profile() -> None:
    run = Run(staleness=1)
    from torch._C._profiler import _ExperimentalConfig

    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
        run.losses(iter(_source(3)))
    seen = {event.name for event in profiled.events()}
    for stage in run.pipeline.schedule.stages:
        assert {f"## {stage.name} {batch} ##" for batch in range(3)} <= seen, stage.name


def test_an_added_stage_runs_for_each_batch_in_its_lane_and_place() -> None:
    seen: list[tuple[int, str, bool]] = []

    def look(context: FineGrainedContext) -> None:
        seen.append((context.number, threading.current_thread().name, context.runs["lookup"].done()))

    stage = Stage(name="look", lane="sparse", stale=True, waits_for=("lookup",), work=look)
    run = Run(staleness=1, schedule=Schedule().with_stage(stage, after="lookup"))
    run.losses(iter(_source(4)))
    assert seen == [(batch, "turbogr-sparse", True) for batch in range(4)]


# Failures and ends.


def _failing(after: int) -> Iterator[Any]:
    yield from _source(after)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_an_iterator_raises_comes_when_its_batch_would(staleness: int) -> None:
    run, source = Run(staleness=staleness), _failing(3)
    with pytest.raises(OSError, match="the disk is gone"):
        run.losses(source)
    with pytest.raises(RuntimeError, match="has failed before; reset"):
        run.losses(source)
    run.pipeline.reset()
    assert len(run.losses(iter(_source(3)))) == 3


def test_what_a_stage_raises_reaches_the_caller() -> None:
    def fail(context: FineGrainedContext) -> None:
        if context.index == 2:
            raise ArithmeticError("no luck")

    stage = Stage(name="fail", lane="sparse", waits_for=("lookup",), work=fail)
    run = Run(schedule=Schedule().with_stage(stage, before="dense_forward").with_wait("dense_forward", "fail"))
    source = iter(_source())
    assert len(run.losses(source, 2)) == 2
    with pytest.raises(ArithmeticError, match="no luck"):
        run.losses(source, 1)


def test_calling_a_module_outside_of_progress_says_what_to_do() -> None:
    run = Run()
    run.losses(iter(_source()), 1)
    with pytest.raises(RuntimeError, match=r"module 'bags' has no embeddings.*detach"):
        run.model(_source()[0])


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("turbogr-"))


@pytest.mark.parametrize("end", ["close", "free", "free in flight"])
def test_threads_end_with_the_pipeline(end: str) -> None:
    gc.collect()
    before = _threads()
    run: Any = Run(staleness=1)
    losses: Callable[..., list[float]] = run.losses
    losses(iter(_source()), 3 if end == "free in flight" else 100)
    assert len(_threads()) > len(before)
    if end == "close":
        run.pipeline.close()
        with pytest.raises(RuntimeError, match="is closed"):
            run.losses(iter(_source()), 1)
    else:
        del run, losses
        gc.collect()
    deadline = time.monotonic() + 10
    while _threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads() == before


def test_nothing_is_left_of_batches_that_are_through() -> None:
    run, alive = Run(staleness=1), weakref.WeakSet[Any]()

    def source() -> Iterator[Any]:
        for batch in itertools.islice(itertools.cycle(_source()), 30):
            made = batch.to(CPU)
            made = type(made)(made.floats.clone(), made.ids, made.label)
            alive.add(made.floats)
            yield made

    iterator, most = source(), 0
    for _ in range(30):
        run.losses(iterator, 1)
        gc.collect()
        most = max(most, len(alive))
    assert most <= 8
