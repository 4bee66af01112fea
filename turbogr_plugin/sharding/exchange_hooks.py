"""Hooks on fbgemm's table modules by which gradients of all groups, and not of one, update the tables.

    forward hook      the lookup's own graph is cut, since its update would see this group's gradients only, and a node
                      that hands the gradient over takes its place; the touched ids are known and their exchange starts
    that node         sums the gradient of each touched row and starts to send the rows; it does not wait
    forward pre-hook  of the next lookup, the last moment at which the update is exact: waits, adds, updates

Between the node and the next lookup the exchange runs beside whatever the step still has to do: other gradients, the
dense optimizer, the next batch's ids; with a pipeline that looks batch i + 1 up before the backward pass of batch i,
beside that whole step.

Messages carry no names, so all replicas send in one order: that of the lookups. Rows of a lookup wait for those of an
earlier one. A lookup that never gets a gradient on this rank (its result was dropped, a rank had nothing to learn) is
known by its graph being gone, and sends zeros when the next lookup or `finish` comes; where no replica has got one,
nothing is updated. A rank that keeps such a graph alive keeps the others waiting.

Left out, each refused: a second gradient for one lookup, a variable batch, a gradient of per-sample weights.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from turbogr_plugin.backend.streams import Stream, current_stream, new_stream, on_stream, record_stream, wait
from turbogr_plugin.backend.worker import Worker
from turbogr_plugin.sharding.replica_messages import ReplicaMessages
from turbogr_plugin.sharding.sparse_exchange import ExchangeRules, LookupExchange, SummedRows
from turbogr_plugin.sharding.table_update import update_tables, zero_rows_stay
from turbogr_plugin.sharding.touched_rows import TableLayout, TouchedRows

T = TypeVar("T")


class _GraphAlive:
    """Lives as long as the graph of a lookup."""


class _HandOver(torch.autograd.Function):
    """The lookup's result as it is; its gradient goes to the exchange. `anchor` makes the result require one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, lookup: _Lookup, graph: _GraphAlive) -> Tensor:
        ctx.lookup, ctx.graph = lookup, graph
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.lookup.owner.take(ctx.lookup, grads[0])
        return None, None, None, None


@dataclass(eq=False)
class _Lookup:
    """A lookup whose update has not been carried out."""

    owner: GradientExchange
    tables: _Tables
    touched: TouchedRows
    graph: weakref.ref[_GraphAlive]
    learning_rate: Tensor
    """That of the forward pass, which is the one that fbgemm uses."""
    iteration: int
    exchange: LookupExchange | None = None
    has_gradient: bool = False
    backward_pass: int = 0
    """The number of that which gave the gradient, from 1 on."""
    rows: list[Tensor] | None = None
    """The gradients as the worker has them, until they are sent."""
    passes: list[int] = field(default_factory=list)
    """`backward_pass` on each replica."""
    sums: SummedRows | None = None

    @property
    def is_dropped(self) -> bool:
        """Whether it will get no gradient. The graph is looked at first: it goes after the gradient has come, too."""
        return self.graph() is None and not self.has_gradient

    def summed_values(self) -> list[Tensor]:
        """What the exchange has given; none where no replica has got a gradient."""
        return [] if self.sums is None else [self.sums.ids, *self.sums.rows]


@dataclass
class _Tables:
    module: Any
    layout: TableLayout
    anchor: Tensor
    rules: ExchangeRules


@dataclass
class _Line:
    """Lookups in the order in which they were made; the worker's alone."""

    waiting: list[_Lookup] = field(default_factory=list)
    sent: list[_Lookup] = field(default_factory=list)
    summed: list[_Lookup] = field(default_factory=list)


class GradientExchange:
    """Updates table modules by the gradients of all of their replicas.

    Args:
        modules: fbgemm's, which `check_tables` has let pass, the same on every replica in the same order; each may be
            looked up as often as a step wants.
        messages: between the replicas.
        rules: how rows travel.
        average: gradients are divided by the number of replicas, as TorchRec divides them inside a group.
    """

    def __init__(
        self, modules: Sequence[Any], messages: ReplicaMessages, rules: ExchangeRules, *, average: bool
    ) -> None:
        self.messages, self._average = messages, average
        self._line, self._worker = _Line(), Worker(messages.device, "gradient exchange")
        self._stream: Stream = new_stream(messages.device)
        self._open: list[_Lookup] = []
        self._last: Future[None] | None = None
        self._lock, self._updating = threading.RLock(), False
        self._graph_task, self._passes = -1, 0
        self._failure: BaseException | None = None
        """The first of the worker's, after which nothing is exchanged any more."""
        for module in modules:
            device = module.weights_offsets.device
            allowed = rules.dense_allowed and zero_rows_stay(module)
            tables = _Tables(
                module,
                TableLayout.of(module),
                torch.zeros(1, device=device, requires_grad=True),
                ExchangeRules(rules.wire, rules.way, allowed),
            )
            module.register_forward_pre_hook(lambda looked_up, _: self.finish(looked_up))
            module.register_forward_hook(_Hook(self, tables), with_kwargs=True)

    @property
    def pending(self) -> int:
        """Lookups whose update has not been carried out."""
        return len(self._open)

    def begin(self, tables: _Tables, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """After a lookup that may get a gradient: starts the exchange of ids, and returns what takes its place."""
        _check_lookup(tables, kwargs)
        module = tables.module
        # fbgemm's own ids, in which those out of range are replaced
        touched = TouchedRows.of(tables.layout, module._indices, module._offsets, kwargs.get("per_sample_weights"))
        graph = _GraphAlive()
        iteration = int(module.iter_cpu) if hasattr(module, "iter_cpu") else 0
        rate = module.learning_rate_tensor.clone()
        lookup = _Lookup(self, tables, touched, weakref.ref(graph), rate, iteration)
        record_stream(touched.ids, self._stream)
        with self._lock:
            self._open.append(lookup)
            self._submit(lambda: self._start(lookup))
        result: Tensor = _HandOver.apply(output.detach(), tables.anchor, lookup, graph)
        return result

    def take(self, lookup: _Lookup, grad: Tensor) -> None:
        """The gradient of a lookup: sums it by row and sends it as soon as those before have been."""
        if lookup.has_gradient:
            names = ", ".join(lookup.tables.module.table_names or ["(without names)"])
            raise RuntimeError(
                f"a lookup of tables {names} got a second gradient: with sync='exact' each lookup is updated once"
            )
        rows = lookup.touched.gradients(grad)
        if self._average:
            rows = [block / self.messages.size for block in rows]
        for block in rows:
            record_stream(block, self._stream)
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task, self._passes = task, self._passes + 1
        lookup.backward_pass, lookup.has_gradient = self._passes, True
        self._submit(lambda: self._give(lookup, rows))

    def finish(self, module: Any = None) -> None:
        """Carries out the updates whose gradients have come; who reads tables or optimizer states calls it.

        Args:
            module: that is about to be looked up; where none of its own lookups is due there is nothing to wait for.
                A rank that has dropped the result of another module must not wait for ranks that still need theirs:
                they may be waiting for this lookup.
        """
        with self._lock:
            if self._failure is not None:
                raise RuntimeError("the exchange of gradients has failed; tables lack an update") from self._failure
            if self._updating or not any(
                (lookup.has_gradient or lookup.is_dropped) and module in (None, lookup.tables.module)
                for lookup in self._open
            ):
                return
            self._updating = True
            try:
                # An evaluation's lookup in inference mode must make no inference tensors here: they know no backward.
                with torch.inference_mode(False), torch.no_grad():
                    summed = self._on_worker(self._sum).result()
                    stream = current_stream(self.messages.device)
                    wait(stream, self._stream)
                    for lookup in _in_order_of_updates(summed):
                        self._open.remove(lookup)
                        # The lookup may have been on a third stream: a pipeline's, while the caller reads tables.
                        for value in (lookup.learning_rate, *lookup.summed_values()):
                            record_stream(value, stream)
                        _update(lookup)
            except BaseException as error:
                self._failure = self._failure or error  # what was summed and is not updated is lost
                raise
            finally:
                self._updating = False

    def _submit(self, work: Callable[[], None]) -> None:
        if self._last is not None and self._last.done():
            self._last.result()  # raises what the last work raised
        self._last = self._on_worker(work)

    def _on_worker(self, work: Callable[[], T]) -> Future[T]:
        """Work on the stream of the exchange, after all that the caller's stream has been given."""
        wait(self._stream, current_stream(self.messages.device))

        def carried_out() -> T:
            if self._failure is not None:
                raise RuntimeError("the exchange of gradients has failed before") from self._failure
            try:
                with torch.no_grad(), on_stream(self._stream):
                    return work()
            except BaseException as error:
                self._failure = error
                raise

        return self._worker.submit(carried_out)

    def _start(self, lookup: _Lookup) -> None:
        lookup.exchange = LookupExchange(lookup.touched, self.messages, lookup.tables.rules)
        self._line.waiting.append(lookup)

    def _give(self, lookup: _Lookup, rows: list[Tensor]) -> None:
        lookup.rows = rows
        self._send()
        if not self._line.waiting:
            self._receive()  # nothing else can come: the caller goes on meanwhile

    def _send(self) -> None:
        """Sends what has its turn."""
        line = self._line
        while line.waiting and (line.waiting[0].rows is not None or line.waiting[0].is_dropped):
            lookup = line.waiting.pop(0)
            assert lookup.exchange is not None
            lookup.exchange.send(lookup.rows, lookup.backward_pass)
            lookup.rows = None
            line.sent.append(lookup)

    def _receive(self) -> None:
        while self._line.sent:
            lookup = self._line.sent.pop(0)
            assert lookup.exchange is not None
            lookup.sums = lookup.exchange.finish()
            lookup.passes = lookup.exchange.passes
            lookup.exchange = None
            self._line.summed.append(lookup)

    def _sum(self) -> list[_Lookup]:
        """All lookups whose gradients have come, with their sums."""
        self._send()
        self._receive()
        summed, self._line.summed = self._line.summed, []
        return summed


def _in_order_of_updates(lookups: Sequence[_Lookup]) -> list[_Lookup]:
    """The order in which TorchRec would update: by backward pass, and within one the last lookup first.

    It matters where one module was looked up twice. Replicas know each other's passes, so they find the same order; a
    lookup without gradient on some of them goes by those that have got one.

    Args:
        lookups: in the order in which they were made.
    """

    def compared(first: tuple[int, _Lookup], second: tuple[int, _Lookup]) -> int:
        by_place = first[0] - second[0]
        for own, other in zip(first[1].passes, second[1].passes, strict=True):
            if own and other:
                return own - other or -by_place
        return by_place

    return [lookup for _, lookup in sorted(enumerate(lookups), key=functools.cmp_to_key(compared))]


def _update(lookup: _Lookup) -> None:
    if lookup.sums is not None:
        tables = lookup.tables
        update_tables(tables.module, tables.layout, lookup.sums, lookup.learning_rate, lookup.iteration)


class _Hook:
    """Forward hook of one table module."""

    def __init__(self, exchange: GradientExchange, tables: _Tables) -> None:
        self._exchange, self._tables = exchange, tables

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        return self._exchange.begin(self._tables, kwargs, output) if torch.is_grad_enabled() else output


def _check_lookup(tables: _Tables, kwargs: dict[str, Any]) -> None:
    weights = kwargs.get("per_sample_weights")
    for refused, what in (
        (kwargs.get("batch_size_per_feature_per_rank") is not None, "features of different batch sizes have"),
        (kwargs.get("hash_zch_identities") is not None, "ids of managed collision, which differ by group, have"),
        (weights is not None and weights.requires_grad, "per-sample weights that are learned have"),
    ):
        if refused:
            names = ", ".join(tables.module.table_names or ["(without names)"])
            raise ValueError(f"tables {names}: {what} no exact sum over groups; use sync='average'")
