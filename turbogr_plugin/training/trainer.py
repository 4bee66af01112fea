"""The trainer: one loop over stock TorchRec parts.

The planner, DistributedModelParallel, TrainPipelineSparseDist, the fused row-wise Adagrad and the KeyedOptimizers are
TorchRec's; what is added around them is the scale of the loss, evaluation over the whole corpus, checkpoints and logs.
`Trainer.train` is the loop; the model on its store comes as a `session.Session`.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from turbogr_plugin.backend.collectives import on_first_rank
from turbogr_plugin.data.batch import SequenceBatch
from turbogr_plugin.data.loader import TrainingSteps, training_batches
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.checkpoints import (
    Checkpoint,
    find_checkpoint,
    initialize_optimizer_state,
    latest_checkpoint,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from turbogr_plugin.training.optimizers import build_optimizer
from turbogr_plugin.training.progress import Progress
from turbogr_plugin.training.run_folder import RunFolder
from turbogr_plugin.training.session import Session

BEST = "best"


@dataclass
class _Position:
    """Where training stands: what a checkpoint holds besides tensors."""

    step: int = 0
    best_step: int = -1
    best_epoch: int = -1
    best_ndcg: float = -1.0
    stale: int = 0
    stopped: bool = False
    seconds: float = 0.0
    validation: dict[str, dict[str, float]] = field(default_factory=dict)


class Trainer:
    """Trains a session's model and leaves a run folder; see the module."""

    def __init__(self, session: Session, *, resume: bool) -> None:
        """Args:
        session: the model on its store.
        resume: go on from the latest complete checkpoint of the run folder; none there starts anew.

        Raises:
            InputError: checkpoints that are there already without `resume`, or of another model with it.
        """
        config = session.config
        self.session, self.config = session, config
        self.steps = TrainingSteps(
            session.store,
            max_length=session.max_length,
            global_batch_size=config.training.global_batch_size,
            negatives=config.negatives,
            seed=config.training.seed,
            rank=session.rank,
            world_size=session.world_size,
        )
        self.total_steps = config.training.epochs * self.steps.steps_per_epoch
        self.optimizer = build_optimizer(session.model, config.optimizer)
        self.pipeline: TrainPipelineSparseDist[SequenceBatch, Tensor] = TrainPipelineSparseDist(
            session.model, self.optimizer, session.device, execute_all_batches=True
        )
        self.position = _Position()
        latest = latest_checkpoint(session.checkpoints)
        if latest is not None and not resume:
            raise InputError(
                f"{session.checkpoints} holds the checkpoint {latest.path.name} of an earlier run: pass --resume to go "
                "on from it, or another --output"
            )
        initialize_optimizer_state(self.optimizer)
        if latest is not None:
            self._load(latest)
        self.folder = on_first_rank(self._open_folder, session.group)
        self.progress = (
            Progress(self.total_steps, done=self.position.step, steps_per_epoch=self.steps.steps_per_epoch)
            if session.rank == 0
            else None
        )
        # Losses and tokens of the steps since the last read, on the device.
        self._pending: list[Tensor] = []

    def _open_folder(self) -> RunFolder:
        try:
            return RunFolder(Path(self.config.output), resume_step=self.position.step)
        except OSError as error:
            raise InputError(
                f"output {self.config.output}: {error.strerror} ({error.filename}): name a folder that can be written"
            ) from error

    def train(self) -> dict[str, Any]:
        """Trains to the end, tests the best checkpoint, and returns the summary (the same on every rank)."""
        started = time.monotonic() - self.position.seconds
        batches = training_batches(self.steps, self.position.step, self.total_steps, workers=self.config.data.workers)
        if self.progress and self.position.step:
            done = self.position.stopped or self.position.step >= self.total_steps
            what_follows = ": training is done, testing again" if done else ""
            self.progress.say(f"resumed at step {self.position.step}{what_follows}")
        while self.position.step < self.total_steps and not self.position.stopped:
            epoch_end = (self.position.step // self.steps.steps_per_epoch + 1) * self.steps.steps_per_epoch
            epoch_batches = itertools.islice(batches, epoch_end - self.position.step)
            for _ in range(self.position.step, epoch_end):
                loss = self.pipeline.progress(epoch_batches)
                self.position.step += 1
                self._after_step(loss, epoch_end, started)
            self.pipeline.detach()
            self._after_epoch(epoch_end // self.steps.steps_per_epoch, started)
        del batches
        return self._finish(started)

    def _after_step(self, loss: Tensor, epoch_end: int, started: float) -> None:
        """Once per step: keeps the loss; reads losses every `log_every` steps, saves every `checkpoint_every`."""
        self._pending.append(loss)
        step, every = self.position.step, self.config.training.checkpoint_every
        due = bool(every) and step % every == 0 and not self._validates(step)
        if step % self.config.training.log_every == 0 or step == epoch_end or due:
            self._read_losses()
        if due:
            self.position.seconds = time.monotonic() - started
            self._save()

    def _read_losses(self) -> None:
        """Sums the kept losses over ranks and logs them: the one host synchronisation of the loop."""
        if not self._pending:
            return
        losses = torch.stack(self._pending).double()
        self._pending.clear()
        if self.session.world_size > 1:
            dist.all_reduce(losses, group=self.session.group)
        if self.folder is None or self.progress is None:
            return
        first = self.position.step - losses.numel()
        per_epoch = self.steps.steps_per_epoch
        tokens = [self.steps.tokens_of_step(step) for step in range(first, self.position.step)]
        self.folder.log_steps(
            {"step": first + i + 1, "epoch": (first + i) // per_epoch + 1, "loss": loss, "tokens": tokens[i]}
            for i, loss in enumerate(losses.tolist())
        )
        self.progress.report(self.position.step, float(losses[-1]), sum(tokens))

    def _validates(self, step: int) -> bool:
        """Whether a validation, and with it a checkpoint, follows this step."""
        epoch, within = divmod(step, self.steps.steps_per_epoch)
        return within == 0 and (epoch % self.config.training.evaluate_every == 0 or step >= self.total_steps)

    def _after_epoch(self, epoch: int, started: float) -> None:
        """Once per epoch: validates every `evaluate_every` epochs, keeps the best, decides whether to stop."""
        config, position = self.config.training, self.position
        if not self._validates(position.step):
            return
        result = self.session.evaluate("validation", max_users=self.config.evaluation.max_users)
        ndcg = result.filtered["ndcg@10"]
        is_best = ndcg > position.best_ndcg
        position.stale = 0 if is_best else position.stale + 1
        if is_best:
            position.best_ndcg, position.best_step, position.best_epoch = ndcg, position.step, epoch
            position.validation = {"filtered": result.filtered, "unfiltered": result.unfiltered}
        position.stopped = bool(config.patience) and position.stale >= config.patience
        position.seconds = time.monotonic() - started
        if self.folder is not None and self.progress is not None:
            self.folder.log_validation(
                {"step": position.step, "epoch": epoch, "filtered": result.filtered, "unfiltered": result.unfiltered}
            )
            self.progress.say(
                f"epoch {epoch}: validation NDCG@10 {ndcg:.4f}, HR@10 {result.filtered['hr@10']:.4f}"
                + (" (best)" if is_best else f" (best {position.best_ndcg:.4f}, epoch {position.best_epoch})")
            )
        # The best first: a kill between the two leaves a position that is repeated and finds the same best again.
        if is_best:
            self._save(name=BEST)
        self._save()

    def _state(self) -> dict[str, Any]:
        return {"model": self.session.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _batches(self) -> dict[str, Any]:
        """What decides the batches of a step: only with the same does a position say where training stands."""
        training, files = self.config.training, self.session.store.manifest["files"]
        return {
            "training.seed": training.seed,
            "training.global_batch_size": training.global_batch_size,
            "the sha256 of the store's item_ids.npy": files["item_ids.npy"]["sha256"],
        }

    def _save(self, name: str | None = None) -> None:
        save_checkpoint(
            self.session.checkpoints,
            step=self.position.step,
            state=self._state(),
            extra={"position": vars(self.position), "batches": self._batches()},
            per_rank=rng_state(),
            keep=self.config.training.keep,
            name=name,
            process_group=self.session.group,
        )

    def _load(self, checkpoint: Checkpoint) -> None:
        state, generators = self._state(), rng_state()
        extra = load_checkpoint(checkpoint, state, per_rank=generators, process_group=self.session.group)
        self.session.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_rng_state(generators)
        for name, value in self._batches().items():
            if extra["batches"][name] != value:
                raise InputError(
                    f"{checkpoint.path} cannot be resumed: {name} was {extra['batches'][name]} and is {value} now. Use "
                    "the former, or train anew with another --output."
                )
        self.position = _Position(**extra["position"])

    def _finish(self, started: float) -> dict[str, Any]:
        best = find_checkpoint(self.session.checkpoints, BEST)
        if best is None:
            raise InputError(
                f"{self.session.checkpoints} has lost its checkpoint {BEST!r}, which the test needs: resume the run "
                "from an earlier checkpoint, or train anew"
            )
        self.session.load_model(best)
        result = self.session.evaluate("test")
        position = self.position
        seconds = time.monotonic() - started
        summary = {
            "best_epoch": position.best_epoch,
            "best_step": position.best_step,
            "epochs": position.step // self.steps.steps_per_epoch,
            "steps": position.step,
            "stopped_early": position.stopped,
            "seconds": round(seconds, 1),
            "world_size": self.session.world_size,
            "device": str(self.session.device),
            "store": {name: about["sha256"] for name, about in self.session.store.manifest["files"].items()},
            "test_users": len(result.users),
            "validation": position.validation,
            "test": {"filtered": result.filtered, "unfiltered": result.unfiltered},
        }
        if self.folder is not None and self.progress is not None:
            self.progress.close()
            self.folder.finish(
                summary,
                np.asarray(self.session.store.raw_user_ids)[result.users.numpy()],
                result.filtered_ranks.numpy(),
                result.unfiltered_ranks.numpy(),
            )
        return summary
