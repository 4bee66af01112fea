"""The matrix: which runs are compared between CPU and npu, all of them and a pairwise cover of them.

A case is one training run of one of TorchRec's models. The cover holds every pair of values that occurs in some legal
case (so every model meets every sharding type, every sharding type every pipeline, ...) in about a thirtieth of the
runs. It is greedy and deterministic: the same cases in every process and on every machine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal

Grouping = Literal["strided", "contiguous"]

MODELS = ("dlrm", "dlrm_dcn", "simple_deepfm", "deepfm", "sparse_nn", "sequence")
SHARDINGS = (
    *("row_wise", "table_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel"),
)
#: World size, and how DMPCollection groups it: 4/strided are the groups (0, 2) and (1, 3), 4/contiguous (0, 1), (2, 3).
WORLDS = ("1", "2", "4", "4/strided", "4/contiguous")
PIPELINES = ("base", "sparse_dist", "fused_sparse_dist", "semi_sync")
COMMUNICATIONS = ("fp32", "fp16")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


@dataclass(frozen=True, order=True)
class Case:
    """One run: the values of the constants above."""

    model: str
    sharding: str
    world: str
    pipeline: str
    communication: str
    optimizer: str

    @property
    def name(self) -> str:
        return " ".join(astuple(self))

    @property
    def world_size(self) -> int:
        return int(self.world[0])

    @property
    def grouping(self) -> Grouping | None:
        """How DMPCollection groups the ranks; None is plain DistributedModelParallel."""
        return {"4/strided": "strided", "4/contiguous": "contiguous"}.get(self.world)

    @classmethod
    def parse(cls, name: str) -> Case:
        return cls(*name.split(" "))


def is_legal(case: Case) -> bool:
    """Whether stock TorchRec runs the case on CPU.

    An EmbeddingCollection shards by table, column and row; its data-parallel lookup on CPU pools the sequence (fbgemm
    1.8.0, DenseTableBatchedEmbeddingBagsCodegen ignores PoolingMode.NONE).
    """
    if case.model == "sequence" and case.sharding not in ("row_wise", "table_wise", "column_wise"):
        return False
    # SemiSync looks a batch up before the update of the one before, which changes a data-parallel table in place:
    # autograd refuses that lookup's backward.
    if case.sharding == "data_parallel" and case.pipeline == "semi_sync":
        return False
    return not (case.grouping and case.sharding == "data_parallel")


def all_cases() -> list[Case]:
    """The whole product; the optimizers take turns: they meet the other dimensions in the kernel of a lookup only."""
    product = itertools.product(MODELS, SHARDINGS, WORLDS, PIPELINES, COMMUNICATIONS)
    cases = []
    for model, sharding, world, pipeline, communication in product:
        at = (model, sharding, world, pipeline, communication)
        turn = sum(values.index(value) for values, value in zip(_DIMENSIONS, at, strict=False))
        case = Case(*at, OPTIMIZERS[turn % len(OPTIMIZERS)])
        if is_legal(case):
            cases.append(case)
    return cases


_DIMENSIONS: Sequence[Sequence[str]] = (MODELS, SHARDINGS, WORLDS, PIPELINES, COMMUNICATIONS, OPTIMIZERS)


def _pairs(case: Case) -> set[tuple[int, str, int, str]]:
    values = astuple(case)
    places = range(len(fields(Case)))
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(places, 2)}


@functools.cache
def pairwise_cover() -> tuple[Case, ...]:
    """Cases that hold every pair of values of two dimensions that any legal case holds."""
    legal = [case for at in itertools.product(*_DIMENSIONS) if is_legal(case := Case(*at))]
    pairs = {case: _pairs(case) for case in legal}
    missing = set().union(*pairs.values())
    cover = []
    while missing:
        # The first of the best: a few processes are cheaper than many, so smaller worlds win ties.
        best = max(legal, key=lambda case: (len(pairs[case] & missing), -case.world_size))
        cover.append(best)
        missing -= pairs[best]
    return tuple(cover)
