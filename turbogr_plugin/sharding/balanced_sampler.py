"""A plan of steps as a batch sampler of torch's DataLoader: index lists of one rank, resumable.

    plan = LookaheadPlan(SequenceCost.hstu(512).of(lengths), ranks=world_size, global_batch_size=2 * world_size)
    sampler = BalancedBatchSampler(plan, rank=rank)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

It fits any training loop that takes an iterator of batches. All ranks make the same number of steps; `collate` gets an
empty list where a rank has no sample in one, for it still takes part in every collective of that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from turbogr_plugin.sharding.step_plans import StepPlan


class BalancedBatchSampler(Sampler[list[int]]):
    """Yields this rank's samples of each step of an epoch, from the current position on.

    Iterating to the end goes on to the next epoch, so the same sampler serves a whole run.
    """

    def __init__(self, plan: StepPlan, *, rank: int) -> None:
        """Args:
        plan: the same on all ranks.
        rank: of this process.
        """
        if not 0 <= rank < plan.ranks:
            raise ValueError(f"rank must be in [0, {plan.ranks}), got {rank}")
        self.plan, self.rank = plan, rank
        self.epoch = 0
        self._step = 0

    def __len__(self) -> int:
        """Steps of the current epoch, those already made included."""
        return self.plan.steps_of_epoch(self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        for step in range(self._step, self.plan.steps_of_epoch(epoch)):
            self.epoch, self._step = epoch, step + 1
            yield self.plan.samples_of_step(epoch, step)[self.rank].tolist()
        self.epoch, self._step = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; the current one is gone on with, so a resumed loop may call it."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if epoch != self.epoch:
            self.epoch, self._step = epoch, 0

    def state_dict(self, *, epoch: int | None = None, step: int | None = None) -> dict[str, Any]:
        """The position, for a checkpoint.

        Args:
            epoch: that training is in, and
            step: steps that it has made in it. To be given with a DataLoader that has workers: it draws ahead of the
                training loop. By default what has been yielded.
        """
        if (epoch is None) != (step is None):
            raise ValueError(f"epoch and step belong together, got epoch={epoch} and step={step}")
        if epoch is None or step is None:
            epoch, step = self.epoch, self._step
        return {"epoch": epoch, "step": step, "plan": self.plan.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position.

        Raises:
            ValueError: the position is of another plan, or outside its epoch.
        """
        own, theirs = self.plan.identity(), state["plan"]
        changed = [
            f"{name} {theirs.get(name)!r}, now {own.get(name)!r}"
            for name in own | theirs
            if own.get(name) != theirs.get(name)
        ]
        if changed:
            raise ValueError(f"state is of another plan: {'; '.join(changed)}")
        if state["epoch"] < 0:
            raise ValueError(f"epoch must be at least 0, got {state['epoch']}")
        steps = self.plan.steps_of_epoch(state["epoch"])
        if not 0 <= state["step"] <= steps:
            raise ValueError(f"step must be in [0, {steps}] in epoch {state['epoch']}, got {state['step']}")
        self.epoch, self._step = state["epoch"], state["step"]
