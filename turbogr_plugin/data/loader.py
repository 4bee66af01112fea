"""Which samples each step of each rank gets: training steps and evaluation steps.

The global batch of a step is a function of (seed, epoch, step) alone: a permutation of the users per epoch, cut into
global batches, of which rank r takes every world-size-th sample from the r-th on. Every rank therefore makes the same
number of steps (some ranks may get no sample in the last step of an epoch), the loader's position is one number, and
one rank sees what two ranks see. A plan of sharding/ may take the place of "every world-size-th", so that ranks have
equal work; look-ahead also changes which samples meet in a step, which then depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from turbogr_plugin.data.batch import SequenceBatch, collate_sequences, gather_rows
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.negatives.uniform import NegativesConfig
from turbogr_plugin.sharding.balance_config import BalanceConfig
from turbogr_plugin.sharding.sequence_cost import SequenceCost

Held = Literal["validation", "test"]


class TrainingSteps(Dataset[SequenceBatch]):
    """Map from the global training step to this rank's batch.

    A sample is a user's interactions without the last two (leave-one-out), of which the latest `max_length + 1` are
    taken: inputs and their next items. Users with fewer than two of them have nothing to predict and are not drawn.
    """

    def __init__(
        self,
        store: InteractionStore,
        *,
        max_length: int,
        global_batch_size: int,
        negatives: NegativesConfig,
        seed: int,
        rank: int,
        world_size: int,
        balance: BalanceConfig | None = None,
        cost: SequenceCost | None = None,
    ) -> None:
        """Args:
        store: interactions.
        max_length: longest input of the model.
        global_batch_size: samples of a step over all ranks.
        negatives: how to draw negatives.
        seed: of the run.
        rank: of this process.
        world_size: number of ranks.
        balance: of the samples over ranks; None balances nothing.
        cost: of a sequence, by which samples are balanced unless `balance` has one; by default its tokens.
        """
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {global_batch_size}")
        self._store = store
        self._max_length = max_length
        self._global_batch_size = global_batch_size
        self._negatives = negatives
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self.users = np.flatnonzero(np.diff(store.offsets) >= 4)
        if len(self.users) == 0:
            raise InputError(f"{store.path} has no user with two training interactions: nothing to predict")
        self.plan = None
        if balance is not None:
            starts, ends = self._bounds(self.users)
            self.plan = balance.plan(
                (ends - starts).astype(np.int64),
                of_model=cost or SequenceCost.tokens(),
                ranks=world_size,
                global_batch_size=global_batch_size,
                seed=seed,
            )
        per_epoch = -(-len(self.users) // global_batch_size)
        self.steps_per_epoch = per_epoch if self.plan is None else self.plan.steps_of_epoch(0)
        self._order: tuple[int, np.ndarray] = (-1, self.users)  # of the latest epoch asked for

    def users_of_step(self, step: int) -> np.ndarray:
        """Dense indices of the users in the global batch of a step, in order; with balance, rank after rank."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.plan is not None:
            return self.users[np.concatenate(self.plan.samples_of_step(epoch, position))]
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
            self._order = (epoch, generator.permutation(self.users))
        return self._order[1][position * self._global_batch_size : (position + 1) * self._global_batch_size]

    def check_resumable(self, identity: dict[str, Any]) -> None:
        """Raises InputError unless a run whose `identity` was this one can go on with these steps."""
        own = self.identity()
        changed = [
            f"{name} was {identity.get(name)} and is {own.get(name)}"
            for name in sorted(own.keys() | identity.keys())
            if own.get(name) != identity.get(name)
        ]
        if changed:
            raise InputError(
                f"the run cannot be resumed, its samples were balanced by another plan: {'; '.join(changed)}. "
                "Look-ahead goes on with as many ranks as it began with; reallocation goes on with any number"
            )

    def identity(self) -> dict[str, Any]:
        """What decides which samples meet in a step beside store, seed and batch size; empty without balance."""
        return {} if self.plan is None else self.plan.identity()

    def _bounds(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and one past the last interaction of each user's sample."""
        ends = self._store.offsets[users + 1] - 2
        return np.maximum(self._store.offsets[users], ends - (self._max_length + 1)), ends

    def tokens_of_step(self, step: int) -> int:
        """Tokens of the global batch of a step."""
        starts, ends = self._bounds(self.users_of_step(step))
        return int((ends - starts).sum())

    def __getitem__(self, step: int) -> SequenceBatch:
        if self.plan is None:
            users = self.users_of_step(step)[self._rank :: self._world_size]
        else:
            users = self.users[self.plan.samples_of_step(*divmod(step, self.steps_per_epoch))[self._rank]]
        starts, ends = self._bounds(users)
        return collate_sequences(
            self._store,
            users,
            starts,
            ends,
            negatives=self._negatives,
            seed=self._seed,
            epoch=step // self.steps_per_epoch,
            step=step,
        )


class _InputErrorsAsValues(Dataset[SequenceBatch | InputError]):
    """The steps, with what they raise as a value: a worker would hand it on as a traceback of many lines."""

    def __init__(self, steps: TrainingSteps) -> None:
        self._steps = steps

    def __getitem__(self, step: int) -> SequenceBatch | InputError:
        try:
            return self._steps[step]
        except InputError as error:
            return error


def _raised(batch: SequenceBatch | InputError) -> SequenceBatch:
    if isinstance(batch, InputError):
        raise batch
    return batch


def training_batches(
    steps: TrainingSteps, first: int, last: int, *, workers: int, pin: bool = False
) -> Iterator[SequenceBatch]:
    """This rank's batches of the global steps [first, last), in order, collated by `workers` processes ahead of use.

    Nothing is drawn from torch's global random generator.

    Args:
        steps: the batches by step.
        first: the first step.
        last: one past the last step.
        workers: processes; 0 collates in this one.
        pin: puts the batches into pinned memory, from which an accelerator copies without stopping the host.
    """
    loaded = iter(
        DataLoader(
            _InputErrorsAsValues(steps),
            batch_size=None,
            sampler=range(first, last),
            num_workers=workers,
            generator=torch.Generator(),  # else starting an iterator would draw its base seed from the global one
            prefetch_factor=4 if workers else None,
            pin_memory=pin,
        )
    )
    return map(_raised, loaded)


@dataclass
class EvaluationBatch:
    """Histories of one rank and step, what follows them, and what to leave out of the ranking.

    Attributes:
        sequences: the latest `max_length` interactions before the target; no negatives.
        targets: [B] int64 dense item indices.
        seen_values: jagged int64, all items of the whole history before the target.
        seen_offsets: [B + 1] int64.
    """

    sequences: SequenceBatch
    targets: torch.Tensor
    seen_values: torch.Tensor
    seen_offsets: torch.Tensor


def evaluation_batch(
    store: InteractionStore, users: np.ndarray, held: Held | None, *, max_length: int
) -> EvaluationBatch:
    """The evaluation batch of some users.

    Args:
        store: interactions.
        users: [B] dense user indices, may be empty.
        held: "test": the target is the last interaction, the history all before it, the validation item included;
            "validation": the target is the one before, the history all before that one; None: no target (-1), the
            history is everything (for recommending what comes next).
        max_length: longest input of the model.
    """
    withheld = {"validation": 2, "test": 1, None: 0}[held]
    first = store.offsets[users].astype(np.int64)
    ends = store.offsets[users + 1].astype(np.int64) - withheld
    seen = np.asarray(store.item_ids[gather_rows(first, ends - first)], dtype=np.int64)
    targets = np.asarray(store.item_ids[ends], dtype=np.int64) if held else np.full(len(users), -1, dtype=np.int64)
    return EvaluationBatch(
        sequences=collate_sequences(
            store, users, np.maximum(first, ends - max_length), ends, negatives=None, seed=0, epoch=0, step=0
        ),
        targets=torch.from_numpy(targets),
        seen_values=torch.from_numpy(seen),
        seen_offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(ends - first)]).astype(np.int64)),
    )


def evaluation_batches(
    store: InteractionStore,
    users: np.ndarray,
    held: Held | None,
    *,
    max_length: int,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Iterator[EvaluationBatch]:
    """This rank's share of `users`, in steps of `batch_size` per rank; every rank makes the same number of steps.

    Rank r takes every world-size-th user from the r-th on; ranks without users left get empty batches.
    """
    per_step = batch_size * world_size
    for start in range(0, len(users), per_step):
        mine = users[start : start + per_step][rank::world_size]
        yield evaluation_batch(store, mine, held, max_length=max_length)
