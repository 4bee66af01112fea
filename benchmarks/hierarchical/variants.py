"""The ways of sharding that are compared, and the model sharded in one of them."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ModuleSharder

from benchmarks.hierarchical.workload import FEATURE, SAMPLES, TABLE, Model, Workload
from turbogr_plugin.sharding import HierarchicalModelParallel, HierarchicalShardingPlanner
from turbogr_plugin.sharding.access_histogram import AccessHistogram
from turbogr_plugin.sharding.batch_statistics import BatchStatistics
from turbogr_plugin.sharding.hierarchical_plan import HierarchicalShardingPlan

CPU = torch.device("cpu")
OPTIMIZER = EmbOptimType.EXACT_ROWWISE_ADAGRAD


@dataclass(frozen=True)
class Variant:
    """One way of sharding the table over four ranks."""

    name: str
    group_size: int
    fp16: bool = False
    """On the wire: of TorchRec's all-to-all where all ranks form one group, else of the exchange between groups."""

    @property
    def wire(self) -> torch.dtype:
        """The dtype of gradients between groups."""
        return torch.float16 if self.fp16 else torch.float32


PLAIN, PLAIN_FP16 = Variant("plain", 4), Variant("plain fp16", 4, fp16=True)
GROUPS, GROUPS_FP16 = Variant("2 groups", 2), Variant("2 groups fp16", 2, fp16=True)
ALONE, ALONE_FP16 = Variant("4 groups", 1), Variant("4 groups fp16", 1, fp16=True)
VARIANTS = (PLAIN, PLAIN_FP16, GROUPS, GROUPS_FP16, ALONE, ALONE_FP16)


def quiet() -> None:
    """Keeps what TorchRec says of models without memory, and of its own arguments, out of the output."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)


def planned(
    variant: Variant, workload: Workload, rows: int, topology: Topology, dense_seconds: float, *, group_size: int = 0
) -> HierarchicalShardingPlan:
    """The plan of one variant, with what the planner predicts for it.

    Args:
        variant: sizes of groups and wire.
        workload: lookups and popularity.
        rows: of the table.
        topology: of all ranks, with the links' speeds.
        dense_seconds: of the dense part.
        group_size: in place of the variant's.
    """
    planner = HierarchicalShardingPlanner(
        topology=topology,
        batch_size=SAMPLES,
        group_size=group_size or variant.group_size,
        wire_dtype=variant.wire,
        batch_statistics=BatchStatistics(
            lengths={FEATURE: workload.lookups / SAMPLES},
            access={TABLE: AccessHistogram.from_classes(*map(np.ndarray.tolist, workload.popularity()))},
        ),
        constraints={TABLE: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])},
        optimizer=OPTIMIZER,
        dense_seconds=dense_seconds,
        debug=False,
        stats=[],
    )
    plan = planner.plan(Model(workload, rows), [_sharder(variant)])
    assert isinstance(plan, HierarchicalShardingPlan)
    return plan


def sharded(variant: Variant, workload: Workload, rows: int, topology: Topology) -> nn.Module:
    """The model of a variant, the same initial weights on every rank."""
    torch.manual_seed(0)
    sharders = [_sharder(variant)]
    plan = planned(variant, workload, rows, topology, 0.0)
    model = Model(workload, rows)
    if variant.group_size == dist.get_world_size():
        return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    return HierarchicalModelParallel(model, device=CPU, plan=plan, sharders=sharders, wire_dtype=variant.wire)


def _sharder(variant: Variant) -> ModuleSharder[nn.Module]:
    codecs = None
    if variant is PLAIN_FP16:
        codecs = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16), device=CPU
        )
    return cast(
        "ModuleSharder[nn.Module]",
        EmbeddingCollectionSharder({"learning_rate": 0.1, "optimizer": OPTIMIZER}, qcomm_codecs_registry=codecs),
    )
