"""One batch of user sequences, as TorchRec pipelines move it, and how it is collated.

A batch is a KeyedJaggedTensor with two features of one shared table, `item` (the sequences) and `negative` (the sampled
negatives), and jagged times beside it. Collating is array work: no Python loop over the samples.

Letters: B samples, T tokens (items of all sequences), N targets, M negatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.kernels.offsets import lengths_to_offsets
from turbogr_plugin.negatives.uniform import NegativesConfig, uniform_negatives

ITEM = "item"
NEGATIVE = "negative"


@dataclass
class SequenceBatch(Pipelineable):
    """User sequences of one rank and step.

    Attributes:
        features: keys `item` (T ids) and `negative` (M ids), stride B (1, an empty row, where B is 0), int64 dense item
            indices.
        offsets: [B + 1] int64, layout of the items and of `times`.
        times: [T] int64, seconds.
        sample_ids: [B] int64, dense user indices: what random numbers are keyed by.
        query_index: [N] int64, tokens that have a next item in their sequence; the target of token i is token i + 1.
        target_lengths: [B] int64, targets of each sample.
        host_target_offsets: [B + 1], layout of the targets on the host, for code that would have to wait for it.
        tokens: T.
        seed: of the run.
        step: global training step.
    """

    features: KeyedJaggedTensor
    offsets: Tensor
    times: Tensor
    sample_ids: Tensor
    query_index: Tensor
    target_lengths: Tensor
    host_target_offsets: list[int]
    tokens: int
    seed: int
    step: int

    @property
    def item_ids(self) -> Tensor:
        """[T] int64."""
        return self.features.values()[: self.tokens]

    @property
    def negative_ids(self) -> Tensor:
        """[M] int64."""
        return self.features.values()[self.tokens :]

    def _moved(self, move: Callable[[KeyedJaggedTensor | Tensor], KeyedJaggedTensor | Tensor]) -> SequenceBatch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, (Tensor, KeyedJaggedTensor)):
                values[name] = move(value)
        return SequenceBatch(**values)

    def to(self, device: torch.device, non_blocking: bool = False) -> SequenceBatch:
        """The batch on `device`."""
        return self._moved(lambda value: value.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> SequenceBatch:
        """The batch in pinned host memory."""
        return self._moved(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of all tensors until `stream` has passed this point."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (Tensor, KeyedJaggedTensor)):
                value.record_stream(stream)


def gather_rows(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of all elements of the rows [start, start + length), one row after the other: int64 [sum of lengths]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def in_seconds(times: np.ndarray, unit: str) -> np.ndarray:
    """Times of a store in whole seconds; times without a unit stay as they are."""
    return times // 1000 if unit == "ms" else times


def collate_sequences(
    store: InteractionStore,
    users: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    negatives: NegativesConfig | None,
    seed: int,
    epoch: int,
    step: int,
) -> SequenceBatch:
    """The batch of the interactions [starts, ends) of `users`.

    Args:
        store: interactions.
        users: [B] dense user indices.
        starts: [B] first interaction of each sample, an index into the store's arrays.
        ends: [B] one past the last.
        negatives: how to draw negatives for every token that has a next one; None draws none.
        seed: of the run.
        epoch: keys the negatives.
        step: keys the dropout.

    Returns:
        the batch, on CPU.
    """
    lengths_np = (ends - starts).astype(np.int64)
    index = gather_rows(starts.astype(np.int64), lengths_np)
    items = torch.from_numpy(np.asarray(store.item_ids[index], dtype=np.int64))
    times = torch.from_numpy(in_seconds(np.asarray(store.times[index], dtype=np.int64), store.time_unit))
    samples = torch.from_numpy(users.astype(np.int64))
    lengths = torch.from_numpy(lengths_np)
    offsets = lengths_to_offsets(lengths)
    target_lengths = (lengths - 1).clamp_(min=0)
    target_offsets = lengths_to_offsets(target_lengths)
    is_last = torch.zeros(items.numel(), dtype=torch.bool)
    is_last[(offsets[1:] - 1)[lengths > 0]] = True
    if negatives is None:
        negative_ids, negative_lengths = items.new_empty(0), torch.zeros_like(lengths)
    else:
        negative_ids, negative_lengths = uniform_negatives(
            negatives,
            num_items=store.num_items,
            seed=seed,
            epoch=epoch,
            samples=samples,
            target_offsets=target_offsets,
        )
    # A rank without samples looks up one empty row: TorchRec cannot reshape the lengths of a stride of 0 (torchrec
    # 1.8.0, modules/utils.py, construct_jagged_tensors). Everything else of the batch stays empty.
    features = KeyedJaggedTensor(
        keys=[ITEM, NEGATIVE],
        values=torch.cat([items, negative_ids]),
        lengths=torch.cat([lengths, negative_lengths]) if len(users) else lengths.new_zeros(2),
        stride=max(1, len(users)),
        length_per_key=[items.numel(), negative_ids.numel()],
    )
    return SequenceBatch(
        features=features,
        offsets=offsets,
        times=times,
        sample_ids=samples,
        query_index=(~is_last).nonzero().squeeze(1),
        target_lengths=target_lengths,
        host_target_offsets=target_offsets.tolist(),
        tokens=items.numel(),
        seed=seed,
        step=step,
    )
