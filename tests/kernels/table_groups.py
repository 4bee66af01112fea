"""Groups of embedding tables for the tests of fbgemm's lookups: batches, modules in both forms, a float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor

from turbogr_plugin.kernels.fbgemm_lookup import operator_function

OPTIMIZER_TYPES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "partial_rowwise_lamb": EmbOptimType.PARTIAL_ROWWISE_LAMB,
    "lars_sgd": EmbOptimType.LARS_SGD,
}
POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "sequence": PoolingMode.NONE}


@dataclass(frozen=True)
class Group:
    """Tables as (rows, width), and the table of each feature."""

    tables: tuple[tuple[int, int], ...]
    features: tuple[int, ...]

    @property
    def widths(self) -> list[int]:
        """Width of each feature."""
        return [self.tables[table][1] for table in self.features]


UNIFORM = Group(((11, 8), (7, 8)), (0, 0, 1))  # two features share the first table
MIXED = Group(((11, 8), (7, 4), (5, 12)), (0, 1, 1, 2))


@dataclass
class Batch:
    """Ids with duplicates: features in order, samples in each."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    by_rank: list[list[int]] | None = None
    """Variable batch sizes, by feature and rank."""

    def bags(self, features: int) -> list[tuple[int, int]]:
        """(feature, sample in the feature) of each bag."""
        if self.by_rank is None:
            size = (len(self.offsets) - 1) // features
            return [(feature, sample) for feature in range(features) for sample in range(size)]
        return [(feature, sample) for feature, sizes in enumerate(self.by_rank) for sample in range(sum(sizes))]


def make_batch(
    group: Group,
    generator: torch.Generator,
    *,
    size: int = 6,
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
    by_rank: list[list[int]] | None = None,
) -> Batch:
    """A batch whose bags hold 0 to 4 ids of the first rows of a table, so that most ids come several times."""
    sizes = [sum(ranks) for ranks in by_rank] if by_rank else [size] * len(group.features)
    lengths = torch.randint(0, 5, (sum(sizes),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids, bag = [], 0
    for table, count in zip(group.features, sizes, strict=True):
        number = int(lengths[bag : bag + count].sum())
        ids.append(torch.randint(0, max(group.tables[table][0] - 2, 1), (number,), generator=generator))
        bag += count
    indices = torch.cat(ids).to(dtype)
    weights = torch.randint(1, 9, (len(indices),), generator=generator) / 4 if weighted else None
    return Batch(indices, offsets.to(dtype), weights, by_rank)


def dyadic(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Small multiples of 1/8: their sums and products are exact in float32."""
    return torch.randint(-16, 17, tuple(shape), generator=generator) / 8


def make_module(group: Group, optimizer: str, *, accelerator: bool, device: str = "cpu", **arguments: Any) -> Any:
    """fbgemm's module on the CPU, or in the form that the tables of an accelerator have."""
    location = EmbeddingLocation.DEVICE if accelerator else EmbeddingLocation.HOST
    kind = ComputeDevice.CUDA if accelerator else ComputeDevice.CPU
    given: dict[str, Any] = {"learning_rate": 0.25, "eps": 0.5, "bounds_check_mode": BoundsCheckMode.NONE, **arguments}
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, location, kind) for rows, width in group.tables],
        feature_table_map=list(group.features),
        optimizer=OPTIMIZER_TYPES[optimizer],
        device=torch.device(device),
        **given,
    )


@contextmanager
def our_kernels(implementation: str | None = "reference") -> Iterator[None]:
    """fbgemm's modules call our functions, also for tensors on the CPU; by default the one that npu shares."""
    with mock.patch.multiple(
        torch.ops.fbgemm,
        create=True,
        **{
            f"split_embedding_codegen_lookup_{name}_function_pt2": operator_function(name, implementation)
            for name in OPTIMIZER_TYPES
        },
    ):
        yield


def fill(module: Any, generator: torch.Generator) -> list[Tensor]:
    """Gives a module's tables small multiples of 1/8; returns them."""
    for table in module.split_embedding_weights():
        table.copy_(dyadic(table.shape, generator))
    return [table.clone() for table in module.split_embedding_weights()]


def run(module: Any, batch: Batch, gradient: Tensor | Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    """One step; returns the output and the gradient of the weights of the ids."""
    weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
    output = module(
        batch.indices.clone(), batch.offsets.clone(), weights, batch_size_per_feature_per_rank=batch.by_rank
    )
    output.backward(gradient(output) if callable(gradient) else gradient)
    return output.detach(), None if weights is None else weights.grad


def states_of(module: Any) -> list[Tensor]:
    """All optimizer states of all tables."""
    return [state for states in module.split_optimizer_states() for state in states]


@dataclass
class Oracle:
    """Tables, states and their update in float64, one row after the other, written from the papers' formulas."""

    group: Group
    optimizer: str
    weights: list[Tensor]
    learning_rate: float = 0.25
    eps: float = 0.5
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE
    max_norm: float = 0.0
    momentum: float = 0.9
    eta: float = 0.001
    max_gradient: float = math.inf
    steps: int = 0
    state: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = [table.double().clone() for table in self.weights]

    def bag_sums(self, batch: Batch, pooling: str) -> list[Tensor]:
        """The pooled bags, or with "sequence" the rows."""
        found = []
        for bag, (feature, _) in enumerate(batch.bags(len(self.group.features))):
            table = self.weights[self.group.features[feature]]
            positions = range(int(batch.offsets[bag]), int(batch.offsets[bag + 1]))
            rows = [table[int(batch.indices[position])] * self._factor(batch, position) for position in positions]
            if pooling == "sequence":
                found += rows
                continue
            total = sum(rows, torch.zeros(table.shape[1], dtype=torch.float64))
            found.append(total / max(len(rows), 1) if pooling == "mean" else total)
        return found

    def step(self, batch: Batch, pooling: str, bag_gradients: list[Tensor]) -> None:
        """Updates every row that the batch names, once.

        Args:
            bag_gradients: gradient of each pooled bag, or with "sequence" of each row.
        """
        self.steps += 1
        sums: dict[tuple[int, int], Tensor] = {}
        for bag, (feature, _) in enumerate(batch.bags(len(self.group.features))):
            begin, end = int(batch.offsets[bag]), int(batch.offsets[bag + 1])
            for position in range(begin, end):
                gradient = bag_gradients[position if pooling == "sequence" else bag].double()
                gradient = gradient.clamp(-self.max_gradient, self.max_gradient) * self._factor(batch, position)
                key = (self.group.features[feature], int(batch.indices[position]))
                sums[key] = sums.get(key, 0.0) + (gradient / (end - begin) if pooling == "mean" else gradient)
        for key, gradient in sums.items():
            self._update(key, gradient)

    def _factor(self, batch: Batch, position: int) -> float:
        return 1.0 if batch.weights is None else float(batch.weights[position])

    def _update(self, key: tuple[int, int], gradient: Tensor) -> None:
        row = self.weights[key[0]][key[1]]
        state = self.state.setdefault(key, {"first": torch.zeros_like(row), "second": 0.0, "updates": 0})
        state["updates"] += 1
        name, rate, decay = self.optimizer, self.learning_rate, self.weight_decay
        if name == "sgd":
            row -= rate * gradient
        elif name == "adagrad":
            state["second"] = state["second"] + gradient**2
            row -= rate * gradient / (state["second"] ** 0.5 + self.eps)
        elif name == "rowwise_adagrad":
            regularised = gradient + (decay * row if self.weight_decay_mode == WeightDecayMode.L2 else 0.0)
            state["second"] = state["second"] + (regularised**2).mean()
            if self.weight_decay_mode == WeightDecayMode.DECOUPLE:
                row *= 1 - rate * decay
            row -= (
                rate * regularised / (state["second"] ** 0.5 + self.eps)
                if (self.weight_decay_mode == WeightDecayMode.L2)
                else rate * gradient / (state["second"] ** 0.5 + self.eps)
            )
            if 0 < self.max_norm < row.norm():
                row *= self.max_norm / row.norm()
        elif name == "lars_sgd":
            local = rate * self.eta * row.norm() / (gradient.norm() + decay * row.norm())
            state["first"] = self.momentum * state["first"] + local * (gradient + decay * row)
            row -= state["first"]
        else:
            squares = (gradient**2).mean() if name.startswith("partial_rowwise") else gradient**2
            state["first"] = self.beta1 * state["first"] + (1 - self.beta1) * gradient
            state["second"] = self.beta2 * state["second"] + (1 - self.beta2) * squares
            steps = state["updates"] if name == "rowwise_counted_adam" else self.steps
            first = state["first"] / (1 - self.beta1**steps)
            second = state["second"] / (1 - self.beta2**steps)
            step = first / (second**0.5 + self.eps) + decay * row
            row -= rate * step * (row.norm() / step.norm() if name.endswith("lamb") else 1.0)


def split_output(output: Tensor, group: Group, batch: Batch, pooling: str) -> list[Tensor]:
    """The bags of fbgemm's output, in the order of the bags; without pooling the rows."""
    if pooling == "sequence":
        return list(output)
    widths, bags = group.widths, batch.bags(len(group.features))
    if batch.by_rank is None:
        columns = [sum(widths[:feature]) for feature in range(len(widths))]
        return [output[sample, columns[feature] : columns[feature] + widths[feature]] for feature, sample in bags]
    found: dict[tuple[int, int], Tensor] = {}
    begin = 0
    for rank in range(len(batch.by_rank[0])):
        for feature, sizes in enumerate(batch.by_rank):
            for sample in range(sizes[rank]):
                found[feature, sum(sizes[:rank]) + sample] = output[begin : begin + widths[feature]]
                begin += widths[feature]
    return [found[bag] for bag in bags]


__all__ = [
    "MIXED",
    "OPTIMIZER_TYPES",
    "POOLING",
    "UNIFORM",
    "Batch",
    "BoundsCheckMode",
    "Group",
    "Oracle",
    "SparseType",
    "WeightDecayMode",
    "dyadic",
    "fill",
    "make_batch",
    "make_module",
    "our_kernels",
    "run",
    "split_output",
    "states_of",
]
