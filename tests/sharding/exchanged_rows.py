"""The exchange of one lookup alone, on four ranks; see tests/npu/ranks.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from turbogr_plugin.sharding.replica_messages import ReplicaMessages
from turbogr_plugin.sharding.sparse_exchange import ExchangeRules, LookupExchange, Way
from turbogr_plugin.sharding.touched_rows import TableLayout, TouchedRows

ROWS, DIM = 64, 8
Share = float | list[float]
LAYOUT = TableLayout(rows=(ROWS, 2 * ROWS, ROWS), dims=(DIM, 4, DIM), feature_tables=(2, 0, 1), pooling=0)


def touched_of(rank: int, share: Share, shared: bool) -> tuple[TouchedRows, Tensor]:
    """What a rank has looked up, one bag per feature, and the gradient of each bag [1, sum of widths].

    Args:
        rank: whose.
        share: lookups by rows of the table, of each table or of all.
        shared: whether the ranks look up the same rows.
    """
    generator = torch.Generator().manual_seed(rank)
    ids = []
    for table in LAYOUT.feature_tables:
        rows = LAYOUT.rows[table]
        lookups = int(rows * (share if isinstance(share, float) else share[table]))
        drawn = torch.randint(0, rows, (lookups,), generator=generator)
        ids.append(drawn if shared else drawn // 4 * 4 + rank)
    lengths = torch.tensor([part.numel() for part in ids])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    grad = torch.randn(1, 2 * DIM + 4, generator=generator)
    return TouchedRows.of(LAYOUT, torch.cat(ids), offsets, None), grad


def expected(ranks: int, share: Share, shared: bool) -> tuple[list[Tensor], Tensor]:
    """By table, in the module's order: the sums over ranks in their order; and which linear ids were touched."""
    found = [torch.zeros(rows, dim) for rows, dim in zip(LAYOUT.rows, LAYOUT.dims, strict=True)]
    seen = torch.zeros(sum(LAYOUT.rows), dtype=torch.bool)
    for rank in range(ranks):
        touched, grad = touched_of(rank, share, shared)
        seen[touched.ids] = True
        own = touched.gradients(grad)
        for place, table in enumerate(LAYOUT.order):
            number = next(n for n, width in enumerate(LAYOUT.widths) if place in width.tables)
            first = LAYOUT.bounds[LAYOUT.widths[number].tables[0]]
            inside = (touched.ids >= LAYOUT.bounds[place]) & (touched.ids < LAYOUT.bounds[place + 1])
            of_width = (touched.ids >= first) & (touched.ids < LAYOUT.bounds[LAYOUT.widths[number].tables[-1] + 1])
            found[table][touched.ids[inside] - LAYOUT.bounds[place]] += own[number][inside[of_width]]
    return found, seen.nonzero().squeeze(1)


def exchanged(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several exchanges, one after the other."""
    return [_exchanged(**case) for case in cases]


def _exchanged(*, way: Way | None, share: Share, shared: bool = True, wire: str = "float32") -> dict[str, Any]:
    """One exchange: which way was taken, what was sent, how far the sums are from those of one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    assert dist.group.WORLD is not None
    messages = ReplicaMessages(dist.group.WORLD, torch.device("cpu"))
    touched, grad = touched_of(rank, share, shared)
    exchange = LookupExchange(touched, messages, ExchangeRules(getattr(torch, wire), way))
    exchange.send(touched.gradients(grad))
    taken = "dense" if exchange._dense.places else "reduce_scatter" if exchange._slices else "all_gather"
    sums = exchange.finish()
    assert sums is not None
    wanted, ids = expected(ranks, share, shared)
    ids_by_table = sums.ids.split(sums.counts)
    error, begin = 0.0, 0
    for number, width in enumerate(LAYOUT.widths):
        begin = 0
        for place in width.tables:
            rows = sums.rows[number][begin : begin + sums.counts[place]]
            begin += sums.counts[place]
            table = LAYOUT.order[place]
            truth = wanted[table][ids_by_table[place] - LAYOUT.bounds[place]]
            error = max([error, *((rows - truth).abs().flatten().tolist())])
    dense = sorted(LAYOUT.order[place] for place in exchange._dense.places)
    return {
        "way": taken,
        "dense": dense,
        "ids": torch.equal(sums.ids, ids),
        "error": error,
        "bytes": messages.bytes_sent,
    }
