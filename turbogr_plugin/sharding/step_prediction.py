"""Predicted time of a training step from the loads of its ranks.

    all-to-all   max over ranks of bytes / bandwidth, inside and between fast domains at once, plus messages x latency;
                 the bandwidth is that of half of the bytes (rows go forward, their gradients back)
    exchange     likewise, for the gradients that groups sum
    all-reduce   2 (L - 1)/L bytes inside a domain of L ranks and 2 (D - 1)/D bytes / L between D domains
    lookup       max over ranks of the bytes of local memory / its bandwidth: forward, backward and update
    step         dense + lookup + all communication, less what the pipeline hides behind the dense part

A collective ends with its slowest rank, so each part is a maximum of its own. Left out: the host's work per operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner.types import Topology

from turbogr_plugin.sharding.access_histogram import Floats
from turbogr_plugin.sharding.hierarchical_cost import GroupShape, Load
from turbogr_plugin.sharding.link_bandwidths import LinkBandwidths, link_bandwidths
from turbogr_plugin.sharding.topologies import memory_bandwidth

#: Collectives per step of one kind of sharding in one module: lengths, ids, rows, gradients of rows.
_A2A_CALLS = 4
#: Of these, those that carry nearly all bytes.
_A2A_LARGE_CALLS = 2
#: Of an exchange: counts, ids, rows.
_EXCHANGE_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Seconds of the parts of one step."""

    dense: float
    lookup: float
    all_to_all: float
    exchange: float
    all_reduce: float
    overlap: float = 0.0
    """Share of the communication of tables that the pipeline can run beside the dense part."""

    @property
    def communication(self) -> float:
        """All of it, hidden or not."""
        return self.all_to_all + self.exchange + self.all_reduce

    @property
    def hidden(self) -> float:
        """Communication that takes no time of its own."""
        return min(self.dense, self.overlap * (self.all_to_all + self.exchange))

    @property
    def step(self) -> float:
        """The whole step."""
        return self.dense + self.lookup + self.communication - self.hidden


@dataclass(frozen=True)
class Speeds:
    """What loads are divided by."""

    shape: GroupShape
    links: LinkBandwidths
    memory_bandwidth: float
    dense_seconds: float = 0.0
    dense_bytes: float = 0.0
    """Gradients of the dense part."""
    overlap: float = 0.0

    @classmethod
    def of(
        cls, topology: Topology, shape: GroupShape, *, dense_seconds: float, dense_bytes: float, overlap: float
    ) -> Speeds:
        """Those of a topology."""
        links = link_bandwidths(topology.comms_bandwidths)
        return cls(shape, links, memory_bandwidth(topology), dense_seconds, dense_bytes, overlap)

    def seconds_per_byte(self) -> Floats:
        """[len(Load)]: weights that make one figure of a shard's loads, memory left out.

        All-to-all counts by its speed with large messages: their sizes are known once all tables have their places.
        """
        found = np.zeros(len(Load))
        found[Load.LOOKUP] = 1 / self.memory_bandwidth
        found[Load.A2A_INTRA] = 1 / self.links.intra.all_to_all
        found[Load.A2A_INTER] = 1 / self.links.inter.all_to_all
        found[Load.EXCHANGE_INTRA] = 1 / self.links.intra.exchange
        found[Load.EXCHANGE_INTER] = 1 / self.links.inter.exchange
        found[Load.REDUCE] = self.all_reduce(1.0)
        return found

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes over all ranks."""
        local = min(self.shape.domain, self.shape.world)
        domains = self.shape.world / local
        inside = 2 * (local - 1) / local * size / self.links.intra.all_reduce
        return inside + 2 * (domains - 1) / domains * size / local / self.links.inter.all_reduce

    def predict(self, loads: Floats, *, kinds: int) -> StepPrediction:
        """The step of ranks with these loads.

        Args:
            loads: [ranks of a group, len(Load)].
            kinds: pairs of module and sharding type in use: each has collectives of its own.
        """
        peak = loads.max(0) if loads.size else [0.0] * len(Load)
        shape, links = self.shape, self.links
        messages_near, messages_far = shape.local - 1, shape.group - shape.local
        near, far = peak[Load.A2A_INTRA], peak[Load.A2A_INTER]
        calls = _A2A_LARGE_CALLS * max(1, kinds)
        a2a = max(near / links.intra.all_to_all_of(near / calls), far / links.inter.all_to_all_of(far / calls))
        a2a += _A2A_CALLS * kinds * (messages_near * links.intra.latency + messages_far * links.inter.latency)
        exchange = max(
            peak[Load.EXCHANGE_INTRA] / links.intra.exchange, peak[Load.EXCHANGE_INTER] / links.inter.exchange
        )
        peers = shape.groups - 1
        latency = shape.near_peers * links.intra.latency + (1 - shape.near_peers) * links.inter.latency
        exchange += _EXCHANGE_CALLS * kinds * peers * latency
        return StepPrediction(
            dense=self.dense_seconds,
            lookup=float(peak[Load.LOOKUP]) / self.memory_bandwidth,
            all_to_all=float(a2a),
            exchange=float(exchange),
            all_reduce=self.all_reduce(self.dense_bytes + float(peak[Load.REDUCE])),
            overlap=self.overlap,
        )
