"""What the tests of uneven batches run on ranks; see tests/npu/ranks.py."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.pipeline import uneven_model
from tests.pipeline.small_model import Batch
from turbogr_plugin.pipeline.train_pipeline_fine_grained import TrainPipelineFineGrained

Sizes = list[list[int]]


def plain(*, kinds: list[str], sizes: Sizes, group: int | None = None) -> dict[str, Any]:
    """The loop without a pipeline on batches of `sizes[rank][step]` samples."""
    model = uneven_model.sharded(kinds, group=group)
    losses = uneven_model.plain(model, uneven_model.batches(sizes[dist.get_rank()], rank=dist.get_rank()))
    return {"losses": losses, "weights": uneven_model.weights_of(model)}


def pipelined(
    *,
    kinds: list[str],
    sizes: Sizes,
    when_exhausted: str,
    staleness: int = 0,
    group: int | None = None,
    own_group: bool = True,
) -> dict[str, Any]:
    """The pipeline on the same, until it says that there is no more; and once more."""
    model = uneven_model.sharded(kinds, group=group, own_group=own_group)
    pipeline = _pipeline(model, when_exhausted, staleness)
    source = iter(uneven_model.batches(sizes[dist.get_rank()], rank=dist.get_rank()))
    losses = _all_of(pipeline, source)
    again = _all_of(pipeline, source)
    pipeline.detach()
    return {"losses": losses, "again": again, "weights": uneven_model.weights_of(model)}


def without_an_empty_batch(*, sizes: Sizes, fails: bool) -> None:
    """`fails`: rank 0 cannot make one; else ranks without a batch of their own have nothing to make it of."""
    model = uneven_model.sharded(["sequences"])
    made: Any = TrainPipelineFineGrained
    rank = dist.get_rank()

    def empty(last: Batch) -> Batch:
        if fails and rank == 0:
            raise ValueError("no empty batch here")
        return uneven_model.empty_from(last)

    pipeline = made(
        *(model, uneven_model.dense_optimizer(model), uneven_model.CPU), when_exhausted="fill", empty_batch=empty
    )
    _all_of(pipeline, iter(uneven_model.batches(sizes[rank], rank=rank)))


def started_again(
    *, starts: list[Sizes], staleness: int, no_batch_in: int | None = None, no_empty_batch_in: int | None = None
) -> list[Any]:
    """A pipeline that fills up, over iterators one after the other; reset() follows a failure.

    Args:
        starts: sizes of each iterator's batches, `[start][rank][step]`.
        staleness: of the lookups.
        no_batch_in: start in which the iterator of rank 0 raises.
        no_empty_batch_in: start in which rank 0 cannot make an empty batch.

    Returns:
        by start the losses, or the message of what was raised.
    """
    model = uneven_model.sharded(["bags", "sequences"])
    made: Any = TrainPipelineFineGrained
    rank, now = dist.get_rank(), 0

    def empty(last: Batch) -> Batch:
        if (rank, now) == (0, no_empty_batch_in):
            raise ValueError("no empty batch here")
        return uneven_model.empty_from(last)

    def source(sizes: Sequence[int], start: int) -> Iterator[Batch]:
        if (rank, start) == (0, no_batch_in):
            raise ValueError("no batch here")
        yield from uneven_model.batches(sizes, rank=rank)

    pipeline = made(
        *(model, uneven_model.dense_optimizer(model), uneven_model.CPU),
        when_exhausted="fill",
        empty_batch=empty,
        staleness=staleness,
    )
    found: list[Any] = []
    for now, start in enumerate(starts):
        try:
            found.append(_all_of(pipeline, source(start[rank], now)))
        except RuntimeError as error:
            found.append(str(error))
            pipeline.reset()
    return found


def failing_twice() -> list[str]:
    """What a pipeline raises where the forward pass fails on all ranks, and fails otherwise after reset()."""
    model = uneven_model.sharded(["sequences"])
    made: Any = TrainPipelineFineGrained
    reasons = iter(("the first", "the second"))

    def fail(_: Batch) -> Any:
        raise ArithmeticError(next(reasons))

    pipeline = made(*(model, uneven_model.dense_optimizer(model), uneven_model.CPU), custom_model_fwd=fail)
    found = []
    for _ in range(2):
        try:
            pipeline.progress(iter(uneven_model.batches([2, 2], rank=dist.get_rank())))
        except Exception as error:
            found.append(str(error))
        pipeline.reset()
    return found


def stopping_in_the_forward_pass() -> list[str]:
    """What the pipeline raises where a model's forward pass raises StopIteration, as a call of next() may."""
    model = uneven_model.sharded(["sequences"])
    made: Any = TrainPipelineFineGrained
    pipeline = made(
        *(model, uneven_model.dense_optimizer(model), uneven_model.CPU), custom_model_fwd=lambda _: next(iter(()))
    )
    try:
        pipeline.progress(iter(uneven_model.batches([2, 2], rank=0)))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def epochs(
    *, sizes: list[Sizes], workers: int, when_exhausted: str, staleness: int = 0, same_loader: bool = True
) -> dict[str, Any]:
    """An epoch after the other of a loader, whose worker processes live on; `sizes[epoch][rank][step]`.

    `same_loader`: all epochs have the batches of the first and one loader; else a new list for each.
    """
    rank = dist.get_rank()
    model = uneven_model.sharded(["bags", "sequences"])
    pipeline = _pipeline(model, when_exhausted, staleness)
    batches = _Slow(sizes[0][rank], rank)
    # a worker that is forked has the threads of gloo's groups as locks that nobody frees; spawned ones take seconds
    loader = DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context=_context(workers),
    )
    losses = []
    for of_epoch in sizes:
        source: Iterable[Batch] = loader if same_loader else uneven_model.batches(of_epoch[rank], rank=rank)
        losses.append(_all_of(pipeline, iter(source)))
    pipeline.detach()
    return {"losses": losses, "weights": uneven_model.weights_of(model)}


def _context(workers: int) -> str | None:
    return "fork" if workers else None


class _Slow(torch.utils.data.Dataset[Batch]):
    """Batches that take a while: those that a rank has more than another are still under way when all stop."""

    def __init__(self, sizes: Sequence[int], rank: int) -> None:
        self._sizes, self._rank = sizes, rank

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, step: int) -> Batch:
        if step >= len(self._sizes):
            raise IndexError(step)
        time.sleep(0.01)
        return uneven_model.batch(self._sizes[step], rank=self._rank, step=step)


def evaluated_between_steps(
    *, sizes: Sizes, evaluations: Sizes, every: int, staleness: int, group: int | None = None, evaluates: bool = True
) -> dict[str, Any]:
    """Training that stops every few steps to evaluate batches of another iterator with the same pipeline.

    Returns:
        losses and weights of training, and losses of each evaluation; the latter also as the model itself gives them
        when it is evaluated without a pipeline at the same place (with staleness 0 the same place has the same
        weights).
    """
    rank = dist.get_rank()
    model = uneven_model.sharded(["bags", "sequences"], group=group)
    pipeline = _pipeline(model, "fill", staleness)
    source = iter(uneven_model.batches(sizes[rank], rank=rank))
    losses: list[float] = []
    found: list[list[float]] = []
    themselves: list[list[float]] = []
    held = [uneven_model.batch(size, rank=rank, step=900 + step) for step, size in enumerate(evaluations[rank])]
    while True:
        try:
            losses.append(float(pipeline.progress(source)))
        except StopIteration:
            break
        if evaluates and len(losses) % every == 0:
            model.eval()
            with torch.no_grad():
                found.append(_all_of(pipeline, iter(held)))
                pipeline.detach()
                steps = max(map(len, evaluations))
                whole = held + [uneven_model.empty_from(held[-1])] * (steps - len(held))
                themselves.append([float(model(each)[1]) for each in whole])
            model.train()
    pipeline.detach()
    return {
        "losses": losses,
        "weights": uneven_model.weights_of(model),
        "evaluations": found,
        "themselves": themselves,
    }


def _pipeline(model: Any, when_exhausted: str, staleness: int) -> Any:
    made: Any = TrainPipelineFineGrained
    return made(
        model,
        uneven_model.dense_optimizer(model),
        uneven_model.CPU,
        staleness=staleness,
        when_exhausted=when_exhausted,
        empty_batch=uneven_model.empty_from if when_exhausted == "fill" else None,
    )


def _all_of(pipeline: Any, source: Iterator[Batch]) -> list[float]:
    losses: list[float] = []
    while True:
        try:
            losses.append(float(pipeline.progress(source)))
        except StopIteration:
            return losses
