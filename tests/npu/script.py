"""The training script of the matrix: what a TorchRec user writes, the same for every device but for `parallel`'s one
class. The losses stay on the device until the steps are done, so that no host read of ours hides one of TorchRec's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineFusedSparseDist, TrainPipelineSemiSync
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.npu import models
from tests.npu.cases import Case
from tests.npu.parallel import device_of, parallel

STEPS = 20
WARM_UP = 4  # steps in which TorchRec and DDP make their index tensors, buckets and counters
# Small steps and small initial values keep the tables below 1/16: where the devices' sums differ in the last bit of
# fp32, an embedding may round to the next fp16 number, which must not be worth 1e-6 of the loss.
_TABLE_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.002, "eps": 1e-6}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.002, "eps": 1e-6}),
}


@dataclass
class Run:
    """What one rank of a case left on one device."""

    losses: list[float] = field(default_factory=list)
    """By step."""
    host_syncs: dict[str, int] = field(default_factory=dict)
    """Waits of the host for the npu in the steps after the warm-up: "operator at file:line < file:line" and count."""
    cpu_fallbacks: dict[str, int] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    """Operators that ran boxed for the npu."""


def _sharded(case: Case, device: torch.device, *, tables_learn: bool) -> DistributedModelParallel:
    model = models.build(case.model, device)
    optimizer, options = _TABLE_OPTIMIZERS[case.optimizer]
    tables = [value for value in model.parameters() if value.is_meta]
    given = dict(options) if tables_learn else options | {"lr": 0.0}  # a copy: TorchRec adds to what it is given
    apply_optimizer_in_backward(optimizer, tables, given)
    return parallel(
        model,
        device,
        dict.fromkeys(models.table_names(case.model), case.sharding),
        columns=models.DIM // 2,
        communication=case.communication,
        grouping=case.grouping,
    )


def _pipeline(case: Case, model: DistributedModelParallel, device: torch.device) -> TrainPipelineBase[Any, Tensor]:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02))
    if case.pipeline == "base":
        return TrainPipelineBase(model, optimizer, device)
    if case.pipeline == "sparse_dist":
        return TrainPipelineSparseDist(model, optimizer, device)
    if case.pipeline == "fused_sparse_dist":
        return TrainPipelineFusedSparseDist(model, optimizer, device)
    return TrainPipelineSemiSync(model, optimizer, device, start_batch=2)


def _train(
    case: Case, device: torch.device, rank: int, steps: int, *, tables_learn: bool
) -> tuple[list[Tensor], Counter[str]]:
    """The losses, still on the device, and the host's waits of the warm-up; simnpu counts from the first step."""
    model = _sharded(case, device, tables_learn=tables_learn)
    models.set_initial_values(model)
    pipeline = _pipeline(case, model, device)
    batches: Iterator[Any] = models.batches(case.model, steps=steps, rank=rank)
    syncs_itself = case.pipeline in ("sparse_dist", "semi_sync")
    losses = []
    before: Counter[str] = Counter()
    for step in range(steps):
        if device.type == "npu" and step in (0, WARM_UP):
            before = _host_syncs(reset=step == 0)
        losses.append(pipeline.progress(batches))
        if case.grouping and not syncs_itself:  # the other pipelines leave the replicas to the user
            model.sync()
    return losses, before


def _host_syncs(*, reset: bool = False) -> Counter[str]:
    """Waits of the host since the last reset, by operator and place."""
    from turbogr_plugin import simnpu

    if reset:
        simnpu.reset()
    found: Counter[str] = Counter()
    for sync in simnpu.host_syncs():
        found[f"{sync.operator} at {' < '.join(sync.where[:6])}"] += sync.count
    return found


def run(name: str, device_type: str, steps: int = STEPS, tables_learn: bool = True) -> dict[str, Any]:
    """One case on one device, in this process as a rank of its world; a Run as a dictionary."""
    device = device_of(device_type)
    losses, before = _train(Case.parse(name), device, dist.get_rank(), steps, tables_learn=tables_learn)
    seen = Run()
    if device_type == "npu":
        from turbogr_plugin import simnpu

        seen.host_syncs = dict(_host_syncs() - before)
        seen.cpu_fallbacks = dict(simnpu.cpu_fallbacks())
        seen.races = [f"{race.kind}: {race.detail}" for race in simnpu.races()]
        seen.executed = sorted(simnpu.executed())
    seen.losses = torch.stack(losses).tolist()
    return asdict(seen)
