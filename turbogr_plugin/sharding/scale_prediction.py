"""Predicted steps of the paper's models and tables from 8 to thousands of ranks: `turbogr plan`.

    seconds of the dense part = 3 x batch x forward FLOPs of a sample / (peak FLOP/s x utilisation)
    FLOPs of a sample, forward and backward = (6 P + 3 a N D L) N,  P = 5 D^2 L, a = 4 (HSTU); 12 D^2 L, a = 8 (FuXi)

which fits all ten rows of the paper's Table 1 (arXiv 2605.13433; D columns, L blocks, N positions, P parameters). Each
sample looks up N positions and N R negatives of one item table of the KuaiRand-27K vocabulary. What the paper does not
say is an argument here with a stated value: peak and utilisation, and the popularity of items.

Left out: pipelines beyond one figure of overlap, imbalance between ranks, and data loading.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from turbogr_plugin.sharding.access_histogram import AccessHistogram
from turbogr_plugin.sharding.batch_statistics import BatchStatistics
from turbogr_plugin.sharding.hierarchical_planner import HierarchicalShardingPlanner
from turbogr_plugin.sharding.plan_report import Candidate

#: Videos of KuaiRand-27K with at least k exposures, from which popularity classes are cut.
_AT_LEAST = (
    *((1, 32_038_693), (2, 14_731_879), (3, 10_390_415), (5, 6_864_792), (10, 3_921_150), (20, 2_253_502)),
    *((50, 1_041_150), (100, 548_444), (200, 264_836), (350, 131_090), (600, 53_940), (1_000, 20_719)),
    *((1_500, 9_658), (2_000, 5_282), (3_000, 1_978), (4_000, 853), (6_000, 209), (9_000, 24)),
)
_MOST = 15_380


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """A row of the paper's Tables 1 and 9."""

    family: str
    dim: int
    blocks: int
    positions: int
    batch: int
    """Samples per rank."""
    negatives: int = 64
    """Looked up per position."""

    @property
    def parameters(self) -> float:
        """Of the dense part, biases left out."""
        return (5 if self.family == "HSTU" else 12) * self.dim**2 * self.blocks

    @property
    def sample_flops(self) -> float:
        """Forward and backward of one sample at full length."""
        attention = 4 if self.family == "HSTU" else 8
        return (6 * self.parameters + 3 * attention * self.positions * self.dim * self.blocks) * self.positions


def _models() -> dict[str, PaperModel]:
    sizes = {"tiny": (128, 2, 15), "small": (256, 4, 8), "medium": (512, 8, 5), "large": (1024, 16, 2)}
    found = {}
    for family in ("HSTU", "FuXi"):
        for size, (dim, blocks, batch) in sizes.items():
            found[f"{family.lower()}-{size}"] = PaperModel(
                family=family, dim=dim, blocks=blocks, positions=2048, batch=batch
            )
        found[f"{family.lower()}-long"] = PaperModel(family=family, dim=1024, blocks=16, positions=4096, batch=1)
    return found


PAPER_MODELS: Mapping[str, PaperModel] = MappingProxyType(_models())


@dataclass(frozen=True)
class ScalePoint:
    """One number of ranks."""

    ranks: int
    candidates: list[Candidate]
    """By size of groups."""
    chosen: Candidate | None
    """None where nothing fits."""
    why_not: str = ""

    def samples_per_second(self, batch: int) -> float:
        """Of all ranks."""
        assert self.chosen is not None and self.chosen.prediction is not None
        return self.ranks * batch / self.chosen.prediction.step


def kuairand_items(at_least: int) -> AccessHistogram:
    """Popularity of KuaiRand-27K's videos with at least so many exposures, without the data set.

    Between two of the known numbers exposures fall as a power of the rank; seven classes per gap.

    Raises:
        ValueError: no video has so many exposures.
    """
    if not 1 <= at_least < _MOST:
        raise ValueError(f"at_least must be between 1 and {_MOST - 1} exposures, got {at_least}")
    counts: list[float] = [_MOST]
    numbers: list[float] = [1]
    points = [*_AT_LEAST, (_MOST, 1)]
    for (low, above_low), (high, above_high) in itertools.pairwise(points):
        steps = min(7, high - low)
        edges = [low * (high / low) ** (step / steps) for step in range(steps + 1)]
        above = [above_low * (above_high / above_low) ** (step / steps) for step in range(steps + 1)]
        for first, last, many, few in zip(edges, edges[1:], above, above[1:], strict=False):
            if first >= at_least:
                counts.append((first * last) ** 0.5 if last - first > 1 else first)
                numbers.append(many - few)
    return AccessHistogram.from_classes(counts, numbers)


def predict_scale(
    model: PaperModel,
    topologies: Sequence[Topology],
    *,
    access: AccessHistogram,
    peak_flops: float,
    utilisation: float,
    planner: Mapping[str, Any] | None = None,
) -> list[ScalePoint]:
    """Plans a model on clusters of growing size.

    Args:
        model: of `PAPER_MODELS`.
        topologies: one per size.
        access: popularity of the items; its rows are the table's.
        peak_flops: FLOP/s of one device.
        utilisation: share of the peak that the dense part reaches alone, 0 to 1.
        planner: further arguments of HierarchicalShardingPlanner.

    Raises:
        ValueError: a peak that is not positive, or a utilisation outside (0, 1].
    """
    if peak_flops <= 0 or not 0 < utilisation <= 1:
        raise ValueError(f"peak_flops must be positive and utilisation in (0, 1], got {peak_flops} and {utilisation}")
    dense = model.batch * model.sample_flops / (peak_flops * utilisation)
    statistics = BatchStatistics(
        lengths={"history": float(model.positions), "negatives": float(model.positions * model.negatives)},
        access={"item": access},
    )
    features = ["history", "negatives"]
    constraints = {
        "item": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value], pooling_factors=[1.0, 1.0])
    }
    points = []
    for topology in topologies:
        module = _Model(model, access.rows, features)
        plans = HierarchicalShardingPlanner(
            topology=topology,
            batch_size=model.batch,
            storage_reservation=FixedPercentageStorageReservation(0.15),
            constraints=constraints,
            stats=[],
            debug=False,
            batch_statistics=statistics,
            optimizer="EXACT_ROWWISE_ADAGRAD",
            dense_seconds=dense,
            **(planner or {}),
        )
        try:
            plan = plans.plan(module, [EmbeddingCollectionSharder()])
        except PlannerError as error:
            points.append(ScalePoint(topology.world_size, [], None, str(error).strip().splitlines()[0]))
            continue
        assert plan.report is not None
        chosen = next(each for each in plan.report.candidates if each.group_size == plan.group_size)
        points.append(ScalePoint(topology.world_size, plan.report.candidates, chosen))
    return points


def scale_lines(model: PaperModel, points: Sequence[ScalePoint]) -> list[str]:
    """A row per number of ranks; efficiency is throughput per rank against the first row that fits."""
    head = f"{'ranks':>6} {'group':>6} {'step ms':>9} {'dense':>9} {'lookup':>8} {'a2a':>9} {'exchange':>9} "
    lines = [head + f"{'all-reduce':>10} {'comm %':>7} {'samples/s':>10} {'efficiency':>10}"]
    base: float | None = None
    for point in points:
        if point.chosen is None or point.chosen.prediction is None:
            lines.append(f"{point.ranks:>6} {point.why_not}")
            continue
        step = point.chosen.prediction
        rate = point.samples_per_second(model.batch)
        base = base or rate / point.ranks
        exposed = step.communication - step.hidden
        lines.append(
            f"{point.ranks:>6} {point.chosen.group_size:>6} {1e3 * step.step:>9.2f} {1e3 * step.dense:>9.2f} "
            f"{1e3 * step.lookup:>8.2f} {1e3 * step.all_to_all:>9.2f} {1e3 * step.exchange:>9.2f} "
            f"{1e3 * step.all_reduce:>10.2f} {100 * exposed / step.step:>7.1f} {rate:>10.1f} "
            f"{rate / point.ranks / base:>10.3f}"
        )
    return lines


class _Model(nn.Module):
    """The item table and a dense part of the right size, on meta."""

    def __init__(self, model: PaperModel, rows: int, features: list[str]) -> None:
        super().__init__()
        meta = torch.device("meta")
        table = EmbeddingConfig(name="item", num_embeddings=rows, embedding_dim=model.dim, feature_names=features)
        self.items = EmbeddingCollection(tables=[table], device=meta)
        self.dense = nn.Parameter(torch.empty(int(model.parameters), device=meta))
