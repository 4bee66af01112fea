"""Batches belong to their iterators: in turns, over their ends, and with evaluation in between; one rank."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
)

from tests.pipeline.fine_grained_models import CPU
from tests.pipeline.one_rank import STEPS, Run, same, source_of
from turbogr_plugin.pipeline import Schedule, Stage

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("world_of_one")]


def test_a_loader_with_persistent_workers_works_for_a_second_epoch() -> None:
    data: Any = source_of(4)
    loader: Any = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    run, expected = Run(staleness=1, start_batch=100), Run(TrainPipelineBase)
    first = run.losses(iter(loader))
    second = run.losses(iter(loader))
    assert first + second == expected.losses(iter(source_of(4) + source_of(4)))


@pytest.mark.parametrize("staleness", [0, 2])
def test_iterators_keep_their_batches_when_they_take_turns(staleness: int) -> None:
    run, seen = Run(staleness=staleness), []
    run.model.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].floats.sum())))
    sources = [source_of(5, rank) for rank in (1, 2)]
    iterators = [iter(source) for source in sources]
    for turn in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1):
        run.losses(iterators[turn], 1)
    expected = [iter([float(batch.floats.sum()) for batch in source]) for source in sources]
    assert seen == [next(expected[turn]) for turn in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1)]
    assert run.losses(iterators[0]) == run.losses(iterators[1]) == []


def test_an_abandoned_iterator_is_freed_with_its_batches() -> None:
    run = Run()

    def some() -> Iterator[Any]:
        yield from source_of(5)

    kept, abandoned = some(), some()
    run.losses(kept, 1)
    run.losses(abandoned, 1)
    gone = weakref.ref(abandoned)
    run.losses(kept, 1)
    del abandoned
    gc.collect()
    assert gone() is None
    assert len(run.losses(kept)) == 3


def test_an_iterator_of_a_list_that_nobody_holds_is_forgotten() -> None:
    run = Run(staleness=1)
    for _ in range(4):
        run.losses(iter(source_of(8)), 3)
    assert len(run.pipeline._in_flight._parked) <= 1


def test_batches_are_numbered_without_gaps_over_the_ends_of_iterators() -> None:
    numbers: list[int] = []
    stage = Stage(name="number", lane="dense", work=lambda context: numbers.append(context.index))
    run = Run(staleness=1, schedule=Schedule().with_stage(stage))
    for steps in (3, 1, 4):
        run.losses(iter(source_of(steps)))
    assert numbers == list(range(8))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_numbers_do_not_depend_on_when_a_rank_learns_that_an_iterator_has_ended(staleness: int) -> None:
    numbers: list[int] = []
    stage = Stage(name="number", lane="dense", work=lambda context: numbers.append(context.index))
    run = Run(staleness=staleness, schedule=Schedule().with_stage(stage))
    aside, other = iter(source_of(4)), iter(source_of(3, 5))
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
    batches_of_all = iter(source_of(9))
    for _ in range(3):  # progress never says that an epoch has ended
        run.losses(itertools.islice(batches_of_all, 3), 3)
    assert numbers == list(range(9))
    assert not run.pipeline._in_flight._parked


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_evaluation_in_between_changes_nothing(staleness: int) -> None:
    undisturbed, run = Run(staleness=staleness), Run(staleness=staleness)
    expected = undisturbed.losses(iter(source_of()))
    source, other = iter(source_of()), iter(source_of(20, 5))
    losses: list[float] = []
    for steps in (2, 3, 1):
        losses += run.losses(source, steps)
        run.model.eval()
        with torch.no_grad():
            values = run.values()
            evaluated = run.losses(other, 2)
            assert len(evaluated) == 2 and same(values, run.values())
        run.model.train()
    assert losses == expected
    assert same(run.values(), undisturbed.values())


def test_one_iterator_can_serve_evaluation_and_then_training() -> None:
    run, expected = Run(staleness=2), Run(TrainPipelineBase)
    source = iter(source_of())
    run.model.eval()
    with torch.no_grad():
        evaluated = run.losses(source, 2)
    run.model.train()
    expected.model.eval()
    with torch.no_grad():
        other = iter(source_of())
        assert evaluated == expected.losses(other, 2)
    trained = run.losses(source)
    assert len(trained) == STEPS - 2
    again = Run(staleness=2)
    assert trained == again.losses(iter(source_of()[2:]))


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_batch_that_was_put_aside_misses_no_update_of_the_training_meanwhile(staleness: int, evaluates: bool) -> None:
    run, source, other = Run(staleness=staleness), source_of(12), source_of(20, 5)
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


def test_nothing_is_left_of_batches_that_are_through() -> None:
    run, alive = Run(staleness=1), weakref.WeakSet[Any]()

    def source() -> Iterator[Any]:
        for batch in itertools.islice(itertools.cycle(source_of()), 30):
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
