"""What the tests of TrainPipelineFineGrained run on ranks; each function is one call, see tests/npu/ranks.py."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.train_pipeline.backward_injection import InjectionSite, OutputDistTensorFinder
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import ShardingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.pipeline import small_model
from tests.pipeline.delayed_updates import simulated
from tests.pipeline.fine_grained_models import (
    CPU,
    EPS,
    LEARNING_RATE,
    DyadicBatch,
    DyadicModel,
    batches,
    build,
    dense_optimizer,
    initial_table,
    local_values,
    whole_tables,
)
from tests.sharding import hierarchical_models
from tests.sharding.hierarchical_models import local_rows
from turbogr_plugin.pipeline import Schedule, Stage, TrainPipelineFineGrained, scheduled_stages

BASE, SEMI_SYNC = TrainPipelineBase, TrainPipelineSemiSync


def losses_of(pipeline: Any, source: Iterable[Any]) -> list[Tensor]:
    """What progress gives until the end."""
    return list(small_model.outputs(pipeline, iter(source)))


def trained(kind: Any, case: dict[str, Any], steps: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values of a pipeline."""
    model = build(**case)
    pipeline = kind(model, dense_optimizer(model), model.device, **options)
    losses = torch.stack(losses_of(pipeline, batches(case["name"], steps))).tolist()
    if isinstance(pipeline, TrainPipelineFineGrained):
        pipeline.detach()
        pipeline.close()
    return losses, local_values(model)


def compared(*, case: dict[str, Any], steps: int, options: dict[str, Any], **other: Any) -> dict[str, Any]:
    """TrainPipelineFineGrained against another pipeline: what is equal to the last bit, and how far values moved."""
    kind = {"base": BASE, "semi_sync": SEMI_SYNC}[other.pop("kind", "base")]
    first = local_values(build(**case))
    losses, values = trained(TrainPipelineFineGrained, case, steps, **options)
    expected, theirs = trained(kind, {**case, **other.pop("their_case", {})}, steps, **other.pop("their_options", {}))
    assert not other
    return {
        "steps": len(losses),
        "losses": losses == expected,
        "values": all(torch.equal(values[key], theirs[key]) for key in theirs) and values.keys() == theirs.keys(),
        "moved": min(float((values[key] - first[key]).abs().max()) for key in first if values[key].numel()),
        "seen": [losses, expected],
    }


def against_the_simulation(
    *,
    case: dict[str, Any],
    staleness: list[int],
    options: dict[str, Any],
    switches: dict[str, int] | None = None,
    exact: str = "",
    evaluate_at: list[int] | None = None,
) -> dict[str, Any]:
    """Largest differences from the plain simulation of delayed updates: of a loss at each step, of a weight at the end.

    Args:
        case: for the model `small`.
        staleness: of each step, as the simulation has it.
        options: of the pipeline.
        switches: what `set_staleness` is called with before a step.
        exact: module whose staleness is 0 in each step.
        evaluate_at: steps before which two batches of another iterator are evaluated.
    """
    case, steps, world = {"name": "small", **case}, len(staleness), dist.get_world_size()
    of_ranks = [batches("small", steps, rank) for rank in range(world)]
    model = build(**case)
    layer = model.module.logit
    start = {table: initial_table(table) for table in small_model.ROWS}
    expected = simulated(
        list(zip(*of_ranks, strict=True)),
        staleness,
        start,
        layer.weight.detach().cpu().clone(),
        layer.bias.detach().cpu().clone(),
        learning_rate=LEARNING_RATE,
        eps=EPS,
        exact={"": [], "bags": ["bag_a", "bag_b"], "sequences": ["sequence"]}[exact],
    )
    pipeline: Any = TrainPipelineFineGrained(model, dense_optimizer(model), model.device, **options)
    if exact:
        pipeline.set_staleness(options["staleness"], exact=[exact])
    source, other = iter(of_ranks[dist.get_rank()]), iter(batches("small", 100, 77))
    losses: list[float] = []
    for step in range(steps):
        if step in (evaluate_at or []):
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    pipeline.progress(other)
            model.train()
        if str(step) in (switches or {}):
            pipeline.set_staleness((switches or {})[str(step)])
        losses.append(float(pipeline.progress(source)))
    try:
        pipeline.progress(source)
        raise AssertionError("there is no further batch")
    except StopIteration:
        pass
    pipeline.detach()
    pipeline.close()
    rank = dist.get_rank()
    errors = [abs(loss - of_step[rank]) for loss, of_step in zip(losses, expected.losses, strict=True)]
    weight, bias = layer.weight.detach().cpu(), layer.bias.detach().cpu()
    ends = [float((weight - expected.weight).abs().max()), float((bias - expected.bias).abs().max())]
    for table, ((row, column), rows) in local_rows(model):
        whole = expected.tables[table][row : row + rows.size(0), column : column + rows.size(1)]
        ends.append(float((rows.cpu() - whole).abs().max()) if rows.numel() else 0.0)
    return {"losses": errors, "values": max(ends), "seen": losses}


def hooked(*, staleness: int) -> list[str]:
    """Modules whose backward hooks have run, in order, over four steps."""
    model, calls = build("small"), []
    pipeline: Any = TrainPipelineFineGrained(model, dense_optimizer(model), CPU, staleness=staleness)
    for module in ("bags", "sequences"):
        site = InjectionSite(fqn=module, tensor_finder=OutputDistTensorFinder(sharding_type=ShardingType.ROW_WISE))
        pipeline.register_backward_hook(site, lambda _, module=module: calls.append(module))
    losses_of(pipeline, batches("small", 4))
    return calls


class _Bags(small_model.Model):
    """Rank 0 learns nothing from its bags: their part of the loss has no gradient, or (plain) one of zeros."""

    plain = False

    def forward(self, batch: small_model.Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.ids).values()
        sequence = self.sequences(batch.ids)["sequence"]
        if dist.get_rank() == 0:
            pooled = pooled * 0 if self.plain else pooled.detach() * 0
        rows = small_model.sum_of_rows(sequence.values(), sequence.lengths())
        loss = self.logit(torch.cat([pooled, rows, batch.floats], dim=1)).square().mean()
        return loss, loss.detach()


def without_gradient_on_a_rank() -> dict[str, bool]:
    """Whether the other ranks' gradients reach the tables all the same, as with gradients of zeros."""
    found = []
    with patch.object(small_model, "Model", _Bags):
        for kind in (TrainPipelineFineGrained, BASE):
            with patch.object(_Bags, "plain", kind is BASE):
                found.append(trained(kind, {"name": "small"}, 4))
    (losses, values), (expected, theirs) = found
    return {"losses": losses == expected, "values": all(torch.equal(values[key], theirs[key]) for key in theirs)}


def groups_against_one(*, steps: int, group: int) -> dict[str, float]:
    """Largest difference of a weight, over the largest weight, between groups under the pipeline and one without."""
    tables = []
    for kind, case in ((BASE, {"name": "small"}), (TrainPipelineFineGrained, {"name": "small", "group": group})):
        model = build(**case)
        pipeline = kind(model, dense_optimizer(model), CPU)
        losses_of(pipeline, batches("small", steps))
        tables.append(whole_tables(model))
    return {
        table: float((tables[0][table] - tables[1][table]).abs().max() / tables[0][table].abs().max())
        for table in tables[0]
    }


def dyadic(*, steps: int, group: int, device_type: str = "cpu", **options: Any) -> dict[str, bool]:
    """Whether groups under the pipeline end as one without, to the last bit, where sums do not round."""
    found = []
    with patch.object(hierarchical_models, "Model", DyadicModel):
        for kind, size in ((BASE, None), (TrainPipelineFineGrained, group)):
            model = hierarchical_models.build(size, optimizer="EXACT_ADAGRAD", device=device_type)
            before, _ = hierarchical_models.gathered(model, size or dist.get_world_size())
            dense = dict(in_backward_optimizer_filter(model.named_parameters()))
            optimizer = KeyedOptimizerWrapper(dense, lambda values: torch.optim.SGD(values, lr=0.125))
            pipeline = kind(model, optimizer, model.device, **(options if kind is TrainPipelineFineGrained else {}))
            losses = losses_of(pipeline, [DyadicBatch.of(step) for step in range(steps)])
            tables, replicas = hierarchical_models.gathered(model, size or dist.get_world_size())
            found.append((torch.stack(losses).tolist(), tables, replicas, before))
    (expected, theirs, _, before), (losses, tables, replicas, _) = found
    return {
        "losses": losses == expected,
        "tables": all(torch.equal(tables[name], theirs[name]) for name in theirs),
        "replicas": replicas,
        "moved": all(not torch.equal(before[name], theirs[name]) for name in theirs),
    }


def averaged(*, interval: int | None) -> dict[str, bool]:
    """TorchRec's averaging of groups by its pipeline and by ours."""
    found = []
    for kind in (TrainPipelineSparseDist, TrainPipelineFineGrained):
        case = {"name": "small", "group": 1, "sync": "average"}
        found.append(trained(kind, case, 6, dmp_collection_sync_interval_batches=interval))
    (expected, theirs), (losses, values) = found
    return {"losses": losses == expected, "values": all(torch.equal(values[key], theirs[key]) for key in theirs)}


def lane_of_the_sparse_side(*, own_group: bool) -> dict[str, Any]:
    """Threads of the sparse stages, and reasons that users were told for their not being a lane's."""
    reasons, threads = [], set()
    with patch.object(scheduled_stages, "warn_inline", reasons.append):
        model = build("small", own_group=own_group)
        stage = Stage(name="look", lane="sparse", work=lambda _context: threads.add(threading.current_thread().name))
        pipeline: Any = TrainPipelineFineGrained(
            model, dense_optimizer(model), CPU, schedule=Schedule().with_stage(stage)
        )
        for _ in range(2):
            losses_of(pipeline, batches("small", 3))
            pipeline.detach()
    return {"threads": sorted(threads), "reasons": reasons}
