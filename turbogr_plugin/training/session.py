"""A sharded model on its store: what training, evaluation and recommendation share. Every call is a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from turbogr_plugin.data.loader import EvaluationBatch, Held, evaluation_batch, evaluation_batches
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.sharding.hierarchical_plan import HierarchicalShardingPlan
from turbogr_plugin.training.assembly import ITEM_WEIGHT, build_model
from turbogr_plugin.training.checkpoints import Checkpoint, load_checkpoint
from turbogr_plugin.training.config import RunConfig
from turbogr_plugin.training.evaluation import EvaluationQueries, EvaluationResult, TopItems, evaluate, top_k
from turbogr_plugin.training.item_corpus import ItemCorpus, local_item_rows
from turbogr_plugin.training.provenance import check_same_model, provenance


class Session:
    """A sharded model on its store, ready to train, evaluate or recommend."""

    def __init__(
        self, config: RunConfig, store: InteractionStore, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.config, self.store, self.group, self.device = config, store, group, device
        self.rank, self.world_size = group.rank(), group.size()
        self.model = build_model(config, store, group, device)
        plan = self.model.plan
        self.grouped_plan = plan if isinstance(plan, HierarchicalShardingPlan) else None
        self.group_size = self.world_size if self.grouped_plan is None else self.grouped_plan.group_size
        self.max_length = config.model.dimensions().max_length
        self.checkpoints = Path(config.output) / "checkpoints"

    def load_model(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Loads the weights alone; returns what the trainer stored beside them.

        Raises:
            InputError: a checkpoint of another model, or of a store with other items.
        """
        check_same_model(checkpoint, provenance(self.config, self.store))
        state = {"model": self.model.state_dict()}
        extra = load_checkpoint(checkpoint, state, process_group=self.group)
        self.model.load_state_dict(state["model"])
        return extra

    @contextmanager
    def _evaluating(self) -> Iterator[ItemCorpus]:
        """The model in evaluation mode and the item table as a corpus."""
        self.model.eval()
        try:
            yield ItemCorpus(
                local_item_rows(
                    self.model.state_dict()[ITEM_WEIGHT],
                    self.store.num_items,
                    process_group=self.group,
                    replica=self.rank // self.group_size,
                    replicas=self.world_size // self.group_size,
                ),
                num_items=self.store.num_items,
                device=self.device,
                normalize=self.config.loss.normalize,
                chunk_items=self.config.evaluation.chunk_items,
                process_group=self.group,
            )
        finally:
            self.model.train()

    @torch.no_grad()
    def _encode(self, batch: EvaluationBatch) -> EvaluationQueries:
        queries: Tensor = self.model(batch.sequences.to(self.device))
        return EvaluationQueries(
            queries=queries,
            users=batch.sequences.sample_ids.to(self.device),
            targets=batch.targets.to(self.device),
            seen_values=batch.seen_values.to(self.device),
            seen_offsets=batch.seen_offsets.to(self.device),
        )

    def _batches(self, users: np.ndarray, held: Held | None) -> Iterator[EvaluationBatch]:
        return evaluation_batches(
            self.store,
            users,
            held,
            max_length=self.max_length,
            batch_size=self.config.evaluation.batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _empty_batch(self, held: Held | None) -> EvaluationBatch:
        return evaluation_batch(self.store, np.empty(0, dtype=np.int64), held, max_length=self.max_length)

    def evaluate(self, held: Held, *, max_users: int = 0) -> EvaluationResult:
        """Ranks the held-out item of each user (or of `max_users`, evenly spread) among all items."""
        users = np.arange(self.store.num_users)
        if 0 < max_users < len(users):
            users = users[np.linspace(0, len(users) - 1, max_users).round().astype(np.int64)]
        with self._evaluating() as corpus:
            return evaluate(
                self._encode,
                self._batches(users, held),
                corpus,
                empty_batch=self._empty_batch(held),
                cutoffs=self.config.evaluation.cutoffs,
            )

    def recommend(self, users: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, TopItems]]:
        """The k best unseen items after the whole history of each user; yields this rank's users with their items."""
        with self._evaluating() as corpus:
            for batch in self._batches(users, None):
                query = self._encode(batch)
                yield (
                    batch.sequences.sample_ids.numpy(),
                    top_k(corpus, query.queries, query.seen_values, query.seen_offsets, k),
                )
