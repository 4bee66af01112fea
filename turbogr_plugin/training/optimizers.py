"""The two optimizers of a run: row-wise Adagrad fused into the tables' backward, AdamW for the dense part.

Both are TorchRec's own, each under a linear warm-up; the dense gradients are clipped by their norm. The update of a
table happens in backward, before any norm could be known, so table gradients are not clipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from turbogr_plugin.errors import InputError


@dataclass(kw_only=True)
class OptimizerConfig:
    """Learning rates, warm-up and clipping."""

    learning_rate: float = 1e-3
    "Of AdamW, for the dense parameters."
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    "Of AdamW."
    weight_decay: float = 0.0
    "Of AdamW."
    table_learning_rate: float = 0.05
    "Of row-wise Adagrad, for the embedding tables."
    table_eps: float = 1e-8
    "Of row-wise Adagrad."
    clip_norm: float = 1.0
    "Largest norm of all dense gradients together; 0 leaves them unclipped."
    warmup_steps: int = 0
    "Steps over which both learning rates rise linearly from a tenth."

    def __post_init__(self) -> None:
        for name in ("learning_rate", "table_learning_rate", "table_eps"):
            if not getattr(self, name) > 0:
                raise InputError(f"optimizer.{name} must be positive, got {getattr(self, name)}")
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                raise InputError(f"optimizer.{name} must be at least 0, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas must be two numbers in [0, 1), got {self.betas}")


def fuse_table_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
    """Marks table parameters for row-wise Adagrad in backward; call before the model is sharded."""
    apply_optimizer_in_backward(RowWiseAdagrad, parameters, {"lr": config.table_learning_rate, "eps": config.table_eps})


def _warmed_up(optimizer: KeyedOptimizer, learning_rate: float, steps: int, name: str) -> WarmupOptimizer:
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=steps, value=0.1)] if steps else []
    return WarmupOptimizer(optimizer, stages, lr=learning_rate, param_name=f"__warmup_{name}")


def build_optimizer(model: DistributedModelParallel, config: OptimizerConfig) -> CombinedOptimizer:
    """The optimizer that the training pipeline steps: "tables" (fused) and "dense"."""
    dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    beta1, beta2 = config.betas
    dense: KeyedOptimizer = KeyedOptimizerWrapper(
        dense_parameters,
        lambda params: torch.optim.AdamW(
            params, lr=config.learning_rate, betas=(beta1, beta2), weight_decay=config.weight_decay
        ),
    )
    if config.clip_norm:
        dense = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=config.clip_norm)
    return CombinedOptimizer(
        [
            ("tables", _warmed_up(model.fused_optimizer, config.table_learning_rate, config.warmup_steps, "tables")),
            ("dense", _warmed_up(dense, config.learning_rate, config.warmup_steps, "dense")),
        ]
    )
