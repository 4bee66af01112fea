"""One lookup's exchange of gradients between H replicas of its tables: everybody ends with the same sums.

    forward   start     numbers of rows, then ids
    backward  send      starts to send rows
    later     finish    sums

Three ways lead to the same sums (arXiv 2605.13433, section 4.2.1, describes the first); the fewest bytes decide, which
every replica counts alike. Bytes that the busiest rank sends, of U own rows, V of all ranks, R of the tables:

    all_gather      (H - 1) U           everybody gets all rows and adds them
    reduce_scatter  (H - 1)/H (U + V)   everybody adds a slice of the ids, an H-th of V, and all get the sums
    dense           R in place of U and V, by the cheaper of these two, and no ids travel; chosen by table

An id's rows are added in float32 in the order of the groups, each group's own sum first made by itself, and with a
narrower wire all replicas use the rounded rows, their own too: replicas stay bit-equal, and which way the rows went
changes no bit with a float32 wire. With a narrower one reduce_scatter rounds twice.

Left out: int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.jagged_unique import jagged_unique
from turbogr_plugin.sharding.dense_tables import DenseTables
from turbogr_plugin.sharding.exchange_slices import ExchangeSlices, rows_between
from turbogr_plugin.sharding.exchange_wire import (
    backward_pass,
    decode,
    encode,
    header_bytes,
    id_dtype,
    message_bytes,
)
from turbogr_plugin.sharding.replica_messages import ReplicaMessages, Transfer
from turbogr_plugin.sharding.touched_rows import TouchedRows

Way = Literal["all_gather", "reduce_scatter", "dense"]
WAYS: tuple[Way, ...] = ("all_gather", "reduce_scatter", "dense")


@dataclass(frozen=True)
class SummedRows:
    """The gradients of all replicas."""

    ids: Tensor
    """[V] int64, linear ids of the layout, ascending."""
    counts: list[int]
    """[T] in the layout's order."""
    rows: list[Tensor]
    """For each width [rows of that width, D] float32."""


@dataclass(frozen=True)
class ExchangeRules:
    """How rows travel."""

    wire: torch.dtype = torch.float32
    way: Way | None = None
    """None: the one with the fewest bytes."""
    dense_allowed: bool = True
    """Whether a row with a gradient of zero may be left out of the update, as it is for SGD and Adagrad."""


class LookupExchange:
    """The exchange of one lookup. Every replica makes one for the same lookup, and calls its methods in order."""

    def __init__(self, touched: TouchedRows, messages: ReplicaMessages, rules: ExchangeRules) -> None:
        """Tells the replicas which rows will come: their numbers, then their ids. Both are waited for."""
        self._touched, self._messages, self._rules = touched, messages, rules
        self._layout = touched.layout
        self._tag = messages.new_tags()
        self._counts = messages.gather_counts(touched.counts)
        self._dense = self._dense_tables()
        message = self._dense.others(touched.ids, touched.counts).to(id_dtype(self._layout.bounds[-1]))
        others = [message.new_empty(self._dense.other_count(counts)) for counts in self._counts]
        others[messages.rank] = message
        messages.start([message] * messages.size, others, self._tag).wait()
        self._ids = [
            self._dense.all_ids(part.long(), counts) for part, counts in zip(others, self._counts, strict=True)
        ]
        self._counts = [self._dense.all_counts(counts) for counts in self._counts]
        self._backward_pass = 0
        self.passes: list[int] = []
        """By rank: in which of its backward passes the gradient came, 0 for none; once `finish` has returned."""
        self._slices: ExchangeSlices | None = None
        self._received: list[Tensor] = []
        self._rows_transfer: Transfer | None = None

    def send(self, rows: Sequence[Tensor] | None, backward_pass: int = 1) -> None:
        """Starts to send rows.

        Args:
            rows: as TouchedRows.gradients returns them; None: the lookup got no gradient here.
            backward_pass: number of the backward pass that gave them, which all ranks learn.
        """
        layout, messages, wire = self._layout, self._messages, self._rules.wire
        self._backward_pass = 0 if rows is None else backward_pass
        if rows is None:
            counts = layout.rows_of_width(self._touched.counts)
            rows = [
                torch.zeros(count, width.dim, device=self._touched.ids.device)
                for count, width in zip(counts, layout.widths, strict=True)
            ]
        rows = self._dense.spread(rows, self._touched.ids, self._touched.counts)
        self._slices = self._sliced()
        if self._slices is None:
            message = encode(layout, self._counts[messages.rank], rows, wire, backward_pass=self._backward_pass)
            sends = [message] * messages.size
            sizes = self._counts
        else:
            sends = [
                encode(
                    layout,
                    counts,
                    rows_between(layout, self._counts[messages.rank], rows, begin, end),
                    wire,
                    backward_pass=self._backward_pass,
                )
                for counts, begin, end in self._slices.sent
            ]
            sizes = [counts for counts, _, _ in self._slices.arriving]
        self._received = self._room(sizes, sends[messages.rank])
        self._rows_transfer = messages.start(sends, self._received, self._tag + 1)

    def finish(self) -> SummedRows | None:
        """Waits for the rows of all replicas and adds them; None if the lookup got no gradient on any."""
        assert self._rows_transfer is not None, "send comes first"
        self._rows_transfer.wait()
        self.passes = [backward_pass(message) for message in self._received]
        anywhere = any(self.passes)
        if self._slices is None:
            sums = self._added(self._ids, self._counts, self._received) if anywhere else None
        else:
            sums = self._gathered(self._slices, anywhere)
        self._received = []
        return sums if sums is None else self._without_zeros(sums)

    def _gathered(self, slices: ExchangeSlices, anywhere: bool) -> SummedRows | None:
        """The sums of this rank's slice go to all, and theirs come."""
        layout, messages, wire = self._layout, self._messages, self._rules.wire
        parts = [ids[begin:end] for ids, (_, begin, end) in zip(self._ids, slices.arriving, strict=True)]
        mine = self._added(parts, [counts for counts, _, _ in slices.arriving], self._received)
        own = encode(layout, slices.sums[messages.rank], mine.rows, wire, backward_pass=int(anywhere))
        received = self._room(slices.sums, own)
        messages.start([own] * messages.size, received, self._tag + 2).wait()
        if not anywhere:
            return None
        blocks = [decode(layout, counts, message, wire) for counts, message in zip(slices.sums, received, strict=True)]
        rows = [torch.cat([block[number] for block in blocks]) for number in range(len(layout.widths))]
        counts = [sum(column) for column in zip(*slices.sums, strict=True)]
        return SummedRows(slices.ids, counts, rows)

    def _added(self, ids: Sequence[Tensor], counts: Sequence[list[int]], received: Sequence[Tensor]) -> SummedRows:
        """The sums of the rows of all ranks, in their order."""
        layout = self._layout
        blocks = [
            decode(layout, of_rank, message, self._rules.wire)
            for of_rank, message in zip(counts, received, strict=True)
        ]
        found_ids, found_rows = [], []
        begins = [0] * len(ids)
        for number in range(len(layout.widths)):
            rows = [block[number] for block in blocks]
            ends = [begin + len(part) for begin, part in zip(begins, rows, strict=True)]
            parts = [each[begin:end] for each, begin, end in zip(ids, begins, ends, strict=True)]
            begins = ends
            summed = coalesce_rows(torch.cat(parts), torch.cat(rows))
            found_ids.append(summed[0])
            found_rows.append(summed[1])
        every = torch.cat(found_ids)
        return SummedRows(every, layout.counts(every), found_rows)

    def _sliced(self) -> ExchangeSlices | None:
        """How the ids are cut into slices; None: there are none, everybody gets all rows."""
        if self._messages.size == 2 and self._rules.way != "reduce_scatter":
            return None  # (U + V)/2 is no less than U
        if self._rules.way == "all_gather":
            return None
        every = jagged_unique(torch.cat(self._ids))[0]
        found = ExchangeSlices.of(self._layout, self._ids, self._counts, every, self._messages.rank)
        if self._rules.way == "reduce_scatter":
            return found
        header = header_bytes(self._layout)
        most = max(self._row_bytes(counts) for counts in self._counts)
        sliced = found.most_elements * self._rules.wire.itemsize + 2 * (self._messages.size - 1) * header
        return found if sliced < (self._messages.size - 1) * most else None

    def _dense_tables(self) -> DenseTables:
        rules = self._rules
        if rules.way == "dense":
            return DenseTables.every(self._layout)
        if rules.way is None and rules.dense_allowed:
            return DenseTables.cheapest(self._layout, self._counts, rules.wire)
        return DenseTables.none(self._layout)

    def _row_bytes(self, counts: Sequence[int]) -> int:
        return message_bytes(self._layout, counts, self._rules.wire)

    def _room(self, counts: Sequence[list[int]], own: Tensor) -> list[Tensor]:
        return [
            own if rank == self._messages.rank else own.new_empty(message_bytes(self._layout, each, self._rules.wire))
            for rank, each in enumerate(counts)
        ]

    def _without_zeros(self, sums: SummedRows) -> SummedRows:
        if not self._dense.places:
            return sums
        keeps = self._dense.kept(sums.ids, sums.rows)
        ids = sums.ids[torch.cat(keeps)]
        rows = [block[keep] for block, keep in zip(sums.rows, keeps, strict=True)]
        return SummedRows(ids, self._layout.counts(ids), rows)
