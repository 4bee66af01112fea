"""TorchRec's own models, small, with their batches: imported from the wheel and wrapped in nothing but a loss.

Values are drawn by name from a CPU generator, so that a model starts the same on any device and in any sharding.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.distributed.test_utils.test_model import TestSparseNN
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.deepfm import DeepFM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DIM = 32
FLOATS = 10
META = torch.device("meta")


class _LogitLoss(nn.Module):
    """Binary cross entropy of a model that takes dense and sparse features and gives logits [B, 1]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        logits = self.model(batch.float_features, batch.idlist_features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.squeeze(-1), batch.label)
        return loss, loss.detach()


class _OwnLoss(nn.Module):
    """A model that computes its loss itself, as TestSparseNN does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        loss, _ = self.model(batch)
        return loss, loss.detach()


class _DeepFMOverBags(nn.Module):
    """torchrec.modules.DeepFM with the embeddings of a collection and a projection of the dense features."""

    def __init__(self, tables: list[EmbeddingBagConfig], device: torch.device) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables, device=META)
        self.project = nn.Linear(FLOATS, DIM, device=device)
        self.features = sum(len(table.feature_names) for table in tables)
        self.deep_fm = DeepFM(nn.Linear((self.features + 1) * DIM, 1, device=device))

    def forward(self, floats: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        # [B, features, DIM]: TorchRec's pipelines trace this forward and cannot iterate over the keys.
        pooled = self.bags(ids).values().unflatten(1, (self.features, DIM))
        logits: Tensor = self.deep_fm([self.project(floats).unsqueeze(1), pooled])
        return logits


@torch.fx.wrap
def _mean_vectors(sequences: dict[str, Any], rows: int) -> Tensor:
    """Mean embedding of each row of each feature, side by side, without reading a length on the host.

    By name: the order in which a sharded EmbeddingCollection returns its features depends on the sharding.
    """
    parts = []
    for _, sequence in sorted(sequences.items()):
        lengths, values = sequence.lengths(), sequence.values()
        row = torch.repeat_interleave(torch.arange(rows, device=lengths.device), lengths, output_size=values.shape[0])
        sums = values.new_zeros(rows, values.shape[1]).index_add(0, row, values)
        parts.append(sums / lengths.clamp(min=1).unsqueeze(1))
    return torch.cat(parts, 1)


class _SequenceModel(nn.Module):
    """An EmbeddingCollection under a linear layer: torchrec's test models have no sequence embeddings that train."""

    def __init__(self, tables: list[EmbeddingConfig], device: torch.device) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables=tables, device=META)
        features = sum(len(table.feature_names) for table in tables)
        self.over = nn.Linear(features * DIM + FLOATS, 1, device=device)

    def forward(self, floats: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        sequences = self.embeddings(ids)
        logits: Tensor = self.over(torch.cat([_mean_vectors(sequences, floats.shape[0]), floats], 1))
        return logits


def bag_tables() -> list[EmbeddingBagConfig]:
    """Three tables, one of them with two features; their rows do not divide by the ranks."""
    return [
        EmbeddingBagConfig(name="t0", embedding_dim=DIM, num_embeddings=61, feature_names=["f0"]),
        EmbeddingBagConfig(name="t1", embedding_dim=DIM, num_embeddings=90, feature_names=["f1", "f2"]),
        EmbeddingBagConfig(name="t2", embedding_dim=DIM, num_embeddings=23, feature_names=["f3"]),
    ]


def weighted_tables() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(name="w0", embedding_dim=DIM, num_embeddings=37, feature_names=["g0"])]


def sequence_tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name="s0", embedding_dim=DIM, num_embeddings=53, feature_names=["q0", "q1"]),
        EmbeddingConfig(name="s1", embedding_dim=DIM, num_embeddings=70, feature_names=["q2"]),
    ]


def build(name: str, device: torch.device) -> nn.Module:
    """The model with its loss: forward gives (loss, detached loss). Tables are on meta, for TorchRec to allocate."""
    if name == "sparse_nn":
        return _OwnLoss(
            TestSparseNN(
                tables=bag_tables(),
                weighted_tables=weighted_tables(),
                num_float_features=FLOATS,
                dense_device=device,
                sparse_device=META,
            )
        )
    if name == "sequence":
        return _LogitLoss(_SequenceModel(sequence_tables(), device))
    if name == "deepfm":
        return _LogitLoss(_DeepFMOverBags(bag_tables(), device))
    bags = EmbeddingBagCollection(tables=bag_tables(), device=META)
    if name == "simple_deepfm":
        return _LogitLoss(SimpleDeepFMNN(FLOATS, bags, hidden_layer_size=16, deep_fm_dimension=8))
    layers = {"dense_arch_layer_sizes": [16, DIM], "over_arch_layer_sizes": [16, 1], "dense_device": device}
    if name == "dlrm":
        return _LogitLoss(DLRM(bags, FLOATS, **layers))
    assert name == "dlrm_dcn", name
    return _LogitLoss(DLRM_DCN(bags, FLOATS, **layers, dcn_num_layers=2, dcn_low_rank_dim=8))


def table_names(name: str) -> list[str]:
    tables = sequence_tables() if name == "sequence" else bag_tables()
    return [table.name for table in tables + (weighted_tables() if name == "sparse_nn" else [])]


@functools.cache
def _batches(kind: str, steps: int, rank: int, rows: int) -> list[ModelInput]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7919 * rank + 1)
        return [
            ModelInput.generate(
                batch_size=rows,
                tables=sequence_tables() if kind == "sequence" else bag_tables(),
                weighted_tables=weighted_tables() if kind == "sparse_nn" else None,
                num_float_features=FLOATS,
                pooling_avg=2,
            )
            for _ in range(steps)
        ]


def batches(name: str, *, steps: int, rank: int, rows: int = 6) -> Iterator[ModelInput]:
    """A rank's batches; rows without ids are among them."""
    return iter(_batches(name if name in ("sequence", "sparse_nn") else "bags", steps, rank, rows))


def initial_value(name: str, shape: torch.Size) -> Tensor:
    """Values in +-1/32 (tables) or +-1/sqrt(inputs) that depend on the parameter's name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / 32 if "embedding" in name else shape[-1] ** -0.5
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


@torch.no_grad()
def set_initial_values(model: nn.Module) -> None:
    """Fills a sharded model, each shard with its part of the whole table."""
    for name, value in model.state_dict().items():
        if name.endswith("dummy_ones"):  # a constant of TestSparseNN
            continue
        whole = initial_value(name, value.size())
        if isinstance(value, ShardedTensor):
            places = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
        elif isinstance(value, DTensor):
            local = value.to_local()
            # A rank without a shard of the table has an empty one, without a place.
            places = list(zip(local.local_shards(), local.local_offsets(), strict=False))
        else:
            places = [(value, [0] * value.dim())]
        for tensor, offsets in places:
            for axis, offset in enumerate(offsets):
                part = whole if axis == 0 else part  # noqa: F821
                part = part.narrow(axis, offset, tensor.shape[axis])
            tensor.copy_(part if offsets else whole)
