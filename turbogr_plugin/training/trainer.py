"""The trainer: one loop over TorchRec's parts and a pipeline, ours or TorchRec's.

The planner, DistributedModelParallel, the fused row-wise Adagrad and the KeyedOptimizers are TorchRec's; what is added
around them is the scale of the loss, evaluation over the whole corpus, checkpoints and logs. `Trainer.train` is the
loop; the model on its store comes as a `session.Session`.

Each epoch is an iterator of its own, so nothing is in flight at its end: validation, and a checkpoint of it, see every
update. A checkpoint between has them, too (the state dict of the tables waits for them); but at a staleness above 0 the
next lookups have been made already, before the last updates, which a run that is resumed from there makes after them.
So a resumed run is the same to the bit from any checkpoint at staleness 0, and above from those of epochs' ends.
"""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from turbogr_plugin.backend.collectives import on_first_rank
from turbogr_plugin.backend.host_versions import installed_versions
from turbogr_plugin.backend.rank_exchange import RankExchange
from turbogr_plugin.data.loader import TrainingSteps, training_batches
from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels import dispatch
from turbogr_plugin.pipeline.timeline_recording import TimelineRecording
from turbogr_plugin.sharding.sequence_cost import SequenceCost
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
from turbogr_plugin.training.pipelines import build_pipeline, choice_of, close, give_back
from turbogr_plugin.training.progress import Progress
from turbogr_plugin.training.provenance import check_resumable, provenance
from turbogr_plugin.training.run_folder import RunFolder
from turbogr_plugin.training.session import Session

BEST = "best"

#: Steps of this process before the timeline begins: the first ones build what later ones find there.
_PROFILED_FROM = 5


@dataclass
class _Position:
    """Where training stands: what a checkpoint holds besides tensors."""

    step: int = 0
    best_step: int = -1
    best_epoch: int = -1
    best_ndcg: float = -1.0
    stale: int = 0
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
        self.session, self.config, self._resume = session, config, resume
        self.steps = TrainingSteps(
            session.store,
            max_length=session.max_length,
            global_batch_size=config.training.global_batch_size,
            negatives=config.negatives,
            seed=config.training.seed,
            rank=session.rank,
            world_size=session.world_size,
            balance=config.balance,
            cost=SequenceCost.hstu(config.model.dimensions().dim),
        )
        self.total_steps = config.training.epochs * self.steps.steps_per_epoch
        self.optimizer = build_optimizer(session.model, config.optimizer)
        self.position = _Position()
        latest = self._latest_checkpoint()
        if latest is not None and not resume:
            raise InputError(
                f"{session.checkpoints} holds the checkpoint {latest.path.name} of an earlier run: pass --resume to go "
                "on from it, or another --output"
            )
        initialize_optimizer_state(self.optimizer)
        if latest is not None:
            self._load(latest)
        self.pipeline = build_pipeline(
            config.pipeline, session.model, self.optimizer, session.device, steps_done=self.position.step
        )
        self.folder = on_first_rank(self._open_folder, session.group)
        self.progress = (
            Progress(self.total_steps, done=self.position.step, steps_per_epoch=self.steps.steps_per_epoch)
            if session.rank == 0
            else None
        )
        # Losses and tokens of the steps since the last read, on the device.
        self._pending: list[Tensor] = []
        self._recording = TimelineRecording(config.profile, session.device) if config.profile else None
        self._choice_is_told = False
        self._recorded_from = self.position.step + _PROFILED_FROM

    def _latest_checkpoint(self) -> Checkpoint | None:
        """What all ranks find; they must see the same folder, or loading would be a collective of some of them."""
        latest = latest_checkpoint(self.session.checkpoints)
        step = -1 if latest is None else latest.step
        exchange = RankExchange(self.session.device, self.session.group)
        steps = [row[0] for row in exchange.agree(None, step, doing="looking for a checkpoint")]
        if len(set(steps)) > 1:
            seen = ", ".join("none" if each < 0 else f"step {each}" for each in steps)
            raise InputError(
                f"{self.session.checkpoints}: the ranks find different latest checkpoints ({seen}): the run folder "
                "must be on a file system that all of them share"
            )
        return latest

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
        batches = training_batches(
            self.steps,
            self.position.step,
            self.total_steps,
            workers=self.config.data.workers,
            pin=self.session.device.type != "cpu",
        )
        if self.progress and self._resume:
            done = self._stops_early() or self.position.step >= self.total_steps
            what_follows = ": training is done, testing again" if done else ""
            found = f"resumed at step {self.position.step}{what_follows}"
            nothing = f"no checkpoint in {self.session.checkpoints}: starting anew"
            self.progress.say(found if self.position.step else nothing)
        if self.progress and self.session.grouped_plan is not None:
            self.progress.say(f"{self.session.grouped_plan}")
        while self.position.step < self.total_steps and not self._stops_early():
            epoch_end = (self.position.step // self.steps.steps_per_epoch + 1) * self.steps.steps_per_epoch
            epoch_batches = itertools.islice(batches, epoch_end - self.position.step)
            for step in range(self.position.step, epoch_end):
                with self._recorded(step):
                    loss = self.pipeline.progress(epoch_batches)
                self.position.step += 1
                self._after_step(loss, epoch_end, started)
            give_back(self.pipeline)
            with self._pause():
                self._after_epoch(epoch_end // self.steps.steps_per_epoch, started)
        del batches
        close(self.pipeline)
        self._write_timeline()
        return self._finish(started)

    def _recorded(self, step: int) -> AbstractContextManager[None]:
        """The step is part of the timeline, if there is to be one."""
        if self._recording is None or step < self._recorded_from:
            return nullcontext()
        return self._recording.step(step)

    def _write_timeline(self) -> None:
        """Once, when its steps are over: each rank has recorded its own, those of rank 0 are kept."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        if self.folder is None or self.progress is None:
            return
        if self.position.step < self._recorded_from + 2:  # a step counts when there is one before it
            self.progress.say(f"no timeline: it begins {_PROFILED_FROM + 1} steps after the start")
            return
        folder = Path(self.config.output) / "timeline"
        timeline = recording.timeline()
        timeline.write(folder)
        self.progress.say(f"timeline in {folder}:\n{timeline.table()}")

    def _after_step(self, loss: Tensor, epoch_end: int, started: float) -> None:
        """Once per step: keeps the loss; reads losses every `log_every` steps, saves every `checkpoint_every`."""
        self._pending.append(loss)
        if not self._choice_is_told and (choice := choice_of(self.pipeline)) is not None:
            self._choice_is_told = True
            if self.progress is not None:
                self.progress.say("\n".join(choice.lines()))
        if self._recording is not None and self._recording.done:
            self._write_timeline()
        step, every = self.position.step, self.config.training.checkpoint_every
        due = bool(every) and step % every == 0 and not self._validates(step)
        if step % self.config.training.log_every == 0 or step == epoch_end or due:
            self._read_losses()
        elif self.progress is not None:
            self.progress.tick(step)
        if due:
            self.position.seconds = time.monotonic() - started
            with self._pause():
                self._save()

    def _pause(self) -> AbstractContextManager[None]:
        return nullcontext() if self.progress is None else self.progress.pause()

    def _read_losses(self) -> None:
        """Sums the kept losses over ranks and logs them; this waits for the device."""
        if not self._pending:
            return
        losses = torch.stack(self._pending).cpu().double()  # not every accelerator has float64
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

    def _stops_early(self) -> bool:
        patience = self.config.training.patience
        return bool(patience) and self.position.stale >= patience

    def _validates(self, step: int) -> bool:
        """Whether a validation, and with it a checkpoint, follows this step."""
        epoch, within = divmod(step, self.steps.steps_per_epoch)
        return within == 0 and (epoch % self.config.training.evaluate_every == 0 or step >= self.total_steps)

    def _after_epoch(self, epoch: int, started: float) -> None:
        """Once per epoch: validates every `evaluate_every` epochs, keeps the best, decides whether to stop."""
        position = self.position
        if not self._validates(position.step):
            return
        result = self.session.evaluate("validation", max_users=self.config.evaluation.max_users)
        ndcg = result.filtered["ndcg@10"]
        is_best = ndcg > position.best_ndcg
        position.stale = 0 if is_best else position.stale + 1
        if is_best:
            position.best_ndcg, position.best_step, position.best_epoch = ndcg, position.step, epoch
            position.validation = {"filtered": result.filtered, "unfiltered": result.unfiltered}
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

    def _save(self, name: str | None = None) -> None:
        save_checkpoint(
            self.session.checkpoints,
            step=self.position.step,
            state=self._state(),
            extra={
                "position": vars(self.position),
                "provenance": provenance(self.config, self.session.store),
                "steps": self.steps.identity(),
            },
            per_rank=rng_state(),
            keep=self.config.training.keep,
            name=name,
            process_group=self.session.group,
        )

    def _load(self, checkpoint: Checkpoint) -> None:
        check_resumable(checkpoint, provenance(self.config, self.session.store))
        state, generators = self._state(), rng_state()
        extra = load_checkpoint(checkpoint, state, per_rank=generators, process_group=self.session.group)
        self.steps.check_resumable(extra.get("steps", {}))
        self.session.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_rng_state(generators)
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
        tested = _Position(**best.extra["position"])
        seconds = time.monotonic() - started
        summary = {
            "best_epoch": tested.best_epoch,
            "best_step": tested.best_step,
            "epochs": self.position.step // self.steps.steps_per_epoch,
            "steps": self.position.step,
            "stopped_early": self._stops_early(),
            "seconds": round(seconds, 1),
            "world_size": self.session.world_size,
            "device": str(self.session.device),
            "versions": installed_versions(),
            "precision": self.config.training.precision,
            "matmul_precision": self.config.training.matmul_precision,
            "table_precision": self.config.training.table_precision,
            "kernels": dispatch.taken(),
            "store": provenance(self.config, self.session.store)["store"],
            "test_users": len(result.users),
            "validation": tested.validation,
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
