"""What a plan's figures leave out or assume for its model and topology, in a sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.types import Topology

from turbogr_plugin.sharding.batch_statistics import BatchStatistics, features_of
from turbogr_plugin.sharding.link_bandwidths import link_bandwidths
from turbogr_plugin.sharding.table_options import ListedTable


def planning_notes(
    tables: Sequence[ListedTable],
    topology: Topology,
    *,
    statistics: BatchStatistics,
    dense_seconds: float,
    own_search: bool,
    on_host: Sequence[str],
    remapped: Sequence[str],
) -> list[str]:
    """The notes of a report.

    Args:
        tables: of the model.
        topology: of all ranks.
        statistics: of the batches.
        dense_seconds: as given to the planner.
        own_search: whether our search was asked for.
        on_host: tables that may lie in host memory only.
        remapped: tables of managed collision.
    """
    found = []
    names = [table.options[0].name for table in tables]
    unknown = [name for name in names if name not in statistics.access]
    if unknown:
        found.append(f"popularity unknown, taken as uniform, which makes groups look dearest: {_few(unknown)}")
    features = {
        feature for table in tables for feature in features_of(table.options[0].module[1], table.options[0].name)
    }
    strange = [*sorted(set(statistics.access) - set(names)), *sorted(set(statistics.lengths) - features)]
    if strange:
        found.append(f"statistics of tables and features that the model has not, ignored: {_few(strange)}")
    links = link_bandwidths(topology.comms_bandwidths)
    if links.intra.latency == links.inter.latency == 0:
        found.append("latency is unknown and not counted, so that many small messages look cheap")
    if not dense_seconds:
        found.append("dense_seconds is not given: gains are shares of the communication and lookup alone")
    if remapped:
        found.append(f"one group only, since each group would give ids rows of its own: {_few(remapped)}")
    if on_host:
        found.append(f"TorchRec's search and memory estimate: tables in host memory: {_few(on_host)}")
    elif not own_search:
        found.append("TorchRec's search and memory estimate, as asked for")
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
