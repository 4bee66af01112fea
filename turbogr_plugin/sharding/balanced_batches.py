"""A batch iterator whose samples are balanced over ranks by all-to-all, where each rank reads its own files.

    balanced = BalancedBatches(batches, lengths=lambda batch: batch["item"].lengths(), cost=cost, group=host_group)
    while True: pipeline.progress(balanced)

All ranks draw a batch (or a window of batches), share the lengths of their samples, make the same plan, and send each
sample to the rank that is to train on it. A rank whose files have ended takes part and is sent samples of others, until
all have ended; then all stop together. A rank may get no sample in a step and still gets a batch, with no rows.
Where all ranks read one store, use `BalancedBatchSampler`: there no sample is sent.

A run goes on from a position within a window: `state_dict(step=)` of each rank says how many of its own batches lie
before that window, which the rank leaves out of what it reads again.

Exchange takes place where the batches are, on the host by default, before they are copied to the device; the group
should be one of its own (gloo), for its collectives must not mix with those of the training step. Left out: overlap
with the training step, for which the iterator may be drawn from in a thread.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from turbogr_plugin.backend.rank_exchange import RankExchange
from turbogr_plugin.sharding.batch_balance import assign, exact_costs
from turbogr_plugin.sharding.lookahead_balance import SPREAD, choose_band, plan_window
from turbogr_plugin.sharding.sample_columns import Column, batch_of, columns_of, join, structure_of
from turbogr_plugin.sharding.sequence_cost import SequenceCost

Batch = TypeVar("Batch")

#: Windows whose positions are kept, for pipelines that draw ahead of what they train on.
_KEPT = 64


class _Window(NamedTuple):
    """Where a window begins."""

    step: int
    round: int
    drawn: int
    """Batches that this rank had drawn before."""


class BalancedBatches(Generic[Batch], Iterator[Batch]):
    """Iterator over balanced batches of this rank. Drawing from it is a collective of the group."""

    def __init__(
        self,
        batches: Iterator[Batch],
        *,
        lengths: Callable[[Batch], Tensor],
        cost: SequenceCost,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        window: int = 1,
        spread: float = SPREAD,
        equal_counts: bool = False,
        memory_limit: int | None = None,
        seed: int = 0,
        finish: Callable[[Batch], Any] | None = None,
    ) -> None:
        """Args:
        batches: of this rank, as `sample_columns` can take them apart; all of one structure.
        lengths: tokens of each sample of a batch, [B].
        cost: of a sequence, the same on all ranks.
        group: of the ranks; None is the default group.
        device: where the batches are, served by the group's backend; the host by default.
        window: batches that are drawn and planned together; 1 balances each global batch for itself, more may move
            samples between steps (`plan_window`).
        spread: with a window, largest over smallest cost of a step to stay within.
        equal_counts: without a window, lets the numbers of samples per rank differ by at most one.
        memory_limit: most tokens of a rank and step.
        seed: with a window, of the order of the steps; the same on all ranks.
        finish: makes the final batch of a balanced one, for what belongs to a batch as a whole.

        Raises:
            ValueError: a bad argument.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if not spread >= 1:
            raise ValueError(f"spread must be at least 1, got {spread}")
        if equal_counts and window > 1:
            raise ValueError(f"equal_counts belongs to window=1, got window={window}: a window's counts are free")
        if memory_limit is not None and memory_limit < 1:
            raise ValueError(f"memory_limit must be at least 1 token, got {memory_limit}")
        self._batches, self._lengths, self._cost = iter(batches), lengths, cost
        self._exchange = RankExchange(device or torch.device("cpu"), group)
        self._group = group
        self._window, self._spread, self._seed = window, spread, seed
        self._equal_counts, self._limit, self._finish = equal_counts, memory_limit, finish
        self._options = zlib.crc32(repr((cost, window, spread, equal_counts, memory_limit, seed)).encode())
        self._ready: deque[Batch] = deque()
        self._empty: Batch | None = None
        self._next = _Window(0, 0, 0)
        self._begun: deque[_Window] = deque(maxlen=_KEPT)
        self._steps = self._skipped = 0
        self._ended = self._all_ended = False

    def __next__(self) -> Batch:
        """The next batch of this rank.

        Raises:
            StopIteration: the batches of all ranks have ended.
            Exception: what a rank's batches raised or what is wrong with them, on all ranks (`RankExchange.agree`).
        """
        while True:
            while not self._ready:
                if self._all_ended:
                    raise StopIteration
                self._fill()
            batch = self._ready.popleft()
            if self._skipped:  # steps of the window before the position that was loaded
                self._skipped -= 1
                continue
            self._steps += 1
            return batch if self._finish is None else self._finish(batch)

    def state_dict(self, *, step: int | None = None) -> dict[str, int]:
        """The position of this rank; each rank saves its own.

        Args:
            step: batches that training has done with; None: all that were given. A pipeline draws some ahead.

        Raises:
            ValueError: a step that was not reached, or is more than some dozens of windows past.
        """
        step = self._steps if step is None else step
        windows = [window for window in (*self._begun, self._next) if window.step <= step]
        if not 0 <= step <= self._steps or not windows:
            raise ValueError(f"step must be one of the last windows' up to {self._steps}, got {step}")
        return {**windows[-1]._asdict(), "step": step, "within": step - windows[-1].step, "options": self._options}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from a position, before the first batch is drawn.

        Args:
            state: of this rank; `batches` must begin after the first `state["drawn"]` of this rank's batches.

        Raises:
            ValueError: batches were drawn already, or the position is one of other options.
        """
        if self._begun:
            raise ValueError(f"load_state_dict must come before the first batch, {self._steps} were given")
        if state["options"] != self._options:
            raise ValueError(
                "state was saved with another cost, window, spread, equal_counts, memory_limit or seed: use the same"
            )
        self._steps, self._skipped = state["step"], state["within"]
        self._next = _Window(state["step"] - state["within"], state["round"], state["drawn"])

    def _fill(self) -> None:
        """Draws, plans and exchanges one window."""
        drawn: list[Batch] = []
        columns: list[Column] = []
        tokens = torch.zeros(0, dtype=torch.int64, device=self._exchange.device)
        failure: Exception | None = None
        try:
            while len(drawn) < self._window and not self._ended:
                try:
                    drawn.append(next(self._batches))
                except StopIteration:
                    self._ended = True
            if drawn:
                columns, tokens = self._take_apart(drawn)
        except Exception as error:
            failure = error
        signature = 0 if self._empty is None else structure_of(self._empty)
        state = self._exchange.agree(
            failure, self._options, len(drawn), len(tokens), int(self._ended), signature, doing="drawing batches"
        )
        if len({options for options, *_ in state}) > 1:
            raise ValueError("cost, window, spread, equal_counts, memory_limit and seed must be the same on all ranks")
        self._all_ended = all(ended for _, _, _, ended, _ in state)
        steps = max(batches for _, batches, _, _, _ in state)
        if steps == 0:
            return
        self._agree_on_structure([structure for *_, structure in state])
        counts = [samples for _, _, samples, _, _ in state]
        everywhere = torch.cat(self._exchange.gather_rows(tokens, counts)).cpu().numpy()
        position = self._plan(everywhere, steps)
        mine = position[sum(counts[: self._exchange.rank]) :][: len(tokens)]
        self._receive(columns, mine, position, counts, steps)
        self._begun.append(self._next)
        step, number, before = self._next
        self._next = _Window(step + steps, number + 1, before + len(drawn))

    def _take_apart(self, drawn: list[Batch]) -> tuple[list[Column], Tensor]:
        """The columns and lengths of all samples of some batches."""
        of_batches = []
        lengths = []
        for batch in drawn:
            columns, samples = columns_of(batch)
            of_batch = self._lengths(batch)
            if of_batch.shape != (samples,):
                raise ValueError(f"lengths of a batch must have the shape [{samples}], got {list(of_batch.shape)}")
            if self._limit is not None and samples and int(of_batch.max()) > self._limit:
                raise ValueError(f"a sample of {int(of_batch.max())} tokens exceeds memory_limit {self._limit}")
            if self._empty is None:
                nothing = torch.zeros(0, dtype=torch.int64, device=self._exchange.device)
                self._empty = batch_of(batch, [column.take(nothing) for column in columns])
            elif structure_of(batch) != structure_of(self._empty):
                raise ValueError(
                    "batches must have one structure (keys, dtypes, shapes of a sample); this one has another"
                )
            of_batches.append(columns)
            lengths.append(of_batch.long())
        return [join(parts) for parts in zip(*of_batches, strict=True)], torch.cat(lengths)

    def _agree_on_structure(self, structures: list[int]) -> None:
        """Gives ranks that have had no batch yet (0) an empty one of the first rank that has."""
        known = [structure for structure in structures if structure]
        if len(set(known)) > 1:
            raise ValueError(
                "batches must have one structure (keys, dtypes, shapes of a sample) on all ranks; those of ranks "
                f"{structures.index(known[0])} and {structures.index(next(s for s in known if s != known[0]))} differ"
            )
        if len(known) == len(structures):
            return
        sent: list[Any] = [self._empty]
        first = structures.index(known[0])
        source = first if self._group is None else dist.get_global_rank(self._group, first)
        dist.broadcast_object_list(sent, src=source, group=self._group)
        if self._empty is None:
            self._empty = sent[0]

    def _plan(self, tokens: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
        """[samples of all ranks] step · ranks + rank of each; the same on all ranks."""
        ranks = self._exchange.world_size
        costs = exact_costs(self._cost.of(tokens), "costs")
        memory = None if self._limit is None else tokens.astype(np.float64)
        if steps == 1 or len(tokens) == 0:
            return assign(costs, ranks, equal_counts=self._equal_counts, memory=memory, limit=self._limit)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, self._next.round])))
        mean = costs.sum() / (steps * ranks)
        band = choose_band(costs, steps=steps, ranks=ranks, mean=mean, spread=self._spread)
        return plan_window(
            costs, steps=steps, ranks=ranks, generator=generator, band=band, memory=memory, memory_limit=self._limit
        )

    def _receive(
        self, columns: list[Column], mine: NDArray[np.int64], position: NDArray[np.int64], counts: list[int], steps: int
    ) -> None:
        """Sends the samples of this rank and makes the batches of what comes."""
        exchange, ranks = self._exchange, self._exchange.world_size
        order = np.lexsort((mine // ranks, mine % ranks))  # by rank, then by step, then as they were drawn
        leaving = np.bincount(mine % ranks, minlength=ranks).tolist()
        of_source = np.split(position, np.cumsum(counts)[:-1])
        here = [part[part % ranks == exchange.rank] // ranks for part in of_source]
        arriving = [len(part) for part in here]
        step_of = np.concatenate([np.sort(part, kind="stable") for part in here])
        by_step = torch.from_numpy(np.argsort(step_of, kind="stable")).to(exchange.device)
        per_step = np.bincount(step_of, minlength=steps).tolist()
        taken = torch.from_numpy(order).to(exchange.device)
        templates, _ = columns_of(self._empty)
        received = []
        for number, template in enumerate(templates):
            column = columns[number] if columns else template
            received.append(self._exchange_column(column.take(taken), leaving, arriving).take(by_step))
        samples = torch.arange(len(step_of), device=exchange.device)
        for of_step in samples.split(per_step):
            self._ready.append(batch_of(self._empty, [column.take(of_step) for column in received]))

    def _exchange_column(self, column: Column, leaving: list[int], arriving: list[int]) -> Column:
        """The samples of a column that other ranks have for this one, in the order of the ranks.

        Args:
            column: samples in the order of the ranks that they go to.
            leaving: samples for each rank.
            arriving: samples from each rank.
        """
        lengths = None if column.lengths is None else self._all_to_all(column.lengths, leaving, arriving)
        sent, come = column.sizes(leaving), Column(column.values, lengths).sizes(arriving)
        weights = None if column.weights is None else self._all_to_all(column.weights, sent, come)
        return Column(self._all_to_all(column.values, sent, come), lengths, weights)

    def _all_to_all(self, rows: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        if self._exchange.world_size == 1:
            return rows
        width = math.prod(rows.shape[1:])
        received = rows.new_empty((sum(arriving), width))
        if width:  # as bytes: backends differ in the dtypes that they exchange
            sent = rows.reshape(len(rows), width).contiguous().view(torch.uint8)
            dist.all_to_all_single(received.view(torch.uint8), sent, arriving, leaving, group=self._group)
        return received.reshape(sum(arriving), *rows.shape[1:])
