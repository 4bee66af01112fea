"""Ranks that exchange rows agree on their dtype, also those that hold no table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import DataType, PoolingType

from tests.npu.ranks import Call, RankPool
from turbogr_plugin.sharding.row_dtypes import exchanged_dtype

RUN = "tests.sharding.lookup_runs:"


@pytest.mark.timeout(120)
def test_a_rank_without_tables_receives_rows_in_fp16(ranks: RankPool) -> None:
    cases: list[dict[str, Any]] = [
        {"kind": "sequence", "device": "cpu", "ours": True},
        {"kind": "pooled", "device": "cpu", "ours": False},
        {"kind": "sequence", "device": "npu", "ours": False},
        {"kind": "pooled", "device": "npu", "ours": True},
    ]
    calls = [
        Call(f"{RUN}train", {**case, "sharding": "on_one_rank", "output": output, "steps": 2}, world_size=2)
        for case in cases
        for output in ("fp32", "fp16")
    ]
    found = [outcome.result() for outcome in ranks.run(calls)]
    for case, full, half in zip(cases, found[::2], found[1::2], strict=True):
        # the weights and gradients are small dyadic numbers, which fp16 holds exactly
        for key in ("losses", "tables"):
            assert [rank[key] for rank in half] == [rank[key] for rank in full], case


def test_torchrec_alone_has_rows_in_fp32_there(ranks: RankPool) -> None:
    ours, stock = ranks.run([Call(f"{RUN}empty_rows", {"stock": stock}, world_size=2) for stock in (False, True)])
    assert ours.result() == [["torch.float16"] * 2] * 2
    assert stock.result() == [["torch.float32"] * 2] * 2


def _group(table: str, output: SparseType | None) -> GroupedEmbeddingConfig:
    return GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=[ShardedEmbeddingTable(num_embeddings=4, embedding_dim=4, name=table)],
        fused_params=None if output is None else {"output_dtype": output},
    )


def test_the_dtype_is_that_of_the_ranks_with_tables() -> None:
    half, full = _group("a", SparseType.FP16), _group("b", None)
    assert exchanged_dtype([[], [half], [half, half]]) == torch.float16
    assert exchanged_dtype([[full], []]) == torch.float32
    assert exchanged_dtype([[], []]) == torch.float32
    # a rank that has both returns the wider one; all that have tables do
    assert exchanged_dtype([[half, full], [], [full, half]]) == torch.float32


def test_ranks_that_would_send_different_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 0 \(tables a\) torch.float16 and rank 2 \(tables b\) torch.bfloat16"):
        exchanged_dtype([[_group("a", SparseType.FP16)], [], [_group("b", SparseType.BF16)]])
