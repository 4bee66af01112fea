"""Runs of test_table_choice.py on ranks; see tests/npu/ranks.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from tests.pipeline import small_model
from tests.pipeline.fine_grained_models import CPU, batches, build, dense_optimizer, local_values
from tests.pipeline.fine_grained_runs import losses_of
from turbogr_plugin.pipeline import TrainPipelineFineGrained


def alphas_of(steps: int, world: int) -> dict[str, float]:
    """alpha of each table of the small model, pair of lookups by pair."""
    found = {}
    for table in small_model.ROWS:
        of_steps = [
            [row for rank in range(world) for row in batches("small", steps, rank)[step].ids[table].values().tolist()]
            for step in range(steps)
        ]
        pairs = [pair for one, other in itertools.pairwise(of_steps) for pair in itertools.product(one, other)]
        found[table] = sum(one == other for one, other in pairs) / len(pairs)
    return found


def chosen(
    *, limit: float, staleness: int, start_batch: int, steps: int, expected: dict[str, Any], own_group: bool = True
) -> dict[str, Any]:
    """A run that chooses against one that is told: losses, values, and what was measured.

    Args:
        limit, staleness, start_batch: of the pipeline that chooses.
        steps: of both.
        expected: arguments of `set_staleness` of the other one, given before batch `start_batch`.
        own_group: of the tables.
    """
    ends = []
    for choosing in (True, False):
        model = build("small", own_group=own_group)
        options: dict[str, Any] = {"staleness": staleness, "start_batch": start_batch, "staleness_limit": limit}
        pipeline: Any = TrainPipelineFineGrained(model, dense_optimizer(model), CPU, **(options if choosing else {}))
        source = iter(batches("small", steps))
        losses = [pipeline.progress(source) for _ in range(start_batch)]
        assert pipeline.staleness_choice is None
        if not choosing:
            pipeline.set_staleness(**expected)
        losses += losses_of(pipeline, source)
        pipeline.detach()
        pipeline.close()
        ends.append((torch.stack(losses).tolist(), local_values(model), pipeline.staleness_choice))
    (losses, values, choice), (told_losses, told_values, _) = ends
    measured = {each.table.table: each.alpha for each in choice.tables}
    truth = alphas_of(start_batch, dist.get_world_size())
    return {
        "losses": losses == told_losses,
        "values": all(torch.equal(values[key], told_values[key]) for key in values),
        "modules": choice.modules,
        "error": max(abs(measured[table] - truth[table]) for table in truth),
        "alphas": measured,
        "steps": choice.steps,
    }


def rates(*, staleness: int, steps: int) -> dict[str, Any]:
    """Final values under a learning rate that changes at every step, against TorchRec's plain pipeline."""
    from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase
    from torchrec.optim.keyed import CombinedOptimizer
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    ends = []
    for kind, options in ((TrainPipelineFineGrained, {"staleness": staleness}), (TrainPipelineBase, {})):
        model = build("small")
        stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=2 * steps, value=0.1)]
        tables = WarmupOptimizer(model.fused_optimizer, stages, lr=0.5)
        optimizer = CombinedOptimizer([("tables", tables), ("dense", dense_optimizer(model))])
        pipeline: Any = kind(model, optimizer, CPU, **options)
        losses = torch.stack(losses_of(pipeline, batches("small", steps))).tolist()
        if isinstance(pipeline, TrainPipelineFineGrained):
            pipeline.detach()
            pipeline.close()
        rate = [float(each) for each in _rates(model)]
        ends.append((losses, local_values(model), rate))
    (losses, values, rate), (theirs, their_values, their_rate) = ends
    return {
        "losses": losses == theirs,
        "values": all(torch.equal(values[key], their_values[key]) for key in values),
        "rates": [rate, their_rate],
        "seen": [losses, theirs],
    }


def _rates(model: Any) -> list[torch.Tensor]:
    from turbogr_plugin.sharding.jagged_lookup import table_modules

    return [tables.learning_rate_tensor for tables in table_modules(model) if hasattr(tables, "learning_rate_tensor")]
