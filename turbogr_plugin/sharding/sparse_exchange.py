"""One lookup's exchange of gradients between H replicas of its tables: everybody ends with the same sums.

    forward   start     numbers of rows, then ids
    backward  send      rows, as soon as they are there
    later     finish    sums

Three ways lead to the same sums (arXiv 2605.13433, section 4.2.1, describes the first); the fewest bytes decide, which
every replica counts alike. Bytes that the busiest rank sends, of U own rows, V of all ranks, R of the tables:

    all_gather      (H - 1) U           everybody gets all rows and adds them
    reduce_scatter  (H - 1)/H (U + V)   everybody adds a slice of the ids, an H-th of V, and all get the sums
    dense           R in place of U and V, by the cheaper of these two, and no ids travel

An id's rows are added in float32 in the order of the groups, each group's own sum first made by itself, and with a
narrower wire all replicas use the rounded rows, their own too: replicas stay bit-equal, and which way the rows went
changes no bit with a float32 wire. With a narrower one reduce_scatter rounds twice.

Left out: a dense exchange of some tables of a module only, and int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.jagged_unique import jagged_unique
from turbogr_plugin.sharding.exchange_slices import ExchangeSlices, rows_between
from turbogr_plugin.sharding.exchange_wire import decode, encode, has_gradient, header_bytes, message_bytes
from turbogr_plugin.sharding.replica_messages import ReplicaMessages, Transfer
from turbogr_plugin.sharding.touched_rows import TouchedRows

Way = Literal["all_gather", "reduce_scatter", "dense"]
WAYS: tuple[Way, ...] = ("all_gather", "reduce_scatter", "dense")
_ID_BYTES = 8


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
        """Tells the replicas how many rows will come, and starts to send ids."""
        self._touched, self._messages, self._rules = touched, messages, rules
        self._layout = touched.layout
        self._counts = messages.gather_counts(touched.counts)
        self._dense = rules.way == "dense" or (rules.way is None and rules.dense_allowed and self._dense_is_cheaper())
        self._ids: list[Tensor] = [touched.ids] * messages.size
        self._ids_transfer: Transfer | None = None
        if self._dense:
            everything = torch.arange(self._layout.bounds[-1], device=touched.ids.device)
            self._ids = [everything] * messages.size
            self._counts = [self._layout.counts(everything)] * messages.size
        else:
            self._ids = [
                touched.ids if rank == messages.rank else touched.ids.new_empty(sum(counts))
                for rank, counts in enumerate(self._counts)
            ]
            self._ids_transfer = messages.start([touched.ids] * messages.size, self._ids)
        self._has_gradient = False
        self._slices: ExchangeSlices | None = None
        self._received: list[Tensor] = []
        self._rows_transfer: Transfer | None = None

    def send(self, rows: Sequence[Tensor] | None) -> None:
        """Starts to send rows.

        Args:
            rows: as TouchedRows.gradients returns them; None: the lookup got no gradient here.
        """
        layout, messages, wire = self._layout, self._messages, self._rules.wire
        self._has_gradient = rows is not None
        if rows is None:
            counts = layout.rows_of_width(self._touched.counts)
            rows = [
                torch.zeros(count, width.dim, device=self._touched.ids.device)
                for count, width in zip(counts, layout.widths, strict=True)
            ]
        if self._dense:
            rows = self._spread(rows)
        self._slices = self._sliced()
        if self._slices is None:
            message = encode(layout, self._counts[messages.rank], rows, wire, has_gradient=self._has_gradient)
            sends = [message] * messages.size
            sizes = self._counts
        else:
            sends = [
                encode(
                    layout,
                    counts,
                    rows_between(layout, self._counts[messages.rank], rows, begin, end),
                    wire,
                    has_gradient=self._has_gradient,
                )
                for counts, begin, end in self._slices.sent
            ]
            sizes = [counts for counts, _, _ in self._slices.arriving]
        self._received = self._room(sizes, sends[messages.rank])
        self._rows_transfer = messages.start(sends, self._received)
        self._wait_for_ids()  # which have been under way since the forward pass, so as not to hold their memory longer

    def finish(self) -> SummedRows | None:
        """Waits for the rows of all replicas and adds them; None if the lookup got no gradient on any."""
        assert self._rows_transfer is not None, "send comes first"
        self._rows_transfer.wait()
        anywhere = self._has_gradient or any(has_gradient(message) for message in self._received)
        if self._slices is None:
            sums = self._added(self._ids, self._counts, self._received) if anywhere else None
        else:
            sums = self._gathered(self._slices, anywhere)
        self._received = []
        return self._without_zeros(sums) if self._dense and sums is not None else sums

    def _gathered(self, slices: ExchangeSlices, anywhere: bool) -> SummedRows | None:
        """The sums of this rank's slice go to all, and theirs come."""
        layout, messages, wire = self._layout, self._messages, self._rules.wire
        parts = [ids[begin:end] for ids, (_, begin, end) in zip(self._ids, slices.arriving, strict=True)]
        mine = self._added(parts, [counts for counts, _, _ in slices.arriving], self._received)
        own = encode(layout, slices.sums[messages.rank], mine.rows, wire, has_gradient=anywhere)
        received = self._room(slices.sums, own)
        messages.start([own] * messages.size, received).wait()
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
            if self._dense:
                total = rows[0].clone()
                for part in rows[1:]:
                    total += part
                summed = (parts[0], total)
            else:
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
        self._wait_for_ids()
        every = self._ids[0] if self._dense else jagged_unique(torch.cat(self._ids))[0]
        found = ExchangeSlices.of(self._layout, self._ids, self._counts, every, self._messages.rank)
        if self._rules.way == "reduce_scatter":
            return found
        header = header_bytes(self._layout)
        most = max(self._row_bytes(counts) for counts in self._counts)
        sliced = found.most_elements * self._rules.wire.itemsize + 2 * (self._messages.size - 1) * header
        return found if sliced < (self._messages.size - 1) * most else None

    def _dense_is_cheaper(self) -> bool:
        """As far as it is known before ids are: V is at least the largest U."""
        ranks = self._messages.size
        most = max(self._row_bytes(counts) for counts in self._counts)
        ids = max(sum(counts) for counts in self._counts) * _ID_BYTES * (ranks - 1)
        shares = min(ranks - 1, 2 * (ranks - 1) / ranks)
        return shares * self._row_bytes([self._layout.rows[table] for table in self._layout.order]) < (
            shares * most + ids
        )

    def _row_bytes(self, counts: Sequence[int]) -> int:
        return message_bytes(self._layout, counts, self._rules.wire)

    def _room(self, counts: Sequence[list[int]], own: Tensor) -> list[Tensor]:
        return [
            own if rank == self._messages.rank else own.new_empty(message_bytes(self._layout, each, self._rules.wire))
            for rank, each in enumerate(counts)
        ]

    def _wait_for_ids(self) -> None:
        if self._ids_transfer is not None:
            self._ids_transfer.wait()
            self._ids_transfer = None

    def _spread(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The touched rows among all of the tables."""
        layout, ids = self._layout, self._touched.ids
        found, begin, taken = [], 0, 0
        for width, block in zip(layout.widths, rows, strict=True):
            end = layout.bounds[width.tables[-1] + 1]
            whole = block.new_zeros(end - begin, width.dim)
            whole[ids[taken : taken + len(block)] - begin] = block
            found.append(whole)
            begin, taken = end, taken + len(block)
        return found

    def _without_zeros(self, sums: SummedRows) -> SummedRows:
        layout = self._layout
        keeps = [block.any(dim=1) for block in sums.rows]
        ids = sums.ids[torch.cat(keeps)]
        return SummedRows(ids, layout.counts(ids), [block[keep] for block, keep in zip(sums.rows, keeps, strict=True)])
