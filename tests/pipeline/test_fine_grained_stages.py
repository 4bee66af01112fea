"""What the stages of TrainPipelineFineGrained do, where and when, and what the caller may do meanwhile; one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSemiSync,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.pipeline import small_model
from tests.pipeline.one_rank import STEPS, Run, same, source_of
from turbogr_plugin.pipeline import Schedule, Stage, TrainPipelineFineGrained
from turbogr_plugin.pipeline.fine_grained_context import FineGrainedContext, KeptGradient

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("world_of_one")]


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


def test_modules_that_are_exact_no_longer_do_not_hold_the_dense_part_up(monkeypatch: pytest.MonkeyPatch) -> None:
    began = [threading.Event() for _ in range(STEPS + 1)]
    met: list[bool] = []
    forward, backward = TrainPipelineFineGrained._dense_forward, TrainPipelineFineGrained._embedding_backward

    def tell(pipeline: Any, context: FineGrainedContext) -> None:
        began[context.number].set()
        forward(pipeline, context)

    def wait(pipeline: Any, context: FineGrainedContext) -> None:
        if context.number < STEPS - 1:
            met.append(began[context.number + 1].wait(3))
        backward(pipeline, context)

    monkeypatch.setattr(TrainPipelineFineGrained, "_dense_forward", tell)
    monkeypatch.setattr(TrainPipelineFineGrained, "_embedding_backward", wait)
    run = Run(staleness=1)
    run.pipeline.set_staleness(1, exact=["bags"])
    run.pipeline.set_staleness(1)
    assert len(run.losses(iter(source_of()))) == STEPS
    run.pipeline.finish()
    assert met == [True] * (STEPS - 1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_preprocessing_runs_in_the_sparse_lane_and_each_batch_sees_its_own(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "Model", _Preprocessed)
    others: dict[str, Any] = {"start_batch": 0} if staleness else {}
    plain = Run(TrainPipelineSemiSync if staleness else TrainPipelineBase, **others)
    run = Run(staleness=staleness, pipeline_postproc=True)
    calls = run.model.module.preprocessing.calls
    assert run.losses(iter(source_of())) == plain.losses(iter(source_of()))
    assert same(run.values(), plain.values())
    assert calls == ["turbogr-sparse"] * STEPS


def test_learning_rates_set_between_two_steps_hold_for_the_next(plain: tuple[list[float], dict[str, Tensor]]) -> None:
    found = []
    for kind in (TrainPipelineBase, TrainPipelineFineGrained):
        run, source = Run(kind), iter(source_of())
        losses = []
        for step in range(STEPS):
            for group in run.model.fused_optimizer.param_groups:
                group["lr"] = (0.1, 0.5, 0.01)[step % 3]
            run.model.fused_optimizer.step()
            losses += run.losses(source, 1)
        found.append((losses, run.values()))
    assert found[0][0] == found[1][0] != plain[0]
    assert same(found[0][1], found[1][1])


def test_autocast_of_the_caller_holds_in_all_lanes(plain: tuple[list[float], dict[str, Tensor]]) -> None:
    found = []
    for kind in (TrainPipelineBase, TrainPipelineFineGrained):
        run, source, losses = Run(kind), iter(source_of()), []
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):  # it keeps the cast weights until it ends
                losses += run.losses(source, 1)
        found.append((losses, run.values()))
    assert found[0][0] == found[1][0] != plain[0]
    assert same(found[0][1], found[1][1])


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
    assert run.losses(iter(source_of())) == plain.losses(iter(source_of()))
    assert same(run.values(), plain.values())


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
    run, source = Run(staleness=1, schedule=_with_slow_update()), iter(source_of())
    for _ in range(3):
        run.losses(source, 1)
        before = {key: _local(value).clone() for key, value in run.model.state_dict().items()}
        run.pipeline.finish()
        assert same(before, {key: _local(value).clone() for key, value in run.model.state_dict().items()})


def _local(value: Any) -> Tensor:
    return torch.cat([shard.tensor for shard in value.local_shards()]) if hasattr(value, "local_shards") else value


def test_with_staleness_a_step_does_not_wait_for_its_update() -> None:
    done: list[bool] = []
    for staleness in (0, 1):
        run = Run(staleness=staleness, schedule=_with_slow_update())
        run.losses(iter(source_of()), 2)
        done.append(not run.pipeline._unfinished)
        run.pipeline.finish()
    assert done == [True, False]


@pytest.mark.parametrize("pause", [0.0, 0.3])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_gradients_of_the_last_batch_stay_however_late_a_lane_learns_of_the_end(staleness: int, pause: float) -> None:
    def source() -> Iterator[Any]:
        yield from source_of(4)
        time.sleep(pause)

    run, exact = Run(staleness=staleness), Run(staleness=staleness)
    exact.losses(iter(source_of(4)), 4)  # the end is not asked for
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
    expected, source, losses = undisturbed.losses(iter(source_of(3))), iter(source_of(3)), []
    for _ in range(3):
        losses += run.losses(source, 1)
        run.pipeline._optimizer.zero_grad()
        assert run.pipeline._unfinished
    assert losses == expected
    assert same(run.values(), undisturbed.values())


def test_every_stage_of_every_batch_is_a_range_in_a_profile() -> None:
    run = Run(staleness=1)
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
        run.losses(iter(source_of(3)))
    seen = {event.name for event in profiled.events()}
    for stage in run.pipeline.schedule.stages:
        assert {f"## {stage.name} {batch} ##" for batch in range(3)} <= seen, stage.name


def test_an_added_stage_runs_for_each_batch_in_its_lane_and_place() -> None:
    seen: list[tuple[int, str, bool]] = []

    def look(context: FineGrainedContext) -> None:
        seen.append((context.number, threading.current_thread().name, context.runs["lookup"].done()))

    stage = Stage(name="look", lane="sparse", stale=True, waits_for=("lookup",), work=look)
    run = Run(staleness=1, schedule=Schedule().with_stage(stage, after="lookup"))
    run.losses(iter(source_of(4)))
    assert seen == [(batch, "turbogr-sparse", True) for batch in range(4)]
