"""Both optimizers step by step against their formulas, on a sharded model of one rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv

from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.optimizers import OptimizerConfig, build_optimizer, fuse_table_optimizer

ROWS, DIM = 6, 4
STEPS = 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])
        self.embeddings = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.dense = nn.Linear(DIM, 3)

    def forward(self, features: KeyedJaggedTensor, target: Tensor) -> Tensor:
        return ((self.dense(self.embeddings(features)["f"].values()) - target) ** 2).sum()


def _batch(step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """Five tokens, some of the same item."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS - 1, (5,), generator=generator)  # the last row is never looked up
    features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.tensor([2, 3]))
    return features, 3 * torch.randn(5, 3, generator=generator)


def _train(config: OptimizerConfig) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The parameters after 0, 1, ... steps, and the norm of the dense gradient of each step before clipping."""
    with process_group(torch.device("cpu"), timeout=timedelta(seconds=20)) as group:
        torch.manual_seed(0)
        model = Model()
        fuse_table_optimizer(model.embeddings.parameters(), config)
        sharders = [EmbeddingCollectionSharder()]
        plan = EmbeddingShardingPlanner(
            topology=Topology(world_size=1, compute_device="cpu"),
            constraints={"t": ParameterConstraints(sharding_types=["row_wise"])},
        ).collective_plan(model, sharders, group)
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(group),
            device=torch.device("cpu"),
            plan=plan,
            sharders=sharders,
        )
        weight = sharded.state_dict()["embeddings.embeddings.t.weight"].local_shards()[0].tensor
        with torch.no_grad():
            weight.copy_(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)))

        def parameters() -> dict[str, Tensor]:
            dense = {n: p for n, p in sharded.named_parameters() if "dense" in n}
            return {
                "table": weight.double().clone(),
                **{n.rsplit(".", 1)[-1]: p.detach().double().clone() for n, p in dense.items()},
            }

        optimizer = build_optimizer(sharded, config)
        history, norms = [parameters()], []
        for step in range(STEPS):
            optimizer.zero_grad()
            sharded(*_batch(step)).backward()
            grads = [p.grad for n, p in sharded.named_parameters() if "dense" in n and p.grad is not None]
            norms.append(float(torch.cat([g.flatten() for g in grads]).double().norm()))
            optimizer.step()
            history.append(parameters())
        return history, norms


def _gradients(state: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    features, target = _batch(step)
    outputs = leaves["table"][features.values()] @ leaves["weight"].T + leaves["bias"]
    loss = ((outputs - target.double()) ** 2).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def _expected(config: OptimizerConfig, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Row-wise Adagrad and AdamW (with decoupled decay, Loshchilov and Hutter 2019), written out."""
    history = [state]
    sums = torch.zeros(ROWS, 1, dtype=torch.float64)
    beta1, beta2 = config.betas
    first = {name: torch.zeros_like(state[name]) for name in ("weight", "bias")}
    second = {name: torch.zeros_like(state[name]) for name in ("weight", "bias")}
    for step in range(STEPS):
        rise = 1.0 if step >= config.warmup_steps else 0.1 + 0.9 * step / config.warmup_steps
        gradients = _gradients(state, step)
        new = {}
        sums = sums + (gradients["table"] ** 2).mean(1, keepdim=True)
        new["table"] = state["table"] - config.table_learning_rate * rise * gradients["table"] / (
            sums.sqrt() + config.table_eps
        )
        norm = torch.cat([gradients[name].flatten() for name in first]).norm()
        clip = min(1.0, config.clip_norm / float(norm)) if config.clip_norm else 1.0
        for name in first:
            gradient, rate = gradients[name] * clip, config.learning_rate * rise
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            mean, square = first[name] / (1 - beta1 ** (step + 1)), second[name] / (1 - beta2 ** (step + 1))
            new[name] = state[name] * (1 - rate * config.weight_decay) - rate * mean / (square.sqrt() + 1e-8)
        history.append(state := new)
    return history


@pytest.mark.parametrize(
    "changes",
    [{}, {"warmup_steps": 4}, {"warmup_steps": 4, "clip_norm": 0.0, "weight_decay": 0.2}, {"clip_norm": 1000.0}],
    ids=str,
)
def test_parameters_follow_the_formulas_of_both_optimizers(changes: dict[str, Any]) -> None:
    config = OptimizerConfig(learning_rate=0.02, table_learning_rate=0.3, betas=[0.8, 0.95], **changes)
    found, norms = _train(config)
    expected = _expected(config, found[0])
    assert min(norms) > 1.0 and max(norms) < 1000  # a clip at 1 takes part in every step, one at 1000 in none
    for step, (got, want) in enumerate(zip(found, expected, strict=True)):
        for name, value in want.items():
            torch.testing.assert_close(
                got[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=f"{name} after {step}": f"{at}: {text}"
            )
    assert torch.equal(found[-1]["table"][-1], found[0]["table"][-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: 0.0}, f"optimizer.{name} must be positive") for name in ("learning_rate", "table_eps")),
        ({"table_learning_rate": float("nan")}, "optimizer.table_learning_rate must be positive, got nan"),
        *(
            ({name: -1}, f"optimizer.{name} must be at least 0")
            for name in ("weight_decay", "clip_norm", "warmup_steps")
        ),
        ({"betas": [0.9]}, r"optimizer.betas must be two numbers in \[0, 1\)"),
        ({"betas": [0.9, 1.0]}, "optimizer.betas must be two numbers"),
    ],
    ids=str,
)
def test_a_config_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OptimizerConfig(**changes)
