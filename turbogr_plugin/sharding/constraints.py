"""What TorchRec's planner may choose for sequence embedding tables."""

from __future__ import annotations

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType


def sequence_table_constraints(tables: list[str]) -> dict[str, ParameterConstraints]:
    """Planner constraints that keep EmbeddingCollection tables off data-parallel and column-wise sharding.

    fbgemm's dense table-batched embedding ignores PoolingMode.NONE on CPU, so a data-parallel EmbeddingCollection
    breaks there (torchrec 1.8.0, distributed/batched_embedding_kernel.py:2890), and its gradient would be averaged
    apart from the others. Column-wise shards hold no whole row, which full-corpus evaluation needs.
    """
    allowed = [ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value]
    return {table: ParameterConstraints(sharding_types=allowed) for table in tables}
