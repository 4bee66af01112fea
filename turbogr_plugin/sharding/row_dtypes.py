"""All ranks agree on the dtype of the rows that a sharded embedding collection exchanges.

With `output_dtype` (fused_params, or a table's in the plan) looked-up rows travel in fp16 or bf16. A rank that holds no
table takes part with an empty tensor, which TorchRec makes in fp32 always, and lays out what it receives, and the
gradients that it sends, by the dtype of that: it reads two fp16 numbers as one fp32. Here the empty tensor has the
dtype of the other ranks' rows. Where ranks hold tables of different `output_dtype`, there is no such dtype.

Left out: tables of one rank in different dtypes. torch.cat brings them to the wider one, on every rank alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection


def agree_on_rows(sharded: ShardedEmbeddingCollection | ShardedEmbeddingBagCollection) -> None:
    """Gives the empty tensors of lookups without tables the dtype of the rows that other ranks send.

    Args:
        sharded: a collection whose lookups have been made.

    Raises:
        ValueError: ranks would send rows of different dtypes to each other. Raised on every rank.
    """
    for sharding, lookup in zip(_shardings(sharded), sharded._lookups, strict=True):
        empty = getattr(lookup, "_dummy_embs_tensor", None)
        configs = getattr(sharding, "_grouped_embedding_configs_per_rank", None)
        if isinstance(empty, Tensor) and configs is not None:
            dtype = exchanged_dtype(configs)
            lookup._dummy_embs_tensor = empty.detach().to(dtype).requires_grad_(empty.requires_grad)


def exchanged_dtype(of_ranks: Sequence[Sequence[GroupedEmbeddingConfig]]) -> torch.dtype:
    """The dtype of the rows that the ranks exchange: float32 where none of them holds a table.

    Args:
        of_ranks: the groups of tables of each rank.

    Raises:
        ValueError: it is not the same for all ranks.
    """
    found: dict[torch.dtype, str] = {}
    for rank, groups in enumerate(of_ranks):
        if groups:
            dtypes = [(group.fused_params or {}).get("output_dtype", SparseType.FP32).as_dtype() for group in groups]
            tables = ", ".join(table.name for group in groups for table in group.embedding_tables)
            found.setdefault(functools.reduce(torch.promote_types, dtypes), f"rank {rank} (tables {tables})")
    if len(found) > 1:
        told = " and ".join(f"{where} {dtype}" for dtype, where in found.items())
        raise ValueError(
            f"output_dtype must be the same on all ranks that exchange rows, got {told}; give the tables of one "
            "collection and sharding type one output_dtype"
        )
    return next(iter(found), torch.float32)


def _shardings(
    sharded: ShardedEmbeddingCollection | ShardedEmbeddingBagCollection,
) -> Iterable[EmbeddingSharding[object, object, object, object]]:
    if isinstance(sharded, ShardedEmbeddingCollection):
        return sharded._sharding_type_to_sharding.values()
    return sharded._embedding_shardings
